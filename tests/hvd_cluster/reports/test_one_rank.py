"""A print and a filter of one rank, before and after init."""

import io
import logging
import pickle

import pytest

from collectives.api import SettingsError
from hvd_cluster.core import basics
from hvd_cluster.reports import RankFilter, metrics, one_rank, print_once

LAUNCHERS = [
    ({}, 0),
    ({"HOROVOD_RANK": "2", "HOROVOD_SIZE": "3"}, 2),
    ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, 1),
    ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, 1),
    ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1", "HOROVOD_NEWCOMER": "1"}, None),
]


@pytest.fixture
def started_by(monkeypatch):
    """``started_by(variables)``: the environment of a process that a launcher started."""
    return lambda variables: monkeypatch.setattr(one_rank.os, "environ", variables)


@pytest.mark.parametrize(("variables", "rank"), LAUNCHERS)
def test_the_rank_before_init_is_that_of_the_launcher(started_by, variables, rank):
    started_by(variables)
    assert one_rank.known_rank() == rank


def test_a_rank_that_is_none(started_by):
    started_by({"HOROVOD_RANK": "one", "HOROVOD_SIZE": "2"})
    with pytest.raises(SettingsError, match="HOROVOD_RANK"):
        print_once("x")
    assert RankFilter(1).filter(logging.makeLogRecord({}))


@pytest.mark.parametrize(("rank", "printed"), [(0, ""), (1, "a|1\n!")])
def test_print_once(started_by, rank, printed, capsys):
    started_by({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"})
    file = io.StringIO()
    print_once("a", 1, sep="|", end="\n!", file=file, flush=True, rank=rank)
    assert file.getvalue() == printed
    print_once("shown", rank=1)
    assert capsys.readouterr().out == "shown\n"


def test_the_rank_after_init(monkeypatch, capsys):
    monkeypatch.setattr(basics, "is_initialized", lambda: True)
    monkeypatch.setattr(basics, "rank", lambda: 3)
    print_once("not here")
    print_once("here", rank=3)
    assert capsys.readouterr().out == "here\n"
    monkeypatch.setattr(basics, "worlds", lambda: type("Worlds", (), {"is_alone": True}))
    assert one_rank.known_rank() is None


@pytest.mark.parametrize(("rank", "lines"), [(0, []), (1, ["1 told"]), (None, ["1 told"])])
def test_a_filter_lets_the_records_of_one_rank_through(started_by, rank, lines):
    started_by({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"})
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(rank)s %(message)s"))
    handler.addFilter(RankFilter(rank, add_rank=True))
    logger = logging.Logger("script")
    logger.addHandler(handler)
    logger.warning("told")
    assert stream.getvalue().splitlines() == lines


def test_a_filter_leaves_records_as_they_are():
    record = logging.makeLogRecord({})
    assert RankFilter().filter(record)
    assert not hasattr(record, "rank")


def test_metrics_are_pickled_by_their_name():
    assert pickle.loads(pickle.dumps(metrics)) is metrics
