"""The last step of a start: all ranks report that their backends are connected. Ranks are threads of one process."""

import pytest

from collectives.api import CollectiveTimeoutError, EngineError, PeerLostError
from collectives.controller.messages import Leave, Ping, encode
from collectives.engine.start import StartupBarrier
from collectives.net.attempts import ConnectAttempt
from tests.collectives.backends.members import in_threads
from tests.collectives.engine.job import PATIENCE, SocketTransport, outcome, until

HOSTS = ("a", "a", "b")
TIMEOUT = "HOROVOD_GLOO_TIMEOUT_SECONDS"
SHORT = 0.1


@pytest.fixture
def channels():
    made = SocketTransport(len(HOSTS)).channels
    yield made
    for channel in made:
        channel.close()


def confirm(channel, seconds=PATIENCE):
    """The error that ends the start of a rank, None if there is none. The rank tells it to the others."""
    confirmation = StartupBarrier(channel, HOSTS)
    with ConnectAttempt(seconds) as attempt:
        error = outcome(lambda: confirmation.confirm(attempt))
    if error is None:
        return None
    reason = confirmation.explain(error, [])
    confirmation.abort(reason)
    return reason


def test_all_ranks_go_on_when_all_are_connected(channels):
    assert in_threads(3, lambda rank: confirm(channels[rank]), PATIENCE) == [None] * 3


def test_messages_that_rank_0_sends_to_the_engine_wait_for_it(channels):
    def body(rank):
        error = confirm(channels[rank])
        if rank == 0:
            channels[0].send_to((1, 2), encode(Ping()))
            channels[0].send_to((1, 2), encode(Leave()))
        return error

    def late(rank):
        found = []
        until(lambda: found.extend(channels[rank].receive()) or len(found) == 2)
        return found

    channels[1].poll = channels[2].poll = lambda seconds: None
    assert in_threads(3, body, PATIENCE) == [None] * 3
    assert [late(rank) for rank in (1, 2)] == [[(0, encode(Ping())), (0, encode(Leave()))]] * 2


def test_messages_that_were_put_back_come_first_and_wake_the_next_wait(channels):
    channels[0].send(1, b"third")
    channels[1].put_back([(0, b"first"), (0, b"second")])
    channels[1].poll(None)
    found = []
    until(lambda: found.extend(channels[1].receive()) or len(found) == 3)
    assert found == [(0, b"first"), (0, b"second"), (0, b"third")]


@pytest.mark.parametrize(
    ("victim", "patience"),
    [(2, {0: SHORT, 1: PATIENCE}), (2, {0: PATIENCE, 1: SHORT}), (0, {1: SHORT, 2: SHORT})],
    ids=str,
)
def test_every_rank_names_the_rank_that_does_not_answer(channels, victim, patience):
    """Whichever rank gives up first: rank 0, or another one."""
    ranks = sorted(patience)
    errors = in_threads(2, lambda index: confirm(channels[ranks[index]], patience[ranks[index]]), PATIENCE)
    for error in errors:
        assert type(error) is CollectiveTimeoutError
        assert error.ranks == (victim,)
        assert f"rank {victim} on host {HOSTS[victim]!r}: no answer for" in str(error)


def test_if_all_ranks_answer_the_error_says_so(channels):
    """Rank 2 still connects its backends."""

    def body(rank):
        if rank < 2:
            return confirm(channels[rank], SHORT)
        confirmation = StartupBarrier(channels[2], HOSTS)
        with ConnectAttempt(PATIENCE) as attempt, attempt.checking(confirmation.check):
            return outcome(lambda: attempt.wait({}))

    errors = in_threads(3, body, PATIENCE)
    for error in errors:
        assert type(error) is CollectiveTimeoutError
        assert "Every rank runs" in str(error)
        assert f"Raise {TIMEOUT}" in str(error)


def test_the_error_of_one_rank_ends_the_others(channels):
    def body(rank):
        if rank < 2:
            return confirm(channels[rank])
        StartupBarrier(channels[2], HOSTS).abort(EngineError("no memory"))
        return None

    first, second, _ = in_threads(3, body, PATIENCE)
    assert (type(first), str(first)) == (type(second), str(second)) == (EngineError, "no memory")


def test_a_rank_that_is_lost_explains_a_broken_connection(channels):
    lost = PeerLostError("rank 2 is gone", [2])
    error = PeerLostError("the connection to rank 1 broke", [1])
    assert StartupBarrier(channels[1], HOSTS).explain(error, [lost]) is lost
    assert StartupBarrier(channels[1], HOSTS).explain(error, []) is error
