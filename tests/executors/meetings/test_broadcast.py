"""Rank 0 tells its address over PMI, PMIx or MPI: launchers here that answer badly, late, or not at all."""

import atexit
import ctypes.util
import os
import signal
import socket
import subprocess
import sys
import threading
import types
from contextlib import closing
from pathlib import Path

import pytest

from collectives.api import CollectiveTimeoutError, PeerLostError, SettingsError
from executors.meetings import broadcast, pmix
from executors.meetings.broadcast import ByBroadcast, Mpi
from executors.meetings.pmi import Pmi
from executors.meetings.pmix import Pmix

ROOT = Path(__file__).parents[3]
SECONDS = 30.0
INIT = "cmd=response_to_init rc=0"
SPACE = "cmd=my_kvsname kvsname=space"
PUT = "cmd=put_result rc=0"
BARRIER = "cmd=barrier_out"


def asking(proxy, answers, calls):
    with proxy, proxy.makefile("rb") as requests:
        for answer in answers:
            calls.append(requests.readline().decode().split()[0])
            proxy.sendall(answer if isinstance(answer, bytes) else f"{answer}\n".encode())


@pytest.fixture
def mpirun(monkeypatch):
    """A function that lets a proxy of mpirun give these answers, and then hang up; returns the calls that it gets."""
    ends, threads = [], []

    def answer(*answers):
        own, proxy = socket.socketpair()
        monkeypatch.setenv("PMI_FD", str(own.fileno()))
        calls = []
        threads.append(threading.Thread(target=asking, args=(proxy, answers, calls), daemon=True))
        threads[-1].start()
        ends.append(own)
        return calls

    yield answer
    for end in ends:
        end.close()
    for thread in threads:
        thread.join(SECONDS)


def descriptors():
    return set(os.listdir("/proc/self/fd"))


def test_a_value_goes_from_rank_0_to_the_others_by_pmi(mpirun):
    text = b"where" * 200
    parts = [text.hex()[begin : begin + 500] for begin in range(0, 2000, 500)]
    got = [f"cmd=get_result rc=0 value={value}" for value in ("4", *parts)]
    calls = mpirun(INIT, SPACE, *[PUT] * 5, BARRIER, *got, "cmd=finalize_ack")
    with closing(Pmi.open()) as rank_0:
        assert rank_0.broadcast(text, SECONDS) == text
    assert calls.count("cmd=put") == 5
    mpirun(INIT, SPACE, BARRIER, *got, "cmd=finalize_ack")
    with closing(Pmi.open()) as other:
        assert other.broadcast(None, SECONDS) == text


@pytest.mark.parametrize(
    ("answers", "kind", "text"),
    [
        (["cmd=response_to_init rc=-1"], SettingsError, r"answered 'cmd=response_to_init rc=-1' to 'init' of PMI"),
        ([INIT, "cmd=my_kvsname"], SettingsError, "an answer without kvsname to 'get_my_kvsname'"),
        ([], PeerLostError, "'init' of PMI got no answer"),
        ([INIT, b"cmd=my_kvs"], PeerLostError, "'get_my_kvsname' of PMI got no answer"),
        ([INIT, b"x" * 5000], PeerLostError, "'get_my_kvsname' of PMI got no answer .a line of more than 4096 bytes"),
        ([INIT, SPACE, "cmd=barrier_out rc=3"], SettingsError, "answered 'cmd=barrier_out rc=3' to 'barrier_in'"),
        ([INIT, SPACE, BARRIER, "cmd=get_result rc=-1 msg=key_not_found"], SettingsError, "rc=-1 .* to 'get' of PMI"),
        ([INIT, SPACE, BARRIER, "cmd=get_result rc=0 value=many"], SettingsError, "is not that of rank 0"),
        ([INIT, SPACE, BARRIER, *["cmd=get_result rc=0 value=1"] * 2], SettingsError, "is not that of rank 0"),
        ([INIT, SPACE, BARRIER, "cmd=get_result rc=0"], SettingsError, "an answer without value to 'get'"),
        ([INIT, SPACE, BARRIER, *[f"cmd=get_result rc=0 value={v}" for v in ("1", "7b7d")]], SettingsError, "2 bytes"),
    ],
)
def test_a_bad_answer_of_pmi_names_the_call_and_leaves_nothing_open(mpirun, answers, kind, text):
    mpirun(*answers)
    before = descriptors()
    with pytest.raises(kind, match=text):
        ByBroadcast(("pmi",), 2).follow("job", SECONDS)
    assert descriptors() <= before


def test_a_descriptor_of_pmi_that_is_closed(monkeypatch):
    own, other = socket.socketpair()
    monkeypatch.setenv("PMI_FD", str(own.fileno()))
    own.close()
    with other, pytest.raises(SettingsError, match=r"PMI_FD is \d+, which is not a connection to mpirun"):
        Pmi.open()


def test_ranks_that_do_not_come_to_the_barrier_of_pmi(mpirun):
    own, proxy = socket.socketpair()
    with own, proxy:
        for line in (INIT, SPACE):
            proxy.sendall(f"{line}\n".encode())
        channel = Pmi(own.fileno())
        with pytest.raises(
            CollectiveTimeoutError, match=r"'barrier_in' of PMI was not answered in time.* HOROVOD_START"
        ):
            channel.broadcast(None, 0.05)
        proxy.close()
        channel.close()


class Library:
    """libpmix, as far as it is used: each call has a code, and PMIx_Get gives ``value`` of ``kind``."""

    def __init__(self, value=b"", kind=pmix.STRING, **codes):
        self.calls = []
        self.may_go_on = threading.Event()
        self._codes = codes
        self._value = None if value is None else pmix._Value(kind, pmix._Data(string=value))

    def __getattr__(self, name):
        return lambda *arguments: self._call(name, arguments)

    def _call(self, name, arguments):
        self.calls.append(name)
        if name == "PMIx_Fence" and self._codes.get(name) == "hangs":
            self.may_go_on.wait(SECONDS)
            return 0
        if name == "PMIx_Get" and self._value is not None:
            arguments[-1]._obj.contents = self._value
        return self._codes.get(name, 0)


def test_a_value_goes_from_rank_0_to_the_others_by_pmix():
    library = Library(b"where".hex().encode())
    with closing(Pmix(library)) as channel:
        assert channel.broadcast(b"where", SECONDS) == b"where"
    assert library.calls == ["PMIx_Init", "PMIx_Put", "PMIx_Commit", "PMIx_Fence", "PMIx_Get", "PMIx_Finalize"]


@pytest.mark.parametrize("call", ["PMIx_Init", "PMIx_Put", "PMIx_Commit", "PMIx_Fence", "PMIx_Get"])
def test_a_call_of_pmix_that_fails_is_named_with_its_code(call, monkeypatch):
    library = Library(b"00", **{call: -25})
    monkeypatch.setitem(broadcast.CHANNELS, "pmix", lambda size, seconds: Pmix(library))
    with pytest.raises(SettingsError, match=f"{call} failed with code -25, so the ranks cannot find one another; let"):
        ByBroadcast(("pmix",), 2).lead("job", SECONDS)
    assert ("PMIx_Finalize" in library.calls) == (call != "PMIx_Init")


@pytest.mark.parametrize(
    ("library", "text"),
    [
        (Library(None), "PMIx_Get succeeded without the text of rank 0"),
        (Library(b"00", kind=pmix.FLAG), "PMIx_Get succeeded without the text of rank 0"),
        (Library(b"no digits"), "the value that PMIx_Get returned is not that of rank 0"),
        (Library(b"\xff"), "the value that PMIx_Get returned is not that of rank 0"),
    ],
)
def test_a_value_of_pmix_that_cannot_be_read(library, text):
    with closing(Pmix(library)) as channel, pytest.raises(SettingsError, match=text):
        channel.broadcast(None, SECONDS)


def test_ranks_that_do_not_come_to_the_fence_of_pmix():
    library = Library(b"00", PMIx_Fence="hangs")
    text = r"PMIx_Fence did not end within 0.05 s.* HOROVOD_START_TIMEOUT"
    with closing(Pmix(library)) as channel, pytest.raises(CollectiveTimeoutError, match=text):
        channel.broadcast(None, 0.05)
    assert "PMIx_Finalize" not in library.calls
    library.may_go_on.set()


def test_another_library_than_libpmix_is_passed_over(monkeypatch):
    monkeypatch.setenv("PMIX_NAMESPACE", "job")
    monkeypatch.setattr(pmix, "_libraries", lambda: iter([ctypes.util.find_library("c"), "/nope/libpmix.so"]))
    assert Pmix.open() is None


class Request:
    def __init__(self, buffer, answer, tests):
        self.buffer, self.answer, self.tests = buffer, answer, tests

    def Test(self):
        self.tests -= 1
        if not self.tests and self.answer is not None:
            self.buffer[: len(self.answer)] = self.answer
        return self.tests == 0


@pytest.fixture
def mpi(monkeypatch):
    """mpi4py's MPI: the broadcast is over when it was tested for the second time; the module keeps its options."""
    module = types.ModuleType("mpi4py.MPI")
    module.BYTE, module.Exception, module.answer, module.tests = "byte", OSError, None, 2

    def broadcast(message, root):
        assert (message[1], root) == (module.BYTE, 0)
        if isinstance(module.answer, Exception):
            raise module.answer
        return Request(message[0], module.answer, module.tests)

    module.COMM_WORLD = types.SimpleNamespace(Ibcast=broadcast, Get_size=lambda: 2)
    monkeypatch.setitem(sys.modules, "mpi4py", types.ModuleType("mpi4py"))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", module)
    return module


def test_a_value_goes_from_rank_0_to_the_others_by_mpi(mpi):
    assert Mpi().broadcast(b"where", SECONDS) == b"where"
    mpi.answer = b"where"
    assert Mpi().broadcast(None, SECONDS) == b"where"


@pytest.mark.parametrize(
    ("value", "ranks", "text"), [(None, (0,), "look at the log of rank 0"), (b"x", (), "of all other ranks")]
)
def test_ranks_that_do_not_come_to_the_broadcast_of_mpi(mpi, value, ranks, text):
    mpi.tests = 0
    with pytest.raises(CollectiveTimeoutError, match=rf"did not end within 0\.05 s: .*{text}.*MASTER_ADDR") as caught:
        Mpi().broadcast(value, 0.05)
    assert caught.value.ranks == ranks
    atexit.unregister(broadcast._bound_finalize)


def ended(code, folder):
    """The end of a process with an mpi4py from ``folder``, which runs ``code``."""
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", "from executors.meetings import broadcast\n" + code]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=SECONDS, check=False
    )


@pytest.fixture
def mpi4py(tmp_path):
    """A function that makes an mpi4py with this code; returns the folder to import it from."""

    def make(code):
        (tmp_path / "mpi4py").mkdir()
        (tmp_path / "mpi4py" / "__init__.py").touch()
        (tmp_path / "mpi4py" / "MPI.py").write_text(code)
        return tmp_path

    return make


def test_a_process_does_not_wait_for_ever_in_mpi_init(mpi4py):
    folder = mpi4py("import threading\nthreading.Event().wait(600)")
    done = ended("broadcast.ByBroadcast(('mpi4py',), 2).follow('job', 0.1)", folder)
    assert (done.returncode, "in _wait_in_mpi_init_for_all_ranks" in done.stderr) == (1, True)


HANGING = """
import ctypes
BYTE, Exception, done = None, OSError, False
class COMM_WORLD:
    Get_size = staticmethod(lambda: 2)
    Ibcast = staticmethod(lambda *_: COMM_WORLD)
    Test = staticmethod(lambda: done)
ctypes.pythonapi.Py_AtExit(ctypes.CDLL(None).pause)  # where mpi4py calls MPI_Finalize
"""
FAILING = """
broadcast.FINALIZE_SECONDS = 0.1
broadcast.ByBroadcast(('mpi4py',), 2).follow('job', 0.05)
"""


def test_a_process_does_not_wait_for_ever_in_mpi_finalize(mpi4py):
    done = ended(FAILING, mpi4py(HANGING))
    assert done.returncode == -signal.SIGALRM
    assert "CollectiveTimeoutError: MPI_Ibcast of the address of rank 0 did not end within" in done.stderr


def test_mpi_finalize_may_last_after_a_later_broadcast_that_is_over(mpi, monkeypatch):
    handlers = []
    monkeypatch.setattr(atexit, "register", handlers.append)
    monkeypatch.setattr(atexit, "unregister", handlers.remove)
    mpi.tests = 0
    with pytest.raises(CollectiveTimeoutError):
        Mpi().broadcast(None, 0.05)
    assert len(handlers) == 1
    mpi.tests = 2
    Mpi().broadcast(None, SECONDS)
    assert handlers == []


def test_a_broadcast_of_mpi_that_fails(mpi):
    mpi.answer = OSError("MPI_ERR_OTHER")
    with pytest.raises(PeerLostError, match=r"MPI_Ibcast of the address of rank 0 failed: MPI_ERR_OTHER; let mpirun"):
        Mpi().broadcast(None, SECONDS)
