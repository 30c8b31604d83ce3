"""A decider that is one file and one line: it shares the board, the worker and the chain with the other deciders."""

import ast
import pathlib

import pytest

from collectives.api import MismatchError
from collectives.engine.bypass import Bypass
from collectives.events import Finished
from tests.collectives.controller import planned
from tests.collectives.controller.planned import Planned
from tests.collectives.engine.bypass_job import Counting, OneByOne, in_unison, round_of, rounds_of, worker_of
from tests.collectives.engine.job import Caller, ones, outcome, run, submit, total, until, wait
from tests.collectives.engine.test_bypass_mixture import Steps

HALVES = (("a", "b"), ("c", "d", "e"))
NAMES = [name for half in HALVES for name in half]


@pytest.fixture(autouse=True)
def third(monkeypatch):
    """The line in the assembly."""
    monkeypatch.setattr("collectives.engine.assembly.OUTER_DECIDERS", (Bypass, Planned))


def planned_of(engine):
    return engine._exchange._decider


def together(engine, names, factor=1.0):
    """Submit all tensors, then wait for them."""
    return finish(engine, [submit(engine, factor * ones(engine), name) for name in names])


def finish(engine, works):
    """The first element of each result, of which all are equal."""
    results = [wait(engine, work) for work in works]
    assert all((result == result[0]).all() for result in results)
    return [result[0] for result in results]


def in_halves(engine, factor=1.0):
    return [result for half in HALVES for result in together(engine, half, factor)]


def sums(size, factor=1.0):
    return [factor * total(size)[0]] * len(NAMES)


def learn(job):
    """Bring all ranks to a plan of the halves, and into rounds."""
    for _ in range(6):
        assert job.run(in_halves) == [sums(job.size)] * job.size
    until(lambda: in_unison(job))
    assert all(planned_of(engine).plan is not None for engine in job.engines)


def steps(job):
    return [planned_of(engine).steps for engine in job.engines]


def whole(engine, factor=1.0):
    return together(engine, NAMES, factor)


@pytest.mark.usefixtures("unhurried")
def test_a_whole_step_of_several_batches_is_one_round_without_messages(start):
    """No other decider knows these tensors as one set: they have never run together."""
    with start(3, wrap=Counting, fusion_threshold=60) as job:
        learn(job)
        batches = len(planned_of(job.engines[0]).plan.batches)
        assert batches > 2
        before = [channel.sent for channel in job.channels]
        rounds = [round_of(engine) for engine in job.engines]
        for step in range(10):
            factor = 1.0 + step
            assert job.run(lambda engine, factor=factor: whole(engine, factor)) == [sums(3, factor)] * 3
        assert [channel.sent for channel in job.channels] == before
        assert [round_of(engine) for engine in job.engines] == [number + 10 for number in rounds]
        assert steps(job) == [10] * 3


@pytest.mark.usefixtures("unhurried")
def test_batches_of_all_deciders_have_numbers_of_one_order(start):
    def body(engine):
        numbers = []
        engine.events.subscribe(lambda event: numbers.append(event.batch) if isinstance(event, Finished) else None)
        for step in range(12):
            (in_halves if step < 6 or step % 2 else whole)(engine)
        return numbers

    with start(2) as job:
        first, second = job.run(body)
    assert first == second == [*range(len(first))]
    assert steps(job)[0] == steps(job)[1] > 0


@pytest.mark.usefixtures("unhurried")
def test_tensors_of_a_plan_are_held_back_until_a_caller_waits(start):
    with start(2, wrap=Counting) as job:
        learn(job)
        before = [channel.sent for channel in job.channels]
        works = job.run(lambda engine: [submit(engine, ones(engine), name) for name in NAMES[:3]])
        until(lambda: all(len(worker_of(engine).unreported()) == 3 for engine in job.engines))
        rest = job.run(lambda engine: [submit(engine, ones(engine), name) for name in NAMES[3:]])
        until(lambda: all(len(worker_of(engine).unreported()) == 5 for engine in job.engines))
        assert [channel.sent for channel in job.channels] == before
        works = [early + late for early, late in zip(works, rest, strict=True)]
        assert job.run(lambda engine: finish(engine, works[engine.topology.rank])) == [sums(2)] * 2
        assert steps(job) == [1, 1]
        assert [channel.sent for channel in job.channels] == before


def test_a_rank_that_holds_a_part_back_lets_go_when_others_ask(start, monkeypatch):
    with start(2) as job:
        with monkeypatch.context() as patch:
            patch.setattr("collectives.engine.bypass.LATE_SECONDS", 1000.0)
            learn(job)
        first, second = job.engines
        held = [submit(second, ones(second), name) for name in NAMES[:2]]
        until(lambda: len(worker_of(second).unreported()) == 2)
        caller = Caller(first, body=whole)
        until(lambda: not rounds_of(second).on)
        assert finish(second, held) == sums(2)[:2]
        assert together(second, NAMES[2:]) == sums(2)[2:]
        assert caller.result() == sums(2)
        assert steps(job) == [0, 0]


@pytest.mark.usefixtures("unhurried")
def test_a_rank_with_other_tensors_brings_all_back_to_the_coordinator(start):
    """The other decider's number is different, even where both attempt something."""

    with start(2) as job:
        for _ in range(5):
            job.run(lambda engine: run(engine, ones(engine), "a"))
        learn(job)
        callers = [Caller(job.engines[1], body=whole)]
        until(lambda: round_of(job.engines[1]) > round_of(job.engines[0]))
        assert together(job.engines[0], ["a"]) == sums(2)[:1]
        assert together(job.engines[0], NAMES[1:]) == sums(2)[1:]
        assert callers[0].result() == sums(2)
        assert steps(job) == [0, 0]
        learn(job)
        assert job.run(whole) == [sums(2)] * 2
        assert steps(job) == [1, 1]


@pytest.mark.usefixtures("unhurried")
def test_new_parameters_end_the_plan(start):
    def tune(engine):
        if engine.topology.rank == 0:
            engine.propose(fusion_threshold=0)
        in_halves(engine)

    with start(2) as job:
        learn(job)
        fused = len(planned_of(job.engines[0]).plan.batches)
        job.run(tune)
        learn(job)
        assert len(planned_of(job.engines[0]).plan.batches) == len(NAMES) > fused
        assert job.run(whole) == [sums(2)] * 2
        assert steps(job) == [1, 1]


class PlannedSteps(Steps):
    """Steps that repeat, in halves or whole, among everything else that a job may do."""

    OTHERS = (*Steps.OTHERS, *["step"] * 24, "disturbed", "mismatch")

    def _expect(self, factor, results):
        assert results == [factor * total(self._engine.topology.size)[0]] * len(results)

    def _step(self, step):
        for number in range(self._common.randrange(1, 5)):
            factor = step + number / 8
            call = whole if self._common.random() < 0.6 else in_halves
            self._expect(factor, call(self._engine, factor))

    def _disturbed(self, step):
        """Some ranks submit another tensor first, the others last."""
        names = [*NAMES, "extra"]
        self._own.shuffle(names)
        self._expect(step, together(self._engine, names, step))

    def _mismatch(self, step):
        """The ranks disagree about one tensor of the step."""
        works = [submit(self._engine, self._mine(step), name) for name in NAMES[:-1]]
        bad = submit(self._engine, ones(self._engine, 3 + self._engine.topology.rank), NAMES[-1])
        self._expect(step, finish(self._engine, works))
        assert isinstance(outcome(lambda: wait(self._engine, bad)), MismatchError)


@pytest.mark.parametrize("seed", range(4))
def test_a_job_that_does_everything(start, seed):
    """Mismatches, joins, process sets, new parameters, ranks that decline or are late, several threads."""
    wrap = OneByOne if seed % 2 else lambda channel: channel
    with start(3, wrap=wrap, cache_capacity=[8, 1024, 1024, 1024][seed]) as job:
        job.run(lambda engine: PlannedSteps(engine, seed).run())
        ran = steps(job)
    assert ran[0] == ran[1] == ran[2] > 0


def test_it_uses_public_names_only():
    """Private attributes are its own."""
    tree = ast.parse(pathlib.Path(planned.__file__).read_text())
    private = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr.startswith("_")]
    assert private
    others = [node.attr for node in private if not (isinstance(node.value, ast.Name) and node.value.id == "self")]
    assert [name for name in others if name != "__init__"] == []
