"""A member that waits for another one for long lets its engine work meanwhile."""

import threading
from contextlib import closing

import pytest

from collectives.backends.gloo.bootstrap import GlooBootstrap
from collectives.backends.hierarchical.thread import StageThread
from collectives.backends.shm import ShmBootstrap
from collectives.backends.tcp import TcpBootstrap
from collectives.net.interfaces import LOOPBACK
from collectives.store.memory import MemoryStore
from tests.collectives.backends.members import group_of, in_threads
from tests.collectives.backends.offers import meet

TIMEOUT = 20.0
JOININGS = {
    "shm": lambda group: ShmBootstrap(group, TIMEOUT, crowded=True),
    "tcp": lambda group: TcpBootstrap(group, TIMEOUT, LOOPBACK, b"secret", crowded=True),
    "gloo": lambda group: GlooBootstrap(group, TIMEOUT),
}


class Waits:
    """Counts the calls, and sets ``enough`` at the second."""

    def __init__(self):
        self.threads = []
        self.enough = threading.Event()

    def __call__(self):
        self.threads.append(threading.current_thread())
        if len(self.threads) == 2:
            self.enough.set()


@pytest.mark.parametrize("kind", JOININGS)
def test_an_operation_that_waits_calls_again_and_again_on_the_thread_that_waits(kind):
    """The second member comes only after the first has been called twice."""
    store, waits = MemoryStore(), Waits()

    def body(position):
        backend = meet(JOININGS[kind](group_of(2, position)), store, TIMEOUT)
        try:
            if position == 0:
                backend.attend(waits)
            else:
                assert waits.enough.wait(TIMEOUT)
            backend.wait_for_all()
            assert position or set(waits.threads) == {threading.current_thread()}
            in_time.wait(TIMEOUT)
        finally:
            backend.close()

    in_time = threading.Barrier(2)
    in_threads(2, body)


def test_a_call_beside_is_waited_for_with_calls_and_raises_its_error():
    waits = Waits()

    def fail():
        assert waits.enough.wait(TIMEOUT)
        raise ValueError("beside")

    with closing(StageThread("hvd-test")) as thread, thread as other, pytest.raises(ValueError, match="beside"):
        other.finish(other.submit(fail), waits)
    assert set(waits.threads) == {threading.current_thread()}
