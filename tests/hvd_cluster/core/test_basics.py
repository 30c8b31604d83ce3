"""init() and what it says of the environment."""

import copy
import logging
import pickle
import re
from unittest import mock

import numpy as np
import pytest

import hvd_cluster
from collectives.api import PeerLostError
from collectives.controller.process_sets import GLOBAL
from collectives.engine.engine import Engine
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import ProcessSet, global_process_set


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
        "HOROVOD_NUM_NCCL_STREAMS is set, but has no counterpart here; it is ignored"
    ]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("variables", "id"), [({}, "0"), ({"HOROVOD_ELASTIC": "1", "HOROVOD_WORKER_ID": "one/3"}, "0 round=4 worker=one/3")]
)
def test_the_log_names_rank_round_and_worker(variables, id, monkeypatch, capsys):
    for name, value in {**variables, "HOROVOD_ROUND": "4", "HOROVOD_NUM_NCCL_STREAMS": "2"}.items():
        monkeypatch.setenv(name, value)
    with mock.patch.object(logging.getLogger(), "handlers", []):
        basics.init()
    assert f"] [{id}]: HOROVOD_NUM_NCCL_STREAMS is set" in capsys.readouterr().err


def test_a_bad_value_is_refused(monkeypatch):
    monkeypatch.setenv("HOROVOD_CACHE_CAPACITY", "many")
    with pytest.raises(ValueError, match="HOROVOD_CACHE_CAPACITY is 'many', but must be an integer of at least 0"):
        basics.init()
    assert not basics.is_initialized()


@pytest.mark.parametrize("comm", [3, "world", [0.5], object()])
def test_what_is_no_communicator(comm):
    with pytest.raises(
        ValueError, match=rf"init\(comm={re.escape(repr(comm))}\) must be None for all ranks, a list of"
    ):
        basics.init(comm=comm)
    assert not basics.is_initialized()


@pytest.mark.parametrize("process_sets", [5, "static", ProcessSet([0])])
def test_process_sets_are_a_list(process_sets):
    with pytest.raises(ValueError, match=rf"init\(process_sets={re.escape(repr(process_sets))}\) must be a list"):
        basics.init(process_sets=process_sets)
    assert not basics.is_initialized()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("meanwhile", ["add", "shutdown"])
def test_while_one_thread_removes_a_set_another_adds_one_or_shuts_down(meanwhile, monkeypatch):
    basics.init()
    monkeypatch.setattr(basics.engine().process_sets, "ranks", lambda id: (0,))
    gone, other = ProcessSet([0]), ProcessSet([0])
    basics._register(basics.engine(), GLOBAL + 1, gone)
    actions = {
        "add": lambda: basics._register(basics.engine(), GLOBAL + 1, other),
        "shutdown": basics.shutdown,
    }
    monkeypatch.setattr(Engine, "remove_process_set", lambda self, id: actions[meanwhile]())
    assert basics.remove_process_set(gone)
    assert gone.process_set_id is None
    assert other.process_set_id == (GLOBAL + 1 if meanwhile == "add" else None)


@pytest.mark.parametrize(
    ("ranks", "says"), [(5, "a list of ranks, such as .*, not 5"), (["a"], "integer ranks, not 'a'")]
)
def test_a_process_set_is_a_list_of_ranks(ranks, says):
    for call in (lambda: ProcessSet(ranks), lambda: basics.init(process_sets=[ranks])):
        with pytest.raises(ValueError, match=says):
            call()


@pytest.mark.parametrize("ranks", [np.arange(1, -1, -1), [np.int8(1), 0], range(2), {0, 1}])
def test_a_process_set_takes_integers_of_any_type(ranks):
    made = ProcessSet(ranks)
    assert made.ranks == [0, 1]
    assert [type(rank) for rank in made.ranks] == [int, int]


@pytest.mark.parametrize("ranks", [[True], [1.0], np.ones(2), np.zeros((2, 2), int)])
def test_a_process_set_takes_integers_only(ranks):
    with pytest.raises(ValueError, match="integer ranks"):
        ProcessSet(ranks)


@pytest.mark.usefixtures("alone")
def test_what_a_process_set_says_of_itself():
    made = ProcessSet(range(1, -1, -1))
    assert str(made) == "ProcessSet(process_set_id=None, ranks=[0, 1], mpi_comm=None)"
    assert (made.size(), made.rank(), made.included()) == (None, None, None)
    basics.init()
    everybody = global_process_set
    assert str(everybody) == "ProcessSet(process_set_id=0, ranks=[0], mpi_comm=None)"
    assert (everybody.size(), everybody.rank(), everybody.included()) == (1, 0, True)
    assert (made.included(), ProcessSet([1]).included()) == (True, False)
    basics.shutdown()
    assert (everybody.size(), everybody.rank(), everybody.included(), made.included()) == (None,) * 4


def test_copies_of_process_sets():
    """Functions and models take them along to other processes, where their ids mean nothing."""
    made = ProcessSet([1, 3])
    made._register(1, [1, 3], 3)
    assert copy.deepcopy([made, global_process_set]) == [made, global_process_set]
    there, everybody = pickle.loads(pickle.dumps((made, global_process_set)))
    assert everybody is global_process_set
    assert (there.ranks, there.process_set_id) == ([1, 3], None)


def test_the_version():
    assert hvd_cluster.__version__ == "0.1.0"


@pytest.mark.usefixtures("alone")
def test_an_engine_that_has_ended_by_itself():
    basics.init()
    assert not basics.is_cut_off()
    basics.engine().abort(PeerLostError("rank 1 was lost"))
    with pytest.raises(PeerLostError):
        basics.engine().barrier()
    assert basics.is_cut_off()
    basics.shutdown()
    assert not basics.is_cut_off()
