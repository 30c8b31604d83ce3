"""Rank 0 tells its address over PMI, PMIx or MPI: launchers here that answer badly, late, or not at all."""

import ctypes.util
import os
import socket
import threading
from contextlib import closing

import pytest

from collectives.api import CollectiveTimeoutError, PeerLostError, SettingsError
from executors.launchers import broadcast, pmix
from executors.launchers.broadcast import ByBroadcast
from executors.launchers.pmi import Pmi
from executors.launchers.pmix import Pmix

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
