"""The loop of a driver; its clock is the test's."""

import math

from executors.job.loop import Loop


def test_actions_that_are_due_are_called_without_a_wait():
    now, called = [100.0], []
    loop = Loop(lambda: now[0])
    loop.after(5.0, lambda: called.append("later"))
    loop.after(2.0, lambda: called.append("alarm"))
    loop.soon(lambda: called.append("soon"))
    loop.soon(lambda: loop.soon(lambda: called.append("again")))
    assert loop.call_due() == 2.0
    assert called == ["soon"]
    now[0] = 102.0
    assert loop.call_due() == 3.0
    assert called == ["soon", "again", "alarm"]


def test_a_loop_without_alarms_has_no_next_action():
    assert Loop().call_due() == math.inf
