"""TensorFlow is imported once, and one compute job serves most of the tests."""

import pytest

pytest.importorskip("grpc")
from tests.hvd_cluster.tensorflow.data.jobs import SECONDS, running

COMMAND = "-m", "hvd_cluster.tensorflow.data.compute_worker"


@pytest.fixture(scope="package", autouse=True)
def tf():
    """Before the first look for leftovers, because its import sets variables and starts threads."""
    return pytest.importorskip("tensorflow")


@pytest.fixture(scope="package")
def config(tf, tmp_path_factory):
    """The configuration of a dispatcher with two workers. The job ends in order, and leaves no port open."""
    from hvd_cluster.tensorflow.data import TfDataServiceConfig

    folder = tmp_path_factory.mktemp("compute")
    with running(folder, 2, *COMMAND, folder / "service.json", "--timeout", SECONDS) as job:
        config = TfDataServiceConfig.read(folder / "service.json", wait_for_file_creation=True, timeout=SECONDS)
        yield config
        with config.compute_client() as client:
            client.shutdown()
        code, log = job.result()
    assert code == 0, log
