"""init() beside launchers that are not ours."""

import importlib
import logging
import multiprocessing
import os
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from collectives.api import SettingsError, Topology
from executors.job import environment
from executors.launchers.bootstrap import JOINED, Joined, erase_mark
from hvd_cluster import run
from hvd_cluster.cli.hvdrun import main
from hvd_cluster.core import basics, launchers
from hvd_cluster.core.launchers import StartingLauncher, register_thread_count, warn_of_threads

ROOT = Path(__file__).parents[3]
TEXT = "OMP_NUM_THREADS=1 for each of the 2 ranks, its share of 2 cores; set the variable to choose another number"
SHARE = f"hvdrun: {TEXT}\n"
TORCHRUN = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}


def set_variables(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def size_of_world():
    basics.init()
    try:
        return basics.size()
    finally:
        basics.shutdown()


def test_a_process_of_another_launcher_that_cannot_find_rank_0(monkeypatch):
    set_variables(monkeypatch, TORCHRUN)
    with pytest.raises(
        SettingsError, match=r"torchrun started this process as one of 2 \(WORLD_SIZE=2\), but its vari"
    ):
        basics.init()
    assert not basics.is_initialized()


def test_separate_models_on_purpose(monkeypatch):
    set_variables(monkeypatch, {**TORCHRUN, "HOROVOD_SIZE": "1"})
    assert size_of_world() == 1


def test_our_launcher_may_run_inside_of_another_one(monkeypatch):
    set_variables(monkeypatch, TORCHRUN)
    assert run(size_of_world, num_proc=2) == [2, 2]


@pytest.fixture
def waits(monkeypatch):
    """The seconds for which each rank looks for the others; it finds them at once."""
    seconds = []
    monkeypatch.setattr(
        launchers.bootstrap, "join", lambda place, limit, farewell: (seconds.append(limit), Joined({"A": "B"}))[1]
    )
    set_variables(monkeypatch, TORCHRUN)
    monkeypatch.delenv(JOINED, raising=False)
    return seconds


def child_of_a_rank():
    try:
        return StartingLauncher().join(os.environ)
    except SettingsError as error:
        return str(error)


def test_a_process_that_a_rank_starts_is_no_rank(waits, monkeypatch):
    launcher = StartingLauncher()
    with closing(launcher):
        assert [launcher.join(os.environ)["A"] for _ in range(2)] == ["B", "B"]
        assert len(waits) == 1
        with multiprocessing.get_context("fork").Pool(1) as pool:
            assert pool.apply(child_of_a_rank).startswith(
                f"this process, {pool._pool[0].pid}, is a child of rank 1, which is process {os.getpid()}: it has "
                "inherited the variables of torchrun, but cannot be a second rank 1. Call hvd.init() only"
            )
            monkeypatch.setenv("MASTER_PORT", "of a job that a rank starts")
        with multiprocessing.get_context("fork").Pool(1) as pool:
            assert pool.apply(child_of_a_rank)["A"] == "B"
    assert JOINED not in os.environ


def test_a_forked_child_of_rank_0_drops_the_server(waits, monkeypatch):
    told = []
    monkeypatch.setattr(
        launchers.bootstrap, "join", lambda *_: Joined({}, partial(told.append, "closed"), lambda: told.append(1))
    )
    launcher = StartingLauncher()
    with closing(launcher):
        launcher.join(os.environ)
        launcher.forget()
        launcher.forget()
    erase_mark(os.environ)
    assert told == [1]


@pytest.mark.parametrize(("given", "seconds"), [("", 300.0), ("20", 20.0)])
def test_how_long_the_ranks_of_another_launcher_wait_for_one_another(waits, monkeypatch, given, seconds):
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", given)
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", "7")
    with closing(StartingLauncher()) as launcher:
        launcher.join(os.environ)
    assert waits == [seconds]


def test_a_start_timeout_that_is_no_number(waits, monkeypatch):
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "soon")
    with pytest.raises(SettingsError, match=r"HOROVOD_START_TIMEOUT is 'soon', but must be a positive number of sec"):
        StartingLauncher().join(os.environ)
    assert not waits


@pytest.fixture
def two_cores(monkeypatch):
    for name in environment.CHOICES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("hvd_cluster.core.launchers._thread_counts", {})
    monkeypatch.setattr("hvd_cluster.core.launchers.usable_cores", lambda: 2)
    monkeypatch.setattr("executors.agents.hosts.job.usable_cores", lambda: 2)


@pytest.mark.usefixtures("two_cores")
def test_the_first_rank_of_a_host_warns_of_too_many_threads(caplog):
    for topology in (Topology(0, 2, 0, 2), Topology(1, 2, 1, 2), Topology()):
        warn_of_threads({}, topology)
        warn_of_threads({"OMP_NUM_THREADS": "1"}, topology)
    assert [record.message for record in caplog.records] == [environment.thread_remark(2, 2, 2)]


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize(("count", "remarks"), [(1, 0), (2, 1)])
def test_a_framework_says_how_many_threads_it_has(caplog, count, remarks):
    register_thread_count("torch", lambda: count)
    warn_of_threads({"OMP_NUM_THREADS": "8"} if count == 1 else {}, Topology(0, 2, 0, 2))
    assert [record.message for record in caplog.records] == [environment.thread_remark(2, 2, 2)] * remarks


def test_torch_says_how_many_threads_it_has():
    torch = pytest.importorskip("torch")
    importlib.import_module("hvd_cluster.torch")
    assert launchers._thread_counts["torch"] is torch.get_num_threads


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize("variable", ["MKL_NUM_THREADS=1", "MKL_NUM_THREADS=2", "OPENBLAS_NUM_THREADS=2"])
def test_hvdrun_keeps_any_number_of_threads_that_the_user_has_set(monkeypatch, capsys, variable):
    monkeypatch.setenv(*variable.split("="))
    assert main(["-np", "2", "sh", "-c", "env | grep '^[A-Z]*_NUM_THREADS='"]) == 0
    captured = capsys.readouterr()
    assert sorted(captured.out.splitlines()) == [f"[{rank}]<stdout>:{variable}" for rank in range(2)]
    assert captured.err == ""


@pytest.mark.usefixtures("two_cores")
def test_a_rank_warns_of_too_many_threads_beside_the_users_number_for_openblas(caplog):
    variables = {"OPENBLAS_NUM_THREADS": "1"}
    assert environment.thread_variables(variables, 2, 2) == {}
    warn_of_threads(variables, Topology(0, 2, 0, 2))
    assert [record.message for record in caplog.records] == [environment.thread_remark(2, 2, 2)]


@pytest.mark.usefixtures("two_cores")
def test_hvdrun_gives_each_rank_its_share_of_the_cores_and_says_so(capsys):
    assert main(["-np", "2", "sh", "-c", "echo $OMP_NUM_THREADS"]) == 0
    captured = capsys.readouterr()
    assert sorted(captured.out.splitlines()) == ["[0]<stdout>:1", "[1]<stdout>:1"]
    assert captured.err == SHARE


@pytest.mark.usefixtures("two_cores")
def test_hvdrun_keeps_the_threads_of_the_user_and_leaves_the_warning_to_a_rank(monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert main(["-np", "2", "sh", "-c", "echo $OMP_NUM_THREADS"]) == 0
    captured = capsys.readouterr()
    assert sorted(captured.out.splitlines()) == ["[0]<stdout>:2", "[1]<stdout>:2"]
    assert captured.err == ""


@pytest.mark.usefixtures("two_cores")
def test_run_gives_each_rank_its_share_of_the_cores(caplog):
    pytest.importorskip("torch")

    def threads_of_torch():
        import torch

        return torch.get_num_threads()

    caplog.set_level(logging.INFO, "executors")
    assert run(threads_of_torch, num_proc=2) == [1, 1]
    assert [record.message for record in caplog.records] == [TEXT]
    assert run(os.getenv, ["OMP_NUM_THREADS"]) == [None]
    assert run(os.getenv, ["OMP_NUM_THREADS"], num_proc=2, env={"OMP_NUM_THREADS": "7"}) == ["7", "7"]
