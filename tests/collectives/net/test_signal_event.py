"""A flag to wait for, from threads and from a handler that interrupts its own thread."""

import threading

from collectives.net.channel import SignalEvent
from tests.collectives.engine.job import PATIENCE


def test_it_stays_set_until_it_is_cleared():
    latch = SignalEvent()
    assert not latch.is_set()
    latch.wait(0.001)
    latch.set()
    latch.wait(None)
    latch.wait(None)
    assert latch.is_set()
    latch.clear()
    assert not latch.is_set()


def test_all_who_wait_are_woken():
    latch = SignalEvent()
    threads = [threading.Thread(target=latch.wait, args=(None,), daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    latch.set()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_a_handler_may_set_it_in_the_middle_of_set():
    class Interrupted(SignalEvent):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if value is True and not inner:
                inner.append(1)
                self.set()

    inner = []
    latch = Interrupted()
    latch.set()
    assert latch.is_set()
