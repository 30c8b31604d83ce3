"""Workers beside the tasks of a barrier stage of Spark.

The driver starts a ``stage`` (``job``), and waits for its workers (``waiting``); ``session`` is the active session, and
``plan`` the data for all tasks. Each ``task`` finds the others by a ``rendezvous``, starts its ``worker`` and feeds it.
It has a ``connection`` to the ``console`` of the driver, or yields its outcome as rows (``results``). In an elastic job
(``elastic``) each task is the agent of one slot (``elastic_task``).
"""

try:
    import pyspark as pyspark
except ModuleNotFoundError as error:
    if error.name != "pyspark":
        raise
    raise ImportError(
        'hvd_cluster.spark needs PySpark, which is not installed: pip install "hvd-cluster[spark]"'
    ) from error
