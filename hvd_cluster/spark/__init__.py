"""Training inside of Spark: a function on several workers, each beside a task of one barrier stage.

::

    losses = hvd_cluster.spark.run(train, args=(0.1,), num_proc=4)

A name loads at its first use: a worker reads rows without the parts that start jobs, which take a second to load.
"""

from typing import TYPE_CHECKING

import executors.agents.spark  # noqa: F401  says how to install PySpark where it is missing
from collectives import facade

if TYPE_CHECKING:
    from hvd_cluster.spark.dataframe import run_on_dataframe
    from hvd_cluster.spark.function_job import run, run_elastic
    from hvd_cluster.spark.rows.batches import Shard
    from hvd_cluster.spark.rows.elastic_shard import ElasticShard
else:
    __getattr__ = facade(
        __name__,
        {
            "dataframe": "run_on_dataframe",
            "function_job": "run run_elastic",
            "rows.batches": "Shard",
            "rows.elastic_shard": "ElasticShard",
        },
    )

__all__ = ["ElasticShard", "Shard", "run", "run_elastic", "run_on_dataframe"]
