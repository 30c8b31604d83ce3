"""A rank that comes after a start has failed: it raises the reason that rank 0 left, or finds the next start."""

import functools
import os
import secrets
import signal
import threading

import pytest

from collectives.api import (
    CollectiveTimeoutError,
    HorovodInternalError,
    PeerLostError,
    SettingsError,
    Timeouts,
    Topology,
    World,
)
from collectives.engine import start as bootstrap
from collectives.handshake import Hello, entries, search
from collectives.handshake.admission import Admission
from collectives.handshake.dial import Callee
from collectives.handshake.entries import EndNotes, Starts
from collectives.settings import Settings
from collectives.store.memory import MemoryStore, PrefixStore
from collectives.store.server import RendezvousServer
from tests.collectives.backends.members import Processes, in_threads
from tests.collectives.engine.job import PATIENCE, outcome, until
from tests.collectives.handshake.handshakes import KEY, connect, connect_all

LONG = 4 * PATIENCE
"""The start timeout of a late rank, longer than the test may take."""


@pytest.fixture(autouse=True)
def first_look(monkeypatch):
    monkeypatch.setattr(search, "FIRST_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(entries, "LOOK_SECONDS", 0.05)


def start(rank, store, size=3, timeout=LONG, **arguments):
    """The error of a rank, or its hosts when all have connected."""
    result = outcome(lambda: connect(Hello(rank, size, "node"), store, timeout=timeout, **arguments))
    if isinstance(result, Exception):
        return result
    result.channel.close()
    return result.hosts


def test_a_rank_that_comes_too_late_hears_that_it_was_missed():
    store = MemoryStore()
    first = start(0, store, size=2, timeout=0.05)
    (late,) = in_threads(1, lambda _: start(1, store, size=2), PATIENCE)
    assert type(late) is type(first) is CollectiveTimeoutError
    assert str(late) == str(first)
    assert late.ranks == (1,)


def test_a_rank_that_comes_after_the_loss_of_another_hears_which_one_was_lost(monkeypatch):
    def body(rank):
        if rank == 2:
            over.wait(PATIENCE)
        result = start(rank, store)
        if rank == 0:
            over.set()
        return result

    def say_hello_and_leave(self, entry):
        send_hello(self, entry)
        if self._end.hello.rank == 1:
            raise OSError("cut")  # it does not call again

    send_hello = Callee._send_hello
    monkeypatch.setattr(Callee, "_send_hello", say_hello_and_leave)
    store, over = MemoryStore(), threading.Event()
    first, _, late = in_threads(3, body, PATIENCE)
    assert type(late) is type(first) is PeerLostError
    assert str(late) == str(first)
    assert (late.ranks, late.hosts) == ((1,), ("node",))


def test_a_rank_that_found_the_address_before_the_start_failed_hears_the_reason():
    class Stale(MemoryStore):
        def get(self, key, timeout):
            return stale.pop() if key == KEY and stale else super().get(key, timeout)

        def set(self, key, value, timeout=None):
            if key == KEY and not self.peek(KEY):
                stale.append(value)
            super().set(key, value)

    stale = []
    store = Stale()
    first = start(0, store, size=2, timeout=0.05)
    assert len(stale) == 1
    (late,) = in_threads(1, lambda _: start(1, store, size=2), PATIENCE)
    assert (type(late), str(late)) == (CollectiveTimeoutError, str(first))


def test_a_rank_0_that_cannot_listen_says_so_to_all():
    store = MemoryStore()
    first = outcome(lambda: connect(Hello(0, 2, "node"), store, address="192.0.2.1"))
    (late,) = in_threads(1, lambda _: start(1, store, size=2), PATIENCE)
    assert type(late) is SettingsError
    assert str(late) == str(first)


def test_the_reason_of_another_round_is_no_reason():
    store = MemoryStore()
    start(0, store, size=2, timeout=0.05)
    (error,) = connect_all([Hello(1, 2, "node", round=1)], store, timeout=0.3)
    assert "rank 0 of round 1 of job 'job' did not come in time: it is still in round 0" in str(error)


def test_a_rank_of_an_earlier_round_hears_the_current_one_before_the_reason_of_its_own():
    store = MemoryStore()
    start(0, store, size=2, timeout=0.05)
    connect_all([Hello(0, 2, "node", round=1)], store, timeout=0.05)
    (late,) = in_threads(1, lambda _: start(1, store, size=2), PATIENCE)
    assert type(late) is PeerLostError
    assert "rank 1 is in round 0 of job 'job', rank 0 in round 1 of job 'job'" in str(late)


def test_a_rank_raises_the_reason_once_and_waits_for_the_next_start():
    """Also a rank that was in the failed start, and was still waiting for its first answer."""

    class Counting(MemoryStore):
        def get(self, key, timeout):
            looks.append(key)
            return super().get(key, timeout)

    def body(rank):
        starts = Starts()
        if rank == 2:
            over.wait(PATIENCE)
        errors = [start(rank, store, starts=starts, timeout=LONG if rank else 1.0)]
        over.set()
        failed.wait(PATIENCE)
        if rank == 0:
            until(lambda: looks.count("round-0/start-1/rank-0") >= 8)  # at least three more than one look of each
        return [*errors, start(rank, store, starts=starts)]

    store, looks = Counting(), []
    over, failed = threading.Event(), threading.Barrier(3, action=looks.clear)
    results = in_threads(3, body, PATIENCE)
    assert {str(error) for error, _ in results} == {str(results[0][0])}
    assert {error.ranks for error, _ in results} == {(2,)}
    assert [hosts for _, hosts in results] == [("node",) * 3] * 3


def test_the_admitted_ranks_hear_the_reason_before_the_store():
    class Slow(MemoryStore):
        def set(self, key, value, timeout=None):
            if timeout is not None:
                asked.append(heard.wait(PATIENCE))
            super().set(key, value)

    def body(rank):
        result = start(rank, store, timeout=LONG if rank else 1.0)
        if rank:
            heard.set()
        return result

    store, heard, asked = Slow(), threading.Event(), []
    in_threads(2, body, 2 * PATIENCE)
    assert asked == [True]


def test_a_store_that_is_gone_does_not_replace_the_reason():
    class Ended(MemoryStore):
        def set(self, key, value, timeout=None):
            if timeout is not None:
                assert timeout == entries.FAILURE_SECONDS
                raise PeerLostError("the rendezvous server is gone")
            super().set(key, value)

    assert start(0, Ended(), size=2, timeout=0.05).ranks == (1,)


def test_a_start_that_succeeds_uses_the_store_as_rarely_as_possible(monkeypatch):
    monkeypatch.setattr(search, "FIRST_LOOK_SECONDS", PATIENCE)
    monkeypatch.setattr(entries, "LOOK_SECONDS", PATIENCE)

    class Counting(MemoryStore):
        def get(self, key, timeout):
            calls.append(("get", key))
            return super().get(key, timeout)

        def set(self, key, value, timeout=None):
            calls.append(("set", key))
            super().set(key, value)

    calls = []
    assert connect_all([Hello(rank, 2, "node") for rank in range(2)], Counting()) == [("node", "node")] * 2
    assert sorted(calls) == [("get", KEY), ("set", entries.CURRENT), ("set", KEY)]


@pytest.fixture
def noted():
    """The notes of a launcher, and the store of its job as the ranks see it."""
    store = MemoryStore()
    return EndNotes(store, "job"), PrefixStore(store, "job")


@pytest.mark.parametrize("ended", [0, 2])
def test_ranks_hear_from_their_launcher_that_another_one_has_ended(noted, ended):
    note, store = noted
    note.leave(ended, "node", "ended with exit code 0")
    errors = in_threads(2, lambda index: start([rank for rank in range(3) if rank != ended][index], store), PATIENCE)
    assert [type(error) for error in errors] == [PeerLostError] * 2
    text = f"rank {ended} on host node ended with exit code 0 and did not come to this hvd.init(); look at its output"
    assert [(str(error), error.ranks, error.hosts) for error in errors] == [(text, (ended,), ("node",))] * 2


def test_the_launcher_tells_a_rank_0_that_waits_already(noted):
    note, store = noted
    asked = threading.Event()

    class Asked(PrefixStore):
        def get(self, key, timeout):
            asked.set()
            return super().get(key, timeout)

    def body(index):
        if index == 0:
            return start(0, Asked(store._store, "job"), size=2)
        asked.wait(PATIENCE)
        note.leave(1, "node", "returned")
        return None

    assert in_threads(2, body, PATIENCE)[0].ranks == (1,)


def test_a_rank_that_waits_for_the_next_start_hears_that_rank_0_has_ended(noted):
    note, store = noted
    starts = [Starts(), Starts()]
    assert in_threads(2, lambda rank: start(rank, store, size=2, starts=starts[rank]), PATIENCE) == [("node",) * 2] * 2
    note.leave(0, "node", "ended with exit code 0")
    (error,) = in_threads(1, lambda _: start(1, store, size=2, starts=starts[1]), PATIENCE)
    assert (type(error), error.ranks) == (PeerLostError, (0,))
    assert "ended with exit code 0 and did not come to this hvd.init()" in str(error)  # it had come to the first one


def test_the_reason_that_rank_0_left_counts_more_than_its_end(noted):
    note, store = noted
    first = start(0, store, size=2, timeout=0.05)
    note.leave(0, "node", "ended with exit code 1")
    (late,) = in_threads(1, lambda _: start(1, store, size=2), PATIENCE)
    assert (type(late), str(late)) == (CollectiveTimeoutError, str(first))


def test_a_launcher_that_does_not_answer_is_asked_once(monkeypatch):
    class Gone:
        asked = 0

        def get(self, key, timeout):
            self.asked += 1
            raise PeerLostError("the rendezvous server cannot be reached", [], [])

    monkeypatch.setattr(entries, "LOOK_SECONDS", 0.0)
    store = Gone()
    watch = entries.EndWatch(store)
    for _ in range(3):
        watch.check()
    assert store.asked == 1


def test_the_first_end_counts(noted):
    note, store = noted
    note.leave(1, "node", "ended with exit code 0")
    note.leave(2, "node", "ended with exit code 1")
    assert start(0, store).ranks == (1,)


@pytest.mark.parametrize("ended", [0, 1])
def test_a_note_may_have_any_text(noted, ended):
    note, store = noted
    note.leave(ended, "node", "raised Error('\udc80')")
    (error,) = in_threads(1, lambda _: start(1 - ended, store, size=2), PATIENCE)
    assert f"rank {ended} on host node raised Error('?') and did not come" in str(error)


def test_notes_that_were_withdrawn_do_not_count(noted):
    note, store = noted
    for rank in range(2):
        note.leave(rank, "node", "returned")
    note.withdraw()
    assert in_threads(2, lambda rank: start(rank, store, size=2), PATIENCE) == [("node",) * 2] * 2
    assert store.get(KEY, 0.0)
    with pytest.raises(CollectiveTimeoutError):
        store.get(entries.KEY, 0.0)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_starts_after_another_was_killed_names_that_one(victim):
    """The victim is killed after the hello of rank 1; rank 2 comes when the other rank has ended the start."""
    secret = secrets.token_bytes(16)
    with (
        RendezvousServer(secret) as server,
        Processes(3, functools.partial(_start, server.port, secret, victim)) as processes,
    ):
        first, late = (processes.hear(rank, 3 * PATIENCE) for rank in (1 - victim, 2))
    assert first == late
    assert (late[0], late[2]) == ("PeerLostError", (victim,))


def _start(port, secret, victim, member):
    if member.rank == victim:
        die = functools.partial(os.kill, os.getpid(), signal.SIGKILL)
        step, owner = ("_send_hello", Callee) if victim else ("_admit", Admission)
        whole = getattr(owner, step)
        setattr(owner, step, lambda *rest: (whole(*rest), die()))
    if member.rank == 2:
        member.store.get("over", 3 * PATIENCE)
    topology = Topology(member.rank, member.size, member.rank, member.size, hosts=(), cores=0)
    timeouts = Timeouts(connect=LONG)
    world = World("test", 0, topology, "node", ("127.0.0.1", port))
    error = outcome(lambda: bootstrap.connect(world, Settings(secret=secret, timeouts=timeouts)))
    member.store.set("over", b"")
    assert isinstance(error, HorovodInternalError)
    return type(error).__name__, str(error), error.ranks
