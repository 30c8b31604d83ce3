"""The check of hierarchies, on a GPU that is the memory of the host."""

from __future__ import annotations

import threading

import pytest

from collectives.store.memory import MemoryStore
from tests.collectives.backends.members import in_threads
from tests.collectives.backends.nccl.gpus import gpu_of_each_thread
from tests.gpu import hierarchies


class Member:
    """A rank that is a thread."""

    def __init__(self, rank, store, told):
        self.rank, self.size, self.store = rank, len(hierarchies.HOSTS), store
        self.tell = told.append


@pytest.mark.parametrize("way", ["nccl", "tcp", "gloo"])
def test_the_parts_run_in_stages(way, monkeypatch):
    """By mpirun the ranks would be processes, whose GPUs are apart."""

    def body(rank):
        told = []
        try:
            hierarchies.matrix(Member(rank, store, told), ["average"], way)
            over.wait(20)
        finally:
            device(0, rank).close()
        return told

    device, store, over = gpu_of_each_thread(monkeypatch), MemoryStore(), threading.Barrier(4)
    monkeypatch.setattr(hierarchies, "arrays_of", lambda rank: device(0, rank))
    assert in_threads(4, body) == [["average"]] * 4


def test_every_way_is_tried_whatever_became_of_the_others(monkeypatch, capsys):
    def failed_parts(ranks, names, body):
        tried.append((ranks, body.keywords["way"]))
        return ["identity"] if body.keywords["way"] == "tcp" else []

    tried = []
    monkeypatch.setattr(hierarchies, "failed_parts", failed_parts)
    monkeypatch.setattr(hierarchies, "has_passed_in_mpi", lambda: False)
    assert hierarchies.failed_ways() == ["tcp", "mpi"]
    assert tried == [(4, "nccl"), (4, "tcp"), (4, "gloo")]


@pytest.mark.parametrize("lack", ["mpirun", "mpi4py"])
def test_a_machine_without_mpi_says_so(lack, monkeypatch, capsys):
    monkeypatch.setattr(hierarchies.shutil, "which", lambda name: None if name == lack else f"/bin/{name}")
    if lack == "mpi4py":
        monkeypatch.setattr(hierarchies.importlib.util, "find_spec", lambda name: None)
    assert hierarchies.has_passed_in_mpi()
    assert "left out: mpirun or mpi4py is not installed" in capsys.readouterr().out


def test_the_ranks_of_mpi_run_all_parts(monkeypatch):
    def run(body, **options):
        started.append((body, options["num_proc"], options["use_mpi"]))
        return ["done"] * 4

    started = []
    monkeypatch.setattr(hierarchies.shutil, "which", lambda name: name)
    monkeypatch.setattr(hierarchies.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(hierarchies.hvd_cluster, "run", run)
    assert hierarchies.has_passed_in_mpi()
    assert started == [(hierarchies.matrix_in_mpi, 4, True)]
