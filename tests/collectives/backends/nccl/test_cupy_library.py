"""NCCL by cupy, whose binding is a record of its calls here."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest

from collectives.api import DType, HorovodInternalError, PeerLostError, UnsupportedRequestError
from collectives.backends.nccl.cupy_library import CupyLibrary
from collectives.backends.nccl.interface import Combine
from tests.collectives.backends.nccl.fake import FakeDevice

PATIENCE = 20.0
MESSAGES = {2: "unhandled system error", 6: "remote error"}


class NcclError(RuntimeError):
    """As cupy's, which does not know all results."""

    def __init__(self, status):
        self.status = status
        super().__init__(MESSAGES[status])


class NcclCommunicator:
    def __init__(self, nccl, arguments):
        self._nccl = nccl
        self.arguments = arguments
        self.calls = []

    def allReduce(self, *arguments):
        self.calls.append(("allreduce", *arguments))
        self._nccl.check()

    def check_async_error(self):
        self._nccl.check()

    def abort(self):
        self.calls.append(("abort",))
        self._nccl.aborted.set()


class Nccl:
    """``cupy.cuda.nccl``. Members have connected when ``connected`` is set; ``result`` is that of all calls."""

    NcclError = NcclError
    available = True

    def __init__(self):
        self.result = 0
        self.connected = threading.Event()
        self.connected.set()
        self.aborted = threading.Event()
        self.made = []
        self.groups = []

    def check(self):
        if self.result:
            raise NcclError(self.result)

    def get_version(self):
        return 23203

    def NcclCommunicator(self, *arguments):
        assert self.connected.wait(PATIENCE)
        self.check()
        self.made.append(NcclCommunicator(self, arguments))
        return self.made[0]

    def groupStart(self):
        self.groups.append("start")

    def groupEnd(self):
        self.groups.append("end")
        self.check()


@pytest.fixture
def nccl(monkeypatch):
    made = Nccl()
    cuda = SimpleNamespace(nccl=made)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    return made


@pytest.fixture
def device():
    made = FakeDevice()
    yield made
    made.close()


def connect(device, pause=lambda: None):
    return CupyLibrary().connect(b"the id", 3, 1, device, pause)


def test_calls_have_cupys_arguments(nccl, device):
    communicator = connect(device)
    communicator.allreduce(10, 20, 5, DType.FLOAT32, Combine.MAX, 7)
    assert nccl.made[0].arguments == (3, b"the id", 1)
    assert nccl.made[0].calls == [("allreduce", 10, 20, 5, 7, 2, 7)]


def test_an_error_names_the_call_and_the_remedy(nccl, device):
    communicator = connect(device)
    nccl.result = 2
    with pytest.raises(HorovodInternalError, match=r"NCCL's allreduce failed with unhandled system error.*/dev/shm"):
        communicator.allreduce(10, 20, 5, DType.FLOAT32, Combine.MAX, 7)
    with pytest.raises(HorovodInternalError, match="NCCL's group end failed"), CupyLibrary().group():
        nccl.groups.append("in")
    assert nccl.groups == ["start", "in", "end"]
    nccl.result = 6
    assert "remote error" in communicator.error()
    nccl.result = 0
    assert communicator.error() == ""


def test_a_result_without_a_name(nccl, device):
    """NCCL_COMM_BLOCKING=0 makes NCCL answer "in progress", for which cupy has no error."""
    communicator = connect(device)
    nccl.result = 7
    assert communicator.error() == ""
    with pytest.raises(HorovodInternalError, match=r"NCCL's init failed with result 7.*leave NCCL_COMM_BLOCKING out"):
        connect(device)


def test_a_communicator_that_comes_too_late_is_aborted(nccl, device):
    """Cupy would destroy it, which waits for all members."""

    def give_up():
        raise PeerLostError("rank 2 is lost")

    nccl.connected.clear()
    with pytest.raises(PeerLostError):
        connect(device, give_up)
    nccl.connected.set()
    assert nccl.aborted.wait(PATIENCE)


def test_a_communicator_that_comes_while_the_attempt_is_given_up_is_aborted(nccl, device):
    def give_up():
        [thread] = [thread for thread in threading.enumerate() if thread.name == "hvd-nccl-connect"]
        nccl.connected.set()
        thread.join(PATIENCE)
        raise PeerLostError("rank 2 is lost")

    nccl.connected.clear()
    with pytest.raises(PeerLostError):
        connect(device, give_up)
    assert nccl.made[0].calls == [("abort",)]


def test_a_libnccl_that_is_missing_or_too_old(nccl, monkeypatch):
    monkeypatch.setattr(nccl, "get_version", lambda: 21205)
    with pytest.raises(UnsupportedRequestError, match=r"NCCL 2\.12\.5 is too old"):
        CupyLibrary()
    nccl.available = False
    with pytest.raises(ImportError, match="cupy finds no libnccl, or one that is too old for it; install it with: pip"):
        CupyLibrary()
