"""Learn handwritten digits on ranks that come and go with the executors of Spark: ``python examples/elastic_spark.py``.

The training is that of ``elastic_digits.py``. Give it time with ``--pause 0.1``, and kill a rank or an executor by its
process id: the others go on, and another rank comes when Spark has a place for it.

It starts Spark on this machine; ``--master`` names a cluster that runs already.
"""

from __future__ import annotations

import argparse
import logging

import digits
import elastic_digits
import spark_digits
from digits import compare
from elastic_digits import add_elastic_options, learn
from spark_digits import add_spark_options, session

from hvd_cluster.spark import run_elastic


def main() -> None:
    """Start Spark, train, and compare the parameters of the ranks."""
    parser = argparse.ArgumentParser(description="Learn handwritten digits on ranks that come and go in Spark.")
    add_spark_options(parser)
    add_elastic_options(parser)
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    for name in ("executors", "hvd_cluster._executors"):  # in a checkout, and in a wheel
        logging.getLogger(name).setLevel(logging.INFO)  # a line for each change
    with session(options.master) as spark:
        for module in (digits, elastic_digits, spark_digits):
            spark.addArtifacts(module.__file__, pyfile=True)  # the ranks import them, too
        arguments = options.epochs, options.batch_size, options.seed, options.pause
        print(compare(run_elastic(learn, arguments, num_proc=options.workers, min_num_proc=1)))


if __name__ == "__main__":
    main()
