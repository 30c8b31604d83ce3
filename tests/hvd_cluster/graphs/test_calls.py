"""When the calls of a batch are submitted, with stand-ins for calls."""

import threading

import pytest

from hvd_cluster.graphs.calls import CallBatch

SECONDS = 20


class Call:
    """Notes in ``sent`` that it was submitted."""

    def __init__(self, batch, name, sent):
        self.takes_part = batch.join(name)
        self._batch, self._name, self._sent = batch, name, sent

    def get_ready(self):
        self._batch.ready(self)

    def send(self):
        self._sent.append(self._name)


@pytest.fixture
def batch():
    return CallBatch()


def made(batch, names):
    sent = []
    return [Call(batch, name, sent) for name in names], sent


def test_calls_that_are_ready_before_the_block_ends_wait_for_its_end(batch):
    with batch:
        calls, sent = made(batch, "abc")
        for call in reversed(calls):
            call.get_ready()
        assert sent == []
    assert sent == ["c", "b", "a"]


def test_calls_that_are_ready_after_the_block_wait_for_the_last_one(batch):
    with batch:
        (first, second, third), sent = made(batch, "abc")
        second.get_ready()
    third.get_ready()
    assert sent == []
    first.get_ready()
    assert sent == ["b", "c", "a"]


def test_an_exception_in_the_block_lets_the_calls_go_that_were_made(batch):
    (first, second), sent = made(batch, "ab")
    first.get_ready()

    def fail():
        with batch:
            raise KeyError("refused")

    with pytest.raises(KeyError, match="refused"):
        fail()
    assert sent == []
    second.get_ready()
    assert sent == ["a", "b"]


def test_a_block_without_calls(batch):
    with batch:
        pass
    with pytest.raises(ZeroDivisionError), CallBatch():
        raise ZeroDivisionError


def test_a_second_call_of_a_name_takes_no_part(batch):
    """It is not ready before the first one is over, for which the first one would wait."""
    with batch:
        calls, sent = made(batch, "aab")
        for call in calls:
            if call.takes_part:
                call.get_ready()
    assert [call.takes_part for call in calls] == [True, False, True]
    assert sent == ["a", "b"]


def test_calls_that_get_ready_on_threads(batch):
    """Each is submitted once, by whichever thread is the last one."""
    with batch:
        calls, sent = made(batch, range(16))
        together = threading.Barrier(len(calls) + 1, timeout=SECONDS)

        def get_ready(call):
            together.wait()
            call.get_ready()

        threads = [threading.Thread(target=get_ready, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        together.wait()
    for thread in threads:
        thread.join(SECONDS)
    assert sorted(sent) == list(range(16))
