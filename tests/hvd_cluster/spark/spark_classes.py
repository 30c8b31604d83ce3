"""Makes the archive of Spark's classes from which the JVMs of tests start: ``python spark_classes.py``, in a minute.

It lies in the folder of the environment. Without it, or where it is of other versions, a JVM loads and verifies one
class after another, as it does for users, and an application takes twice as long to start.
"""

import os
import shutil
import tempfile
from pathlib import Path

import spark_cluster
from pyspark.sql import SparkSession

SECONDS = 300.0


def main() -> None:
    """One JVM loads what most tests need, as a driver and as an executor, and writes it down at its end."""
    if spark_cluster.CLASSES.exists():
        return
    with tempfile.TemporaryDirectory(prefix="hvd-") as folder:
        made, copy = Path(folder) / "classes.jsa", spark_cluster.CLASSES.with_suffix(f".{os.getpid()}")
        os.environ.update(spark_cluster.variables(folder))
        os.environ["SPARK_SUBMIT_OPTS"] = f"{spark_cluster.JAVA} -Xlog:disable -XX:ArchiveClassesAtExit={made}"
        for master in (spark_cluster.MASTER, "local[2]"):
            session = spark_cluster.session(master)
            use(session, folder)
            session.stop()
        spark_cluster.end_java(SECONDS)
        shutil.move(made, copy)
        os.replace(copy, spark_cluster.CLASSES)


def use(session: SparkSession, folder: str) -> None:
    """Rows through Python, through files and through tasks that start together."""
    frame = session.range(100, numPartitions=2).selectExpr("id", "id % 3 AS part", "cast(id AS double) AS x")
    frame.groupBy("part").sum("x").orderBy("part").toPandas()
    frame.repartition(2).write.mode("overwrite").parquet(f"{folder}/rows")
    session.read.parquet(f"{folder}/rows").mapInArrow(lambda batches: batches, frame.schema).collect()
    session.createDataFrame([(1, [1.0, 2.0]), (2, [3.0])], "id long, values array<double>").collect()
    session.sparkContext.parallelize(range(2), 2).barrier().mapPartitions(lambda rows: rows).collect()


if __name__ == "__main__":
    main()
