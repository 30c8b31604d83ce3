"""A thread on one core."""

import logging
import os
import threading

from collectives.backends.placement import pin


def in_a_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_only_the_calling_thread_is_bound():
    before, core = os.sched_getaffinity(0), max(os.sched_getaffinity(0))

    def pinned():
        pin(core)
        return os.sched_getaffinity(0)

    assert in_a_thread(pinned) == {core}
    assert os.sched_getaffinity(0) == before


def test_a_core_that_is_gone_is_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        pin(1023)
    assert "cannot bind the thread to core 1023: Invalid argument" in caplog.text
