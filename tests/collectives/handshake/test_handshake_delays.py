"""Ranks that come late, not at all, or give up while the ranks connect: every rank hears which rank is missing."""

import socket
import threading
import zlib

import msgpack
import pytest

from collectives.api import (
    CollectiveTimeoutError,
    EngineError,
    PeerLostError,
    ShutDownError,
    Timeouts,
)
from collectives.controller import messages
from collectives.controller.errors import unpack
from collectives.controller.messages import Abort, Stop, decode, encode
from collectives.controller.process_sets import ProcessSets
from collectives.handshake import Hello, admission, connect_channel, dial
from collectives.handshake.hello import LocalEnd, pack_answer, pack_farewell, unpack_answer
from collectives.net import frames
from collectives.net.attempts import ConnectAttempt
from collectives.store.memory import MemoryStore
from tests.collectives.backends.members import in_threads
from tests.collectives.engine.job import PATIENCE, outcome
from tests.collectives.handshake.handshakes import KEY, LOCALHOST, SECRET, connect, connect_all


@pytest.fixture
def reasons_come(monkeypatch):
    """A rank that gives up waits for the reason of rank 0, however slow this machine is."""
    monkeypatch.setattr(dial, "REASON_SECONDS", PATIENCE)


def test_a_missing_rank_is_named():
    errors = connect_all([Hello(0, 4, "node"), Hello(2, 4, "node")], timeout=1.0)
    assert type(errors[0]) is CollectiveTimeoutError
    assert isinstance(errors[1], CollectiveTimeoutError | PeerLostError)
    assert str(errors[0]).startswith("ranks [1, 3] of 4 did not connect to rank 0 in time; ")
    assert "HOROVOD_GLOO_TIMEOUT_SECONDS" in str(errors[0])
    assert errors[0].ranks == (1, 3)


def test_the_reason_of_a_rank_that_gives_up_is_read_before_and_after_the_other_one_believes_that_it_connected():
    farewell = pack_farewell(CollectiveTimeoutError("late", [2]))
    with pytest.raises(CollectiveTimeoutError, match="late") as caught:
        unpack_answer(farewell)
    assert caught.value.ranks == (2,)
    message = decode(farewell)
    assert isinstance(message, Abort)
    assert str(unpack(message.error)) == "late"
    with pytest.raises(EngineError, match="Stop arrived while the ranks connected"):
        unpack_answer(encode(Stop(0)))
    with pytest.raises(ValueError, match="not enough values"):
        unpack_answer(msgpack.packb([None]))


def test_compressed_answers_are_not_nested_and_have_a_limit(monkeypatch):
    value = list(range(100_000))
    answer = pack_answer(value)
    assert unpack_answer(answer) == value
    with pytest.raises(EngineError):
        unpack_answer(msgpack.packb((True, zlib.compress(answer))))
    monkeypatch.setattr(messages, "LARGEST", len(answer))
    with pytest.raises(ValueError, match=f"of more than {len(answer)} bytes"):
        unpack_answer(answer)


def test_a_rank_that_came_hears_which_rank_did_not():
    """Its own patience is longer than that of rank 0."""

    def body(rank):
        return outcome(lambda: connect(Hello(rank, 3, "node"), store, timeout=PATIENCE if rank else 1.0))

    store = MemoryStore()
    first, second = in_threads(2, body, PATIENCE)
    assert type(first) is type(second) is CollectiveTimeoutError
    assert str(first) == str(second)
    assert second.ranks == (2,)


@pytest.mark.usefixtures("reasons_come")
def test_a_rank_that_gives_up_is_not_blamed_for_the_one_that_did_not_come():
    """It began before rank 0, and so its time is over first."""

    def body(rank):
        return outcome(lambda: connect(Hello(rank, 3, "node"), store, timeout=1.0 if rank else PATIENCE))

    store = MemoryStore()
    first, second = in_threads(2, body, PATIENCE)
    assert type(first) is type(second) is CollectiveTimeoutError
    assert first.ranks == second.ranks == (2,)


@pytest.mark.usefixtures("reasons_come")
def test_a_rank_that_gives_up_hears_which_rank_has_no_addresses_yet():
    """All ranks have come, but one of them cannot find its own addresses."""

    def body(rank):
        def offer(hosts, cores):
            if rank == 2:
                over.wait(PATIENCE)
            return b""

        try:
            return outcome(
                lambda: connect(Hello(rank, 3, "node"), store, timeout=(PATIENCE, 1.0, PATIENCE)[rank], offer=offer)
            )
        finally:
            over.set()

    store, over = MemoryStore(), threading.Event()
    errors = in_threads(3, body, PATIENCE)
    assert {type(error) for error in errors} == {CollectiveTimeoutError}
    assert {error.ranks for error in errors} == {(2,)}


def test_a_rank_0_that_stops_after_it_was_reached_is_named(monkeypatch):
    monkeypatch.setattr(dial, "REASON_SECONDS", 0.1)
    store, greeting = MemoryStore(), b"1" + bytes(frames.NONCE_BYTES)
    with socket.create_server((LOCALHOST, 0)) as stopped:
        store.set(KEY, msgpack.packb({"id": "1", "host": "other", "unix": "", "tcp": stopped.getsockname()}))
        accepting = threading.Thread(
            target=lambda: accepted.append(stopped.accept()[0]) or accepted[0].sendall(greeting)
        )
        accepted = []
        accepting.start()
        (error,) = connect_all([Hello(1, 2, "node")], store, timeout=1.0)
        accepting.join(PATIENCE)
        accepted[0].close()
    assert type(error) is CollectiveTimeoutError
    assert "rank 0 did not report the missing ranks in time" in str(error)
    assert error.ranks == (0,)


def test_a_rank_that_is_interrupted_says_so(monkeypatch):
    def admit_and_interrupt(*arguments):
        admit(*arguments)
        attempts[1].abort(ShutDownError("interrupted by a person"))

    def body(rank):
        with ConnectAttempt(PATIENCE) as attempt:
            attempts[rank] = attempt
            end = LocalEnd(Hello(rank, 3, "node"), SECRET, LOCALHOST, Timeouts().heartbeat, attempt)
            return outcome(lambda: connect_channel(end, store, ProcessSets(3), lambda *_: b""))

    admit = admission.Admission._admit
    monkeypatch.setattr(admission.Admission, "_admit", admit_and_interrupt)
    store, attempts = MemoryStore(), {}
    first, second = in_threads(2, body, PATIENCE)
    assert type(first) is PeerLostError
    assert first.ranks == (1,)
    assert "interrupted by a person" in str(first)
    assert type(second) is ShutDownError


def test_a_rank_0_that_is_stopped_is_late():
    """Its kernel still accepts connections."""
    store = MemoryStore()
    with socket.create_server((LOCALHOST, 0)) as stopped:
        entry = {"id": "1", "host": "other", "unix": "", "tcp": stopped.getsockname()}
        store.set(KEY, msgpack.packb(entry))
        (error,) = connect_all([Hello(1, 2, "node")], store, timeout=0.2)
    assert type(error) is CollectiveTimeoutError
    assert error.ranks == (0,)
