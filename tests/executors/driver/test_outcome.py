import pickle
import sys
import threading

import cloudpickle
import pytest

from executors.api import RemoteError, WorkerError
from executors.driver.outcome import Outcome, capture, values


def outcome_of(fn):
    return cloudpickle.loads(capture(fn, 3, "node-7"))


def raising(error):
    def fn():
        raise error

    return fn


class Awkward(Exception):
    """Pickles well, and cannot be unpickled in the ordinary way."""

    def __init__(self, code, text):
        super().__init__(f"{text} ({code})")
        self.code = code


class Locked(Exception):
    def __init__(self):
        super().__init__("locked")
        self.lock = threading.Lock()


@pytest.mark.parametrize("value", [None, 5, "text", [1, {"a": (2.5, b"x")}], bytes(100_000)])
def test_a_value_arrives(value):
    outcome = outcome_of(lambda: value)
    assert not outcome.failed
    assert outcome.unwrap() == value


def test_a_value_that_is_a_lambda_arrives():
    assert outcome_of(lambda: lambda x: x + 1).unwrap()(1) == 2


@pytest.mark.parametrize(
    "error", [ValueError("bad"), KeyError("k"), OSError(2, "no", "file"), Awkward(7, "x"), GeneratorExit("g")], ids=repr
)
def test_an_exception_is_raised_as_itself_with_its_origin(error):
    outcome = outcome_of(raising(error))
    assert outcome.failed
    with pytest.raises(type(error)) as caught:
        outcome.unwrap()
    assert type(caught.value) is type(error)
    assert (caught.value.args, vars(caught.value)) == (error.args, vars(error))
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteError)
    assert (cause.rank, cause.host) == (3, "node-7")
    assert "in fn" in cause.traceback
    assert str(cause).startswith("raised by rank 3 on node-7:\nTraceback")


def test_the_remote_traceback_holds_the_chain():
    def fn():
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from error

    with pytest.raises(ValueError, match="second") as caught:
        outcome_of(fn).unwrap()
    assert "KeyError: 'first'" in caught.value.__cause__.traceback


def test_a_value_that_cannot_be_pickled_says_its_type_and_the_remedy():
    with pytest.raises(
        WorkerError, match=r"rank 3 on node-7 returned a value of type _thread\.lock .* return plain"
    ) as e:
        outcome_of(threading.Lock).unwrap()
    assert (e.value.rank, e.value.host, e.value.exit_code) == (3, "node-7", None)


def test_an_exception_that_cannot_be_pickled_has_a_stand_in():
    with pytest.raises(WorkerError, match=r"rank 3 on node-7 raised .*Locked: locked; .* cannot be pickled") as caught:
        outcome_of(raising(Locked())).unwrap()
    assert "Locked: locked" in caught.value.__cause__.traceback


def test_what_cannot_be_unpickled_in_the_driver_says_so():
    with pytest.raises(WorkerError, match="the result of rank 1 on h cannot be unpickled in the driver"):
        Outcome(1, "h", b"no pickle").unwrap()
    with pytest.raises(WorkerError, match="cannot be unpickled") as caught:
        Outcome(1, "h", b"no pickle", "the traceback").unwrap()
    assert "the traceback" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("argument", "code", "shown"), [((), 0, "()"), ((0,), 0, "(0)"), ((4,), 4, "(4)"), (("why",), 1, "('why')")]
)
def test_sys_exit_does_not_end_the_driver(argument, code, shown):
    with pytest.raises(WorkerError) as caught:
        outcome_of(lambda: sys.exit(*argument)).unwrap()
    assert caught.value.exit_code == code
    assert f"called sys.exit{shown}" in str(caught.value)


def test_an_interrupt_ends_the_worker():
    with pytest.raises(KeyboardInterrupt):
        capture(raising(KeyboardInterrupt()), 0, "h")


@pytest.mark.parametrize("error", [WorkerError("text", 1, "h", -9), RemoteError(2, "h", "trace", "Henry")], ids=repr)
def test_our_errors_can_be_pickled(error):
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), vars(copy)) == (str(error), vars(error))


def outcomes_of(*functions):
    return [cloudpickle.loads(capture(fn, rank, "h")) for rank, fn in enumerate(functions)]


def test_values_are_in_the_order_of_the_ranks():
    assert values(reversed(outcomes_of(lambda: "a", lambda: "b"))) == ["a", "b"]


def test_a_failure_among_values_is_raised():
    with pytest.raises(ValueError, match="why"):
        values(outcomes_of(lambda: "fine", raising(ValueError("why"))))


def test_a_death_is_raised_without_a_cause():
    death = WorkerError("killed", 1, "h", -9)
    with pytest.raises(WorkerError, match="killed") as caught:
        values([*outcomes_of(lambda: "fine"), Outcome.of(death, 1, "h")])
    assert (caught.value.exit_code, caught.value.__cause__) == (-9, None)
