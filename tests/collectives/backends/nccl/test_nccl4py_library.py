"""NCCL by nccl4py. The module itself is a record of its calls here."""

from __future__ import annotations

import logging
import re
import sys
import threading
from types import SimpleNamespace

import pytest

from collectives.api import DType, HorovodInternalError
from collectives.backends.nccl import bootstrap, cupy_library
from collectives.backends.nccl.interface import Combine
from collectives.backends.nccl.nccl4py_library import IN_PROGRESS, SUCCESS, Nccl4pyLibrary, _Nccl4pyCommunicator

PATIENCE = 10.0


class NcclError(Exception):
    status = 3


class Calls:
    """``nccl.bindings.nccl``; ``states`` are the next states of the communicator."""

    NCCLError = NcclError

    def __init__(self):
        self.version = 23203
        self.states = []
        self.log = []

    def get_version(self):
        if not self.version:
            raise RuntimeError("no libnccl.so.2")
        return self.version

    def Comm(self, pointer):
        return pointer

    def comm_get_async_error(self, communicator):
        self.log.append("query")
        return self.states.pop(0) if self.states else SUCCESS

    def all_reduce(self, *arguments):
        self.log.append("allreduce")

    def group_start(self):
        self.log.append("start")

    def group_end(self):
        self.log.append("end")


@pytest.fixture
def calls(monkeypatch):
    made = Calls()
    bindings, core = SimpleNamespace(nccl=made), SimpleNamespace()
    monkeypatch.setitem(sys.modules, "nccl", SimpleNamespace(core=core, bindings=bindings))
    monkeypatch.setitem(sys.modules, "nccl.core", core)
    monkeypatch.setitem(sys.modules, "nccl.bindings", bindings)
    return made


def communicator(library, calls):
    return _Nccl4pyCommunicator(library, SimpleNamespace(ptr=1), calls)


def allreduce(communicator):
    communicator.allreduce(1, 2, 3, DType.FLOAT32, Combine.SUM, 4)


def test_a_call_outside_of_a_group_is_waited_for(calls):
    calls.states = [IN_PROGRESS, IN_PROGRESS]
    allreduce(communicator(Nccl4pyLibrary(), calls))
    assert calls.log == ["allreduce", "query", "query", "query"]


def test_the_calls_of_a_group_are_waited_for_at_its_end(calls):
    library = Nccl4pyLibrary()
    used = communicator(library, calls)
    with library.group():
        allreduce(used)
        allreduce(used)
    assert calls.log == ["start", "allreduce", "allreduce", "end", "query"]


def test_a_group_belongs_to_its_thread(calls):
    """That of the watcher, which aborts, does not change the calls of a thread that runs operations."""
    library = Nccl4pyLibrary()
    inside, over = threading.Event(), threading.Event()

    def hold():
        with library.group():
            inside.set()
            over.wait(PATIENCE)

    watcher = threading.Thread(target=hold)
    watcher.start()
    inside.wait(PATIENCE)
    allreduce(communicator(library, calls))
    over.set()
    watcher.join(PATIENCE)
    assert calls.log == ["start", "allreduce", "query", "end"]


def test_an_abort_frees_no_communicator_that_nccl_is_asked_about(calls):
    """A launch that waits for connections asks again and again, on another thread than the watcher's."""
    asked, answered, freed = threading.Event(), threading.Event(), threading.Event()

    def ask(pointer):
        asked.set()
        assert not freed.wait(0.1)
        calls.log.append("answer")
        return IN_PROGRESS

    def free():
        freed.set()
        calls.log.append("free")

    def wait():
        with pytest.raises(HorovodInternalError, match="the communicator was aborted"):
            allreduce(used)
        answered.set()

    calls.comm_get_async_error = ask
    used = communicator(Nccl4pyLibrary(), calls)
    used._end.abort = free
    launcher = threading.Thread(target=wait)
    launcher.start()
    assert asked.wait(PATIENCE)
    used.abort()
    assert answered.wait(PATIENCE)
    launcher.join(PATIENCE)
    assert calls.log[-2:] == ["answer", "free"]
    assert used.error() == ""


def test_an_error_of_a_query_is_ours(calls):
    def fail(communicator):
        raise NcclError("internal error")

    calls.comm_get_async_error = fail
    library = Nccl4pyLibrary()
    library._core.get_unique_id = lambda: fail(None)
    with pytest.raises(HorovodInternalError, match="NCCL's error query failed with internal error"):
        communicator(library, calls).error()
    with pytest.raises(HorovodInternalError, match="NCCL's unique id failed"):
        library.unique_id()


@pytest.mark.parametrize(
    ("version", "reason"), [(0, "does not work here: no libnccl"), (22105, r"needs NCCL 2\.23\.0")]
)
def test_cupy_takes_over_where_nccl4py_cannot_be_used(version, reason, calls, monkeypatch, caplog):
    calls.version = version
    with pytest.raises(ImportError, match=reason):
        Nccl4pyLibrary()
    by_cupy = SimpleNamespace(name="cupy", version=23203)
    monkeypatch.setattr(cupy_library, "CupyLibrary", lambda: by_cupy)
    bootstrap.load.cache_clear()
    with caplog.at_level(logging.INFO, "collectives"):  # an engine that ran here before may have set its level
        assert bootstrap.load() is by_cupy
    bootstrap.load.cache_clear()
    why, which = caplog.messages
    assert re.search(reason, why)
    assert which == "tensors on GPUs travel by NCCL 2.32.3, called by cupy"
