"""The driver of a campaign on Spark: ``spark_job RANKS FOLDER MODEL SAMPLES EPOCHS``; each rank has an executor."""

import logging
import sys

from pyspark.sql import SparkSession

from hvd_cluster.spark import run_elastic
from tests.faults.jobs.driver import trapped
from tests.faults.jobs.training import train

SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.task.maxFailures": "100000",
    "spark.deploy.maxExecutorRetries": "-1",
    "spark.decommission.enabled": "true",
}


def main():
    logging.basicConfig(format="%(message)s")
    logging.getLogger("executors").setLevel(logging.INFO)
    most, folder, *training = sys.argv[1:]
    trapped(folder)
    builder = SparkSession.builder.master(f"local-cluster[{most},1,1024]")
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    try:
        run_elastic(train, [folder, *training], num_proc=int(most), min_num_proc=1, max_num_proc=int(most))
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
