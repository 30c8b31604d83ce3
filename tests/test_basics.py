"""init() and what it says of the environment."""

import logging

import pytest

import hvd_cluster
from hvd_cluster import basics


@pytest.fixture
def alone():
    yield
    basics.shutdown()
    for name in ("collectives", "executors", "hvd_cluster"):
        logging.getLogger(name).setLevel(logging.NOTSET)
        logging.getLogger(name).handlers.clear()


@pytest.mark.usefixtures("alone")
def test_a_variable_that_means_nothing_here_is_accepted_with_one_warning(monkeypatch, caplog):
    monkeypatch.setenv("HOROVOD_NUM_NCCL_STREAMS", "2")
    basics.init()
    basics.init()
    assert [record.message for record in caplog.records] == [
        "HOROVOD_NUM_NCCL_STREAMS is set, but has no meaning here; it is accepted and not used"
    ]


def test_a_bad_value_is_refused(monkeypatch):
    monkeypatch.setenv("HOROVOD_CACHE_CAPACITY", "many")
    with pytest.raises(ValueError, match="HOROVOD_CACHE_CAPACITY is 'many', but must be an integer of at least 0"):
        basics.init()
    assert not basics.is_initialized()


def test_the_version():
    assert hvd_cluster.__version__ == "0.1.0"
