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


@pytest.fixture(scope="session")
def connect_results(request, tmp_path_factory):
    """The result of each body in the ``CONNECT`` of a module, in which ``spark`` is the session of a client of Connect.

    One client runs them all, because its server takes longest to start. A body that fails keeps no other from running.
    """
    from spark_cluster import CONNECT_CLIENT, CONNECT_SECONDS, driver_result

    bodies = {}
    for item in request.session.items:
        bodies |= getattr(item.module, "CONNECT", {})
    client = CONNECT_CLIENT.format(bodies=bodies)
    folder = tmp_path_factory.mktemp("client")
    return driver_result(client, folder, 'connect("local[2]")', CONNECT_SECONDS, SPARK_TESTING="1")


@pytest.fixture
def result_of(connect_results):
    """``result_of(name)``: what a body for Spark Connect has put into its ``result``."""

    def get(name):
        found = connect_results[name]
        assert not isinstance(found, dict) or "failed" not in found, found["failed"]
        return found

    return get


@pytest.fixture
def nothing_left(spark):
    """No worker of ours, and no guard of one, outlives the test."""
    from spark_cluster import eventually, workers_left

    yield
    spark.sparkContext.cancelAllJobs()  # that of a test that failed would keep its slots
    eventually(lambda: not workers_left(), 60)
