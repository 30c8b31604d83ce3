"""Workers beside the tasks of a barrier stage of Spark.

The driver starts a ``stage`` (``job``), and waits for its workers (``waiting``); ``session`` is the active session, and
``plan`` the data for all tasks. Each ``task`` finds the others by a ``rendezvous``, starts its ``worker`` and feeds it.
It has a ``connection`` to the ``console`` of the driver, or yields its outcome as rows (``results``). Tasks that all
have one find each other there: ``meeting`` is their side, and ``exchange`` the driver's. In an elastic job
(``elastic``) each task is the agent of one slot (``elastic_task``).
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from collectives import facade

if find_spec("pyspark") is None:  # an import would take a worker, which does not need it, half a second
    raise ImportError('hvd_cluster.spark needs PySpark, which is not installed: pip install "hvd-cluster[spark]"')

if TYPE_CHECKING:
    from executors.agents.spark.broadcasts import PickledCall
    from executors.agents.spark.elastic import run_elastic_on_spark
    from executors.agents.spark.job import run_on_spark
    from executors.agents.spark.plan import DEVICES, PARTITION, Feeder, FeedingTask, SparkOptions
    from executors.agents.spark.session import Session
else:
    __getattr__ = facade(
        __name__,
        {
            "broadcasts": "PickledCall",
            "elastic": "run_elastic_on_spark",
            "job": "run_on_spark",
            "plan": "DEVICES Feeder FeedingTask PARTITION SparkOptions",
            "session": "Session",
        },
    )
