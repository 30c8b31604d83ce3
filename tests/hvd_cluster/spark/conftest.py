"""Fixtures around Spark. Where it cannot run, its tests skip, and the end of the report says so."""

import shutil
from importlib.util import find_spec

import pytest

INSTALL = {
    "Java": "apt-get install openjdk-17-jre-headless",
    "PySpark": 'pip install "hvd-cluster[spark]"',
}


def missing():
    found = {"Java": shutil.which("java"), "PySpark": find_spec("pyspark")}
    return [f"{name} is not installed: {INSTALL[name]}" for name, there in found.items() if not there]


if find_spec("pyspark") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items):
    reasons = missing()
    for item in items:
        if reasons and item.path.name.startswith("test_spark_"):
            item.add_marker(pytest.mark.skip(reason="; ".join(reasons)))


def pytest_terminal_summary(terminalreporter):
    for reason in missing():
        terminalreporter.write_line(f"The tests that need Spark were skipped. {reason}", yellow=True)


@pytest.fixture(scope="session")
def spark():
    """A session on two executors of one slot each, with this process as its driver."""
    from spark_cluster import running_session

    with running_session() as session:
        yield session


@pytest.fixture
def nothing_left(spark):
    """No worker of ours, and no guard of one, outlives the test."""
    from spark_cluster import eventually, workers_left

    yield
    spark.sparkContext.cancelAllJobs()  # that of a test that failed would keep its slots
    eventually(lambda: not workers_left(), 60)
