import pytest

from collectives.api import (
    CollectiveTimeoutError,
    MismatchError,
    Operation,
    PeerLostError,
    RefusedCallError,
    Request,
    ShutDownError,
    Topology,
)
from collectives.controller.messages import Stop
from collectives.engine.shutdown import Ending
from executors.agents.local.supervisor import TRACEBACK, kind_of_end
from executors.failures import (
    FailureKind,
    brief,
    kind_of_chain,
    kind_of_error,
    raised_elsewhere,
)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("bad"), FailureKind.EXCEPTION),
        (MismatchError("shapes"), FailureKind.EXCEPTION),
        (RefusedCallError("rank 1 refused the call"), FailureKind.REFUSED_CALL),
        (SystemExit(3), FailureKind.EXIT),
        (PeerLostError("rank 1"), FailureKind.LOST_PEER),
        (CollectiveTimeoutError("rank 1"), FailureKind.LOST_PEER),
        (ShutDownError("rank 1"), FailureKind.SHUT_DOWN),
    ],
)
def test_the_kind_of_an_exception(error, kind):
    assert kind_of_error(error) is kind


def raised_from(error, cause=None, context=None):
    error.__context__ = context
    if cause is not None:
        error.__cause__ = cause
    return error


def test_the_kind_of_an_exception_with_what_led_to_it():
    lost, bad = PeerLostError("rank 1"), ValueError("bad")
    assert kind_of_chain(bad) is FailureKind.EXCEPTION
    assert kind_of_chain(raised_from(RuntimeError("failed"), cause=lost)) is FailureKind.LOST_PEER
    assert kind_of_chain(raised_from(RuntimeError("failed"), context=lost)) is FailureKind.LOST_PEER
    assert kind_of_chain(raised_from(RuntimeError("failed"), cause=bad, context=lost)) is FailureKind.EXCEPTION
    assert kind_of_chain(raised_from(bad, cause=bad)) is FailureKind.EXCEPTION


class BadError(Exception):
    def __str__(self):
        raise KeyError("no text")


def with_note(error):
    error.__notes__ = ["hint\n"]
    return error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("x"), "KeyError: 'x'"),
        (ValueError("first\nsecond\n"), "ValueError: first\nsecond"),
        (ValueError(), "ValueError"),
        (PeerLostError("rank 1"), "collectives.api.PeerLostError: rank 1"),
        (BadError(), f"{__name__}.BadError: <its str() failed>"),
        (with_note(ValueError("bad")), "ValueError: bad"),
        (with_note(ValueError()), "ValueError"),
    ],
)
def test_the_brief_text_of_an_exception_is_never_that_of_a_note(error, text):
    assert brief(error) == text


LOST = "collectives.api.PeerLostError: rank 1 is gone"
REFUSED = "collectives.api.RefusedCallError: tensor 'a': rank 1 refused the call"
SHUT_DOWN = "collectives.api.ShutDownError: Horovod has been shut down"


@pytest.mark.parametrize(
    ("code", "lines", "kind"),
    [
        (1, [TRACEBACK, "  File ...", "ValueError: bad"], FailureKind.EXCEPTION),
        (1, [], FailureKind.EXIT),
        (1, ["PeerLostError is what this line mentions"], FailureKind.EXIT),
        (3, ["oops"], FailureKind.EXIT),
        (-9, [], FailureKind.SIGNAL),
        (-2, [TRACEBACK, "KeyboardInterrupt"], FailureKind.SIGNAL),
        (137, [], FailureKind.SIGNAL),
        (193, [], FailureKind.EXIT),
        (1, [TRACEBACK, "  File ...", LOST], FailureKind.LOST_PEER),
        (1, [TRACEBACK, "  File ...", "collectives.api.MismatchError: the shapes differ"], FailureKind.EXCEPTION),
        (1, [TRACEBACK, "  File ...", REFUSED], FailureKind.REFUSED_CALL),
        (1, [TRACEBACK, SHUT_DOWN], FailureKind.SHUT_DOWN),
        (
            1,
            [TRACEBACK, "\x1b[1;35mcollectives.api.PeerLostError\x1b[0m: \x1b[35mrank 1 is gone\x1b[0m"],
            FailureKind.LOST_PEER,
        ),
        (1, [TRACEBACK, LOST, "and its second line"], FailureKind.LOST_PEER),
        (
            1,
            [TRACEBACK, SHUT_DOWN, "During handling ...", TRACEBACK, "RuntimeError: training failed"],
            FailureKind.SHUT_DOWN,
        ),
    ],
)
def test_the_kind_of_a_process_that_ended(code, lines, kind):
    assert kind_of_end(code, lines) is kind


REQUEST = Request("loss", Operation.ALLREDUCE)


@pytest.mark.parametrize("text", ["raised ValueError: bad", "raised KeyError: 'Call hvd.init() to start again'"])
@pytest.mark.parametrize("is_in_flight", [True, False])
def test_the_rank_that_raised_is_found_in_the_errors_of_the_others(text, is_in_flight):
    ending = Ending(Topology(0, 3, hosts=("a",) * 3), 5.0)
    ending.stop(Stop(2, cause=text))
    error = ending.in_flight(REQUEST) if is_in_flight else ending.error(REQUEST)
    assert raised_elsewhere([TRACEBACK, f"\x1b[1mcollectives.api.ShutDownError\x1b[0m: {error}"]) == (2, text)


def test_other_ends_name_no_rank_that_raised():
    ending = Ending(Topology(0, 3, hosts=("a",) * 3), 5.0)
    ending.stop(Stop(1))
    assert raised_elsewhere([TRACEBACK, SHUT_DOWN, str(ending.in_flight(REQUEST)), str(ending.error(REQUEST))]) is None


def test_consequences_are_the_least_likely_causes():
    assert sorted(FailureKind) == [
        FailureKind.DEATH,
        FailureKind.EXCEPTION,
        FailureKind.SIGNAL,
        FailureKind.EXIT,
        FailureKind.REFUSED_CALL,
        FailureKind.LOST_PEER,
        FailureKind.SHUT_DOWN,
    ]
    assert [kind for kind in FailureKind if kind.is_consequence] == [
        FailureKind.REFUSED_CALL,
        FailureKind.LOST_PEER,
        FailureKind.SHUT_DOWN,
    ]
