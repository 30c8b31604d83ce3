"""The threads of a timeline and the scheduler."""

import os
import threading

from collectives.observe.timeline.timeline import give_way


def policy_after(call):
    """The policies of a new thread that makes ``call``, and of the one that started it."""
    found = []
    thread = threading.Thread(target=lambda: (call(), found.append(os.sched_getscheduler(0))))
    thread.start()
    thread.join(20.0)
    return found[0], os.sched_getscheduler(0)


def test_only_the_thread_that_calls_gives_way():
    assert policy_after(give_way) == (os.SCHED_BATCH, os.SCHED_OTHER)


def test_in_a_sandbox_it_goes_on_as_before(monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert policy_after(give_way) == (os.SCHED_OTHER, os.SCHED_OTHER)
