"""The events of engines: what observers hear, in which order, with which numbers and times."""

import sys
from collections import Counter

import numpy as np
import pytest

from collectives.api import HorovodInternalError, MismatchError, ShutDownError
from collectives.backends.phases import phase
from collectives.events import (
    Decided,
    Failed,
    Finished,
    Heard,
    Phase,
    Received,
    Sent,
    Stalled,
    Started,
    Submitted,
    Switched,
)
from tests.collectives.backends.inproc import InprocBackend
from tests.collectives.engine.job import Caller, ones, outcome, run, running, submit, until, wait

pytestmark = pytest.mark.usefixtures("transport")


def names_of(event):
    return event.names if isinstance(event, Decided | Started | Finished) else (getattr(event, "name", None),)


def kinds(events, *kinds):
    return [event for event in events if isinstance(event, kinds)]


def test_events_tell_what_happened_in_order():
    heard = [[], []]

    def body(engine):
        engine.events.subscribe(heard[engine.topology.rank].append)
        engine.barrier()
        works = [submit(engine, ones(engine), name) for name in "ab"]
        for work in works:
            wait(engine, work)
        return outcome(lambda: run(engine, np.ones(3 + engine.topology.rank), "odd"))

    with running(2) as job:
        job.run(body)
    for events in heard:
        for name in "ab":
            story = [event for event in events if name in names_of(event) and not isinstance(event, Heard)]
            story.sort(key=lambda event: event.time)
            assert [type(event) for event in story] == [Submitted, Decided, Started, Finished]
            assert story[1].batch == story[2].batch == story[3].batch
            assert story[2].version == 1
            assert (story[0].nbytes, story[2].operation, story[2].backend) == (24, "allreduce", "inproc")
            assert story[2].nbytes == 24 * len(story[2].names)
        odd = [event for event in events if "odd" in names_of(event) and not isinstance(event, Heard)]
        odd.sort(key=lambda event: event.time)
        assert [type(event) for event in odd] == [Submitted, Failed]
        assert isinstance(odd[1].error, MismatchError)
        assert odd[1].batch is None


def test_a_tensor_in_flight_at_the_end_fails():
    heard = []
    with running(2) as job:
        job.engines[0].events.subscribe(heard.append)
        submit(job.engines[0], np.ones(3), "x")
        job.engines[1].shutdown()
        until(lambda: kinds(heard, Failed))
    story = sorted([event for event in heard if not isinstance(event, Sent | Received)], key=lambda event: event.time)
    assert [type(event) for event in story] == [Submitted, Heard, Failed]
    assert isinstance(story[2].error, ShutDownError)
    assert story[2].batch is None


def test_a_tensor_that_fails_in_a_backend_fails_in_its_batch():
    heard = []
    with running(2, faults={(0, 1): HorovodInternalError("planned")}) as job:
        job.engines[0].events.subscribe(heard.append)
        job.outcomes(lambda engine: [run(engine, ones(engine), name) for name in "xy"])
    failed = {(event.name, event.batch) for event in kinds(heard, Failed)}
    assert failed == {("y", event.batch) for event in kinds(heard, Started) if event.names == ("y",)}


def test_rank_0_learns_who_has_submitted_when():
    heard = []

    def body(engine):
        for name, repeats in (("a", 3), ("b", 1)):
            for _ in range(repeats):
                wait(engine, submit(engine, ones(engine), name))
            engine.barrier()

    with running(3) as job:
        job.engines[0].events.subscribe(heard.append)
        job.run(body)
    steps = kinds(heard, Heard, Decided)
    for event in kinds(steps, Decided):
        before = [each for each in kinds(steps, Heard) if each.time <= event.time]
        for name in event.names:
            assert {rank for each in before if each.name == name for rank in each.ranks} == {0, 1, 2}
    cached = [event.cached for event in kinds(heard, Heard) if event.name == "a"]
    assert cached == sorted(cached)
    assert cached[:3] == [False] * 3


@pytest.mark.parametrize("one_by_one", [True, False])
def test_batches_have_the_same_numbers_on_all_ranks(one_by_one):
    """Decided by the coordinator or in the bypass, on overlapping process sets."""
    seen = [{}, {}, {}]

    def body(engine):
        rank = engine.topology.rank

        def note(event):
            if isinstance(event, Started | Decided | Finished):
                seen[rank].setdefault(event.batch, set()).add((event.names, event.process_set))

        engine.events.subscribe(note)
        for step in range(12):
            run(engine, ones(engine), "x")
            if step % 5 == 4 and not one_by_one and rank < 2:
                run(engine, ones(engine), "y", process_set=1)

    with running(3, sets=[(0, 1)]) as job:
        job.run(body)
    for batches in seen:
        assert all(len(contents) == 1 for contents in batches.values())
    assert seen[0] == seen[1]
    assert {number: batch for number, batch in seen[0].items() if number in seen[2]} == seen[2]
    assert len(seen[2]) == 12


# Phases.


class Phased(InprocBackend):
    """A backend that reports one phase."""

    @phase("exchange")
    def allreduce_arrays(self, *given):
        super().allreduce_arrays(*given)


def test_phases_of_a_backend_carry_the_batch(monkeypatch):
    monkeypatch.setattr("tests.collectives.engine.job.InprocBackend", Phased)
    heard = []
    with running(2) as job:
        job.run(lambda engine: run(engine, ones(engine), "x"))
        end = job.engines[0].events.subscribe(heard.append)
        job.run(lambda engine: run(engine, ones(engine), "x"))
        until(lambda: [event for event in kinds(heard, Finished) if event.batch == kinds(heard, Started)[0].batch])
        end()
        job.run(lambda engine: run(engine, ones(engine), "x"))
    (started,), (phased,) = kinds(heard, Started), kinds(heard, Phase)
    # The end of the first run may come late.
    (finished,) = [event for event in kinds(heard, Finished) if event.batch == started.batch]
    assert (phased.name, phased.batch) == ("exchange", started.batch)
    assert started.time <= phased.time <= phased.end <= finished.time


@pytest.mark.usefixtures("unhurried")
def test_phases_in_the_bypass_belong_to_the_batch_that_is_decided_meanwhile():
    heard = [[], []]

    def body(engine):
        engine.events.subscribe(heard[engine.topology.rank].append)
        for _ in range(8):
            run(engine, np.ones(1 << 18), "x")
        return engine._loop._bypass.on

    with running(2, shared_memory=True) as job:
        assert job.run(body) == [True, True]
    for events in heard:
        named = Counter()
        for event in kinds(events, Phase):
            named[event.batch, event.name] += event.calls
        for batch in (event.batch for event in kinds(events, Started)):
            # Two rounds of a buffer each, in a pipeline: three waits.
            assert named[batch, "copy in"] == named[batch, "combine"] == named[batch, "copy out"] == 2
            assert named[batch, "wait for ranks"] == 3
        spans = {event.batch: (event.time, event.end) for event in kinds(events, Phase)}
        finished = {event.batch: event.time for event in kinds(events, Finished)}
        assert all(begin <= end <= finished[batch] for batch, (begin, end) in spans.items())


@pytest.mark.usefixtures("unhurried")
def test_phases_of_a_trial_that_does_not_run_are_dropped():
    heard = []

    def warm_up(engine):
        for _ in range(6):
            run(engine, ones(engine), "x")

    with running(2, shared_memory=True) as job:
        for name in "xy":
            job.run(lambda engine, name=name: run(engine, ones(engine), name))
        job.run(warm_up)
        until(lambda: all(engine._loop._bypass.on for engine in job.engines))
        job.engines[0].events.subscribe(heard.append)
        first = Caller(job.engines[0], "x")
        second = Caller(job.engines[1], body=lambda engine: [run(engine, ones(engine), name) for name in "yx"])
        run(job.engines[0], ones(job.engines[0]), "y")
        first.result(), second.result()
    numbers = {event.batch for event in kinds(heard, Started)}
    assert {event.batch for event in kinds(heard, Phase)} == numbers
    assert len(numbers) == 2


# Parameters, control messages, stalls.


def test_a_switch_of_parameters_names_the_batch_and_is_the_same_on_all_ranks():
    heard = [[], []]

    def body(engine):
        engine.events.subscribe(heard[engine.topology.rank].append)
        for step in range(6):
            if step == 3 and engine.topology.rank == 0:
                engine.propose(fusion_threshold=7)
            run(engine, ones(engine), "x")

    with running(2) as job:
        job.run(body)
    switches = [[(event.batch, event.parameters) for event in kinds(events, Switched)] for events in heard]
    assert switches[0] == switches[1]
    assert [(given.version, given.fusion_threshold) for _, given in switches[0]][1:] == [(2, 7)]
    for events in heard:
        versions = {event.batch: event.version for event in kinds(events, Started)}
        assert versions[switches[0][1][0]] == 2
        assert versions[switches[0][1][0] - 1] == 1


def test_control_messages_are_events_on_both_ends():
    heard = [[], [], []]

    def body(engine):
        engine.barrier()
        run(engine, ones(engine), "x")
        engine.barrier()

    with running(3) as job:
        for engine in job.engines:
            engine.events.subscribe(heard[engine.topology.rank].append)
        job.run(body)
    for rank in (1, 2):
        sent, received = kinds(heard[rank], Sent), kinds(heard[rank], Received)
        assert {(event.message, event.ranks) for event in sent} >= {("Ready", (0,))}
        assert {(event.message, event.rank) for event in received} >= {("Run", 0)}
        at_0 = Counter((event.message, event.nbytes) for event in kinds(heard[0], Received) if event.rank == rank)
        by_0 = Counter((event.message, event.nbytes) for event in kinds(heard[0], Sent) if rank in event.ranks)
        assert Counter((event.message, event.nbytes) for event in received) <= by_0
        ready = Counter((event.message, event.nbytes) for event in sent if event.message == "Ready")
        assert ready == Counter({key: count for key, count in at_0.items() if key[0] == "Ready"})
        assert all(event.nbytes > 0 for event in (*sent, *received))


def test_a_stall_is_an_event_on_each_rank_that_waits():
    heard = [[], [], []]
    with running(3, stall_warning=0.05) as job:
        for engine in job.engines:
            engine.events.subscribe(heard[engine.topology.rank].append)
        callers = [Caller(job.engines[rank], "x") for rank in (0, 2)]
        until(lambda: (1,) in [event.missing for event in kinds(heard[0], Stalled)] and kinds(heard[2], Stalled))
        run(job.engines[1], ones(job.engines[1]), "x")
        assert [caller.result()[0] for caller in callers] == [6.0, 6.0]
    for event in kinds(heard[0], Stalled):
        assert (event.name, event.process_set) == ("x", 0)
        assert 1 in event.missing  # the first report may come before ranks 0 and 2 both have
        assert event.seconds >= 0.05
    assert {(event.name, event.missing) for event in kinds(heard[2], Stalled)} == {("x", ())}
    assert not kinds(heard[1], Stalled)


def test_a_silent_rank_0_is_the_missing_rank(monkeypatch):
    monkeypatch.setattr("collectives.stalls.watchdog.GRACE_SECONDS", 0.02)
    heard = []
    with running(2, stall_warning=0.05) as job:
        lock = job.engines[0]._progress._driving.lock
        until(lambda: lock.acquire(blocking=False))
        job.engines[1].events.subscribe(heard.append)
        caller = Caller(job.engines[1], "x")
        until(lambda: kinds(heard, Stalled))
        lock.release()
        run(job.engines[0], ones(job.engines[0]), "x")
        caller.result()
    assert kinds(heard, Stalled)[0].missing == (0,)


# Observers.


def test_a_subscriber_that_raises_is_dropped_and_harms_nobody(caplog):
    def clumsy(event):
        raise KeyError("oops")

    heard = []
    with running(2) as job:
        for engine in job.engines:
            engine.events.subscribe(clumsy)
            engine.events.subscribe(heard.append)
        for _ in range(3):
            job.run(lambda engine: run(engine, ones(engine), "x"))
    assert len(kinds(heard, Finished)) == 6
    assert caplog.text.count("is removed") == 2


def made_by(call):
    """How often ``call`` calls Python functions that are about events."""
    made = Counter()

    def note(frame, event, _):
        # "recording" and its default ask for a profile, not for observers.
        if event == "call" and frame.f_code.co_name not in ("recording", "<lambda>"):
            made[frame.f_code.co_filename.rpartition("/")[2]] += 1

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return sum(made[file] for file in ("events.py", "observers.py", "phases.py"))


@pytest.mark.parametrize("shared_memory", [False, True])
def test_without_observers_no_function_for_them_is_called(shared_memory):
    def body(engine):
        def steps():
            for _ in range(4):
                run(engine, ones(engine), "x")
            engine.barrier()

        steps()
        before = made_by(steps)
        end = engine.events.subscribe(lambda event: None)
        watched = made_by(steps)
        end()
        steps()
        return before, watched > 0, made_by(steps)

    with running(2, shared_memory=shared_memory) as job:
        assert job.run(body) == [(0, True, 0)] * 2


def test_what_nobody_wants_is_not_measured():
    """Timing phases costs more than all other events. Tuning needs one kind of events, and does not pay for it."""
    heard = []
    with running(2) as job:
        end = job.engines[0].events.subscribe(heard.append, [Started])
        job.run(lambda engine: [run(engine, ones(engine), "x") for _ in range(5)])
        assert all(backend.on_phase is None for backend in job.engines[0]._parts.runner.backends())
        end()
    assert [type(event) for event in heard] == [Started] * 5


@pytest.mark.parametrize("repeats", [0, 3])
def test_a_wait_is_known_before_it_is_over(repeats):
    """Also where the ranks agree without the coordinator, because they have made the same call before."""
    with running(2) as job:
        engine, other = job.engines
        for _ in range(repeats):
            job.run(lambda engine: run(engine, ones(engine), "x"))
        assert engine.waiting() == 0.0
        caller = Caller(engine, "x")
        until(lambda: engine.waiting() > 0.05)
        assert other.waiting() == 0.0
        assert (run(other, ones(other), "x") == caller.result()).all()
        assert engine.waiting() == 0.0
