"""``spark-submit compute_worker.py CONFIGFILE``, or with ``python -m``: a data service in the executors of Spark.

::

    python -m hvd_cluster.spark.tensorflow.compute_worker /shared/service.json --dispatchers 2 --num-proc 4
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pyspark.sql import SparkSession

from executors.agents.spark import Session
from hvd_cluster.spark import run
from hvd_cluster.tensorflow.data.compute_service import compute_worker_fn
from hvd_cluster.tensorflow.data.config import ServiceOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until the service ends, and return the exit code.

    Raises the errors of ``compute_worker_fn`` and of :func:`hvd_cluster.spark.run`.
    """
    parser = ServiceOptions.parser("spark-submit ... compute_worker.py")
    parser.add_argument(
        "--num-proc", type=int, default=None, help="number of workers; spark.default.parallelism by default"
    )
    given = vars(parser.parse_args(argv))
    size, options = given.pop("num_proc"), ServiceOptions(**given)
    session = SparkSession.builder.appName("hvd-cluster data service").getOrCreate()
    workers = size or Session(session).default_size()
    if workers is None:
        parser.error("--num-proc must be given: only the server of Spark Connect knows the number of slots")
    service, config = options.service(workers)
    with service:
        run(compute_worker_fn, (config,), num_proc=workers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
