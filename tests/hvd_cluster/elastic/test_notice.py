"""SIGTERM to the processes that a rank of an elastic job forks, such as the workers of a DataLoader."""

import os
import signal
from types import SimpleNamespace

import pytest

from hvd_cluster.elastic.notice import heed_notice

SECONDS = 30  # the longest life of a child


@pytest.fixture
def worlds():
    """Those of a rank that trains, and that heeds SIGTERM."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    noted, written = os.pipe()
    worlds = SimpleNamespace(is_over=False, is_alone=False, is_abandoned=False, noted=noted)
    worlds.give_notice = lambda: os.write(written, b"notice")
    heed_notice(worlds)
    yield worlds
    signal.signal(signal.SIGTERM, before)
    os.close(noted)
    os.close(written)


def terminated_child(find=lambda: None):
    """What ``find()`` returns in a forked child, and how the child ends when it gets SIGTERM then."""
    answers, answer = os.pipe()
    child = os.fork()
    if not child:
        _wait_in_child(find, answer)
    found = os.read(answers, 100).decode()
    os.kill(child, signal.SIGTERM)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(answers)
    os.close(answer)
    return found, code


def _wait_in_child(find, answer):
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        os.write(answer, str(find()).encode())
        while True:
            signal.pause()
    finally:
        os._exit(1)


def disposition():
    return signal.getsignal(signal.SIGTERM)


def is_untold(worlds):
    os.set_blocking(worlds.noted, False)
    with pytest.raises(BlockingIOError):
        os.read(worlds.noted, 6)
    return True


def test_sigterm_gives_notice(worlds):
    signal.raise_signal(signal.SIGTERM)
    assert os.read(worlds.noted, 6) == b"notice"


def test_a_forked_child_is_ended_by_sigterm_and_its_parent_stays(worlds):
    found, code = terminated_child(disposition)
    assert (found, code) == (str(signal.SIG_DFL), -signal.SIGTERM)
    assert is_untold(worlds)
    assert disposition() != signal.SIG_DFL


def test_a_handler_of_the_user_that_calls_ours_ends_a_forked_child(worlds):
    ours = disposition()
    signal.signal(signal.SIGTERM, lambda number, frame: ours(number, None))
    assert terminated_child()[1] == -signal.SIGTERM
    assert is_untold(worlds)


def test_a_handler_of_the_user_stays_also_in_a_forked_child(worlds):
    signal.signal(signal.SIGTERM, own := lambda *event: os._exit(7))
    heed_notice(worlds)
    assert disposition() == own
    assert terminated_child()[1] == 7
