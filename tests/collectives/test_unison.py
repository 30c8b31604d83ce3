"""Ranks that agree without the coordinator, on one tensor or on several, and how they come back to it."""

import functools
import random
from dataclasses import replace

import numpy as np
import pytest

from collectives.api import (
    CollectiveTimeoutError,
    DType,
    HorovodInternalError,
    Operation,
    PeerLostError,
    ReduceOp,
    Request,
    ShutDownError,
)
from collectives.buffers import as_buffer, empty
from collectives.engine.deciders.rounds import Rounds
from collectives.engine.work import Work
from collectives.events import Decided, Finished, Started, Submitted
from collectives.planning.board import Board
from tests.collectives.job import (
    TIMEOUTS,
    Caller,
    Job,
    SocketTransport,
    Watched,
    ones,
    run,
    running,
    submit,
    total,
    until,
    wait,
)


class Scripted(Board):
    """A board that answers as it is told."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.heard = []

    def attempt(self, value, call, waiting, agreed):
        self.heard.append(value)
        waiting([1])
        verdict = self.answers.pop(0)
        if verdict:
            agreed()
            call()
        return verdict

    def decline(self):
        self.heard.append(0)


def test_a_round_that_fails_is_the_last_until_it_begins_again():
    board, ran, waited = Scripted(True, False, True), [], []
    rounds = Rounds(board)

    def attempt(id):
        call, agreed = (lambda: ran.append(id)), (lambda: ran.append(-id))
        return rounds.attempt(id, call, agreed, lambda round, absent: waited.append((round, absent)))

    rounds.decline()
    assert not attempt(3)
    rounds.begin()
    assert (attempt(5), attempt(6), attempt(7)) == (True, False, False)
    assert not rounds.on
    rounds.begin()
    assert attempt(8)
    assert (board.heard, ran, waited) == ([5, 6, 8], [-5, 5, -8, 8], [(1, [1]), (2, [1]), (3, [1])])


def test_declining_is_said_once():
    board = Scripted(True)
    rounds = Rounds(board)
    rounds.begin()
    rounds.decline()
    rounds.decline()
    rounds.begin()
    rounds.withdraw(1)
    assert (rounds.on, board.heard) == (True, [0])
    rounds.withdraw(2)
    assert (rounds.on, board.heard) == (False, [0, 0])


def test_a_round_may_be_withdrawn_before_it_has_begun():
    board = Scripted()
    rounds = Rounds(board)
    rounds.withdraw(1)
    assert board.heard == []
    rounds.begin()
    assert (rounds.on, board.heard) == (False, [0])
    rounds.begin()
    assert (rounds.on, board.heard) == (True, [0])


def test_without_a_board_there_is_none():
    rounds = Rounds(None)
    rounds.begin()
    assert not rounds.on
    assert not rounds.attempt(1, pytest.fail, pytest.fail, pytest.fail)
    rounds.decline()
    rounds.withdraw(1)


# Engines.


class Counting(Watched):
    """A channel that counts what is sent."""

    def __init__(self, inner):
        super().__init__(inner)
        self.sent = 0
        self.send = self._count

    def _count(self, rank, data):
        self.sent += 1
        self._inner.send(rank, data)


class OneByOne(Watched):
    """A channel that brings one message at a time."""

    def __init__(self, inner):
        super().__init__(inner)
        self._here = []
        self.receive, self.peek = self._receive_one, lambda: bool(self._here) or inner.peek()

    def _receive_one(self):
        self._here += self._inner.receive()
        messages, self._here = self._here[:1], self._here[1:]
        return messages

    def _sleep(self, timeout):
        super()._sleep(0.0 if self._here else timeout)


def warm_up(engine, name="x"):
    """Bring the engine into unison."""
    for _ in range(4):
        run(engine, ones(engine), name)


NOTHING = np.zeros(0)


def warm_up_without_rows(engine, name):
    """Bring the engine into unison, with an operation that exchanges nothing."""
    for _ in range(4):
        run(engine, NOTHING, name, Operation.ALLGATHER)


def rounds_of(engine):
    """The rounds that the engine counts."""
    return engine._exchange._decider.rounds


def worker_of(engine):
    """What the engine has in flight."""
    return engine._exchange._decider._worker


def in_unison(job):
    """Whether all ranks are."""
    return all(rounds_of(engine).on for engine in job.engines)


@pytest.fixture(params=[False, True], ids=["inproc", "shm"])
def start(request, monkeypatch):
    """What starts a job: of threads that share everything, or a gate in shared memory and sockets."""
    if request.param:
        monkeypatch.setattr(Job, "transport", SocketTransport)
    return lambda *args, **kwargs: running(*args, shared_memory=request.param, **kwargs)


def test_one_tensor_at_a_time_needs_no_messages(start):
    def body(engine):
        return [run(engine, ones(engine), "x")[0] for _ in range(20)]

    with start(3, wrap=Counting) as job:
        job.run(warm_up)
        until(lambda: in_unison(job))
        before = [channel.sent for channel in job.channels]
        assert job.run(body) == [[6.0] * 20] * 3
        assert [channel.sent for channel in job.channels] == before
        assert in_unison(job)


OPERATIONS = {
    "allreduce": {},
    "average": {"op": ReduceOp.AVERAGE, "prescale_factor": 2.0, "postscale_factor": 3.0},
    "adasum": {"op": ReduceOp.ADASUM},
    "allgather": {"operation": Operation.ALLGATHER},
    "broadcast": {"operation": Operation.BROADCAST, "root_rank": 1},
    "alltoall": {"operation": Operation.ALLTOALL, "splits": (1, 3)},
    "reducescatter": {"operation": Operation.REDUCESCATTER},
}


@pytest.mark.parametrize("rows", [0, 4, 300_000])
@pytest.mark.parametrize("kind", OPERATIONS)
def test_every_operation_gives_what_it_gives_otherwise(start, kind, rows):
    def body(engine):
        values = np.arange(rows, dtype=np.float64) + engine.topology.rank
        results = []
        for _ in range(6):
            results.append(run(engine, values, kind, **fields))
            modes.append(rounds_of(engine).on)
        return [result.tolist() == results[0].tolist() for result in results]

    fields, modes = OPERATIONS[kind], []
    if kind == "alltoall":
        fields = fields | {"splits": (rows // 4, rows - rows // 4)}
    with start(2) as job:
        assert job.run(body) == [[True] * 6] * 2
    assert modes[-4:] == [True] * 4


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.ADASUM])
def test_an_in_place_tensor_is_not_spoiled_by_an_attempt_that_fails(start, op):
    """Scaled before, larger than a slab; the other rank has something else to do first."""

    def body(engine):
        warm_up(engine)
        array = np.full(300_000, 1.0 + engine.topology.rank)
        source = as_buffer(array)
        for step in range(8):
            array[:] = 1.0 + engine.topology.rank
            assert rounds_of(engine).on or step not in (4, 5, 6)
            if step == 6 and engine.topology.rank:
                other = submit(engine, ones(engine), "y")
            request = Request("big", Operation.ALLREDUCE, source.dtype, source.shape, op=op, prescale_factor=2.0)
            engine.run(request, source, source)
            assert (array == (6.0 if op is ReduceOp.SUM else 3.0)).all()
        if engine.topology.rank == 0:
            other = submit(engine, ones(engine), "y")
        return wait(engine, other)[0]

    with start(2) as job:
        assert job.run(body) == [3.0, 3.0]


# Several tensors.

MIXED = {
    "sum": {},
    "mean": {"op": ReduceOp.AVERAGE, "prescale_factor": 2.0},
    "gathered": {"operation": Operation.ALLGATHER},
    "sent": {"operation": Operation.BROADCAST, "root_rank": 1},
    "scattered": {"operation": Operation.REDUCESCATTER},
}


def group_of(engine, name, arrays, kinds=None, in_place=False, **fields):
    """Put ``arrays`` in flight, as a group that a caller waits for from the start; returns the works."""
    works = []
    for place, array in enumerate(arrays):
        source = as_buffer(array)
        chosen = {"operation": Operation.ALLREDUCE, "op": ReduceOp.SUM} | fields | (kinds[place] if kinds else {})
        request = Request(
            f"{name}[{place}]",
            dtype=source.dtype,
            shape=source.shape,
            group=name,
            group_size=len(arrays),
            **chosen,
        )
        fresh = functools.partial(empty, source.dtype)
        works.append(Work(request, source, source if in_place else fresh))
        works[-1].urged = True  # or the communication thread may take up the group before a caller waits
    engine.submit_group(works)
    return works


def results_of(engine, works):
    """The results of ``works``, as lists."""
    return [wait(engine, work).tolist() for work in works]


@pytest.fixture
def unhurried(monkeypatch):
    """No rank asks another to decline, however slow this machine is."""
    monkeypatch.setattr("collectives.engine.deciders.unison.LATE_SECONDS", 1000.0)


@pytest.mark.parametrize("threshold", [0, 1 << 27])
@pytest.mark.parametrize("rows", [0, 4, 50_000])
@pytest.mark.usefixtures("unhurried")
def test_tensors_of_different_kinds_run_together_without_messages(start, rows, threshold):
    def body(engine):
        array = np.arange(rows, dtype=np.float64) + engine.topology.rank
        return [
            results_of(engine, group_of(engine, "mixed", [array] * len(MIXED), [*MIXED.values()])) for _ in range(5)
        ]

    with start(2, wrap=Counting, fusion_threshold=threshold) as job:
        results = job.run(body)
        assert all(each == of_rank[0] for of_rank in results for each in of_rank)
        until(lambda: in_unison(job))
        before = [channel.sent for channel in job.channels]
        assert job.run(body) == results
        assert [channel.sent for channel in job.channels] == before


@pytest.mark.usefixtures("unhurried")
def test_tensors_that_are_no_group_run_together_too(start):
    def body(engine, count):
        for step in range(count):
            with engine._driver.inside:
                works = [Work(request, as_buffer(ones(engine)), allocate) for request in requests]
                works[(step + engine.topology.rank) % 3].urged = True
                engine._works.enter(works, False)
            assert [wait(engine, work).tolist() for work in works] == [total(2).tolist()] * 3

    allocate = functools.partial(empty, DType.FLOAT64)
    requests = [Request(name, Operation.ALLREDUCE, DType.FLOAT64, (3,), op=ReduceOp.SUM) for name in "xyz"]
    with start(2, wrap=Counting) as job:
        job.run(lambda engine: body(engine, 5))
        until(lambda: in_unison(job))
        before = [channel.sent for channel in job.channels]
        job.run(lambda engine: body(engine, 20))
        assert [channel.sent for channel in job.channels] == before


@pytest.mark.usefixtures("unhurried")
def test_groups_run_in_place_and_are_not_spoiled_by_an_attempt_that_fails(start):
    """Scaled before, more than a slab; one rank has something else to do first."""

    def body(engine):
        rank, arrays = engine.topology.rank, [np.zeros(length) for length in (200_000, 3, 1)]
        for step in range(20):
            for array in arrays:
                array[:] = 1.0 + rank
            if step == 10 and rank:
                other = submit(engine, ones(engine), "y")
            for work in group_of(engine, "group", arrays, in_place=True, prescale_factor=2.0):
                engine.synchronize(work)
            assert all((array == 6.0).all() for array in arrays)
            modes[rank].append(rounds_of(engine).on)
            if step == 10:
                other = other if rank else submit(engine, ones(engine), "y")
                assert wait(engine, other)[0] == 3.0

    modes = {0: [], 1: []}
    with start(2, fusion_threshold=1000) as job:
        job.run(body)
    for rank in range(2):
        assert modes[rank][4:10] == [True] * 6
        assert not modes[rank][10]
        assert modes[rank][15:] == [True] * 5


@pytest.mark.usefixtures("unhurried")
def test_several_batches_have_the_events_and_numbers_of_any_others(start):
    def body(engine):
        seen = []
        engine.events.subscribe(seen.append)
        arrays = [ones(engine), np.ones(2, np.int32), np.ones(0, np.float32)]
        for _ in range(10):
            for work in group_of(engine, "group", arrays):
                engine.synchronize(work)
        return [event for event in seen if isinstance(event, Submitted | Decided | Started | Finished)]

    with start(2) as job:
        of_ranks = job.run(body)
    for seen in of_ranks:
        assert [event.batch for event in seen if isinstance(event, Finished)] == list(range(30))
        assert [event.batch for event in seen if isinstance(event, Started)] == list(range(30))
        decided = [event.batch for event in seen if isinstance(event, Decided)]
        assert decided == list(range(30))
        kinds = [type(event) for event in seen]
        step = [Submitted] * 3 + [Decided] * 3 + [Started, Finished] * 3
        assert kinds == step * 10


@pytest.mark.usefixtures("unhurried")
def test_new_parameters_end_the_schedules_of_the_earlier_ones(start):
    def body(engine):
        batches = []
        engine.events.subscribe(lambda event: batches.append(event.names) if isinstance(event, Started) else None)
        for step in range(20):
            if step == 10 and engine.topology.rank == 0:
                engine.propose(replace(engine.parameters, fusion_threshold=0))
            for work in group_of(engine, "group", [ones(engine), ones(engine)]):
                engine.synchronize(work)
            modes[engine.topology.rank].append(rounds_of(engine).on)
        return batches

    modes = {0: [], 1: []}
    with start(2) as job:
        first, second = job.run(body)
    assert first == second == [("group[0]", "group[1]")] * 10 + [("group[0]",), ("group[1]",)] * 10
    assert modes[0][4:10] + modes[0][15:] == [True] * 11


@pytest.mark.parametrize("waiting", [0, 1])
@pytest.mark.usefixtures("unhurried")
def test_who_waits_for_several_tensors_is_told_of_the_end(start, waiting):
    def body(engine):
        return results_of(engine, group_of(engine, "group", [ones(engine), ones(engine)]))

    with start(2) as job:
        for _ in range(5):
            job.run(body)
        until(lambda: in_unison(job))
        caller = Caller(job.engines[waiting], body=body)
        until(lambda: round_of(job, waiting) > round_of(job, 1 - waiting))
        job.vanish(1 - waiting)
        assert type(caller.result()) is PeerLostError


def round_of(job, rank):
    return rounds_of(job.engines[rank])._round


def test_ranks_that_want_different_things_first_go_back_to_the_coordinator(start):
    def body(engine):
        for name in ("a", "b", "c"):
            warm_up(engine, name)
        names = ["a", "b", "c"]
        mine = names[engine.topology.rank :] + names[: engine.topology.rank]
        callers = [Caller(engine, name) for name in mine]
        return [caller.result()[0] for caller in callers]

    with start(3) as job:
        for _ in range(5):
            assert job.run(body) == [[6.0] * 3] * 3


def test_a_rank_that_does_not_come_declines_on_its_communication_thread(start):
    with start(3) as job:
        job.run(warm_up)
        callers = [Caller(job.engines[rank], "x") for rank in (0, 2)]
        until(lambda: not rounds_of(job.engines[1]).on)
        assert run(job.engines[1], ones(job.engines[1]), "x")[0] == 6.0
        assert [caller.result()[0] for caller in callers] == [6.0] * 2
        job.run(warm_up)
        assert in_unison(job)


@pytest.mark.parametrize("waiting", [0, 1])
def test_what_another_thread_wants_meanwhile_is_done(start, waiting, monkeypatch):
    """It submits something that all ranks submit, while one of them waits in unison for what the others do later."""
    monkeypatch.setattr("collectives.engine.deciders.unison.LATE_SECONDS", 1000.0)
    with start(2) as job:
        job.run(warm_up)
        caller = Caller(job.engines[waiting], "x")
        until(lambda: rounds_of(job.engines[waiting])._round > rounds_of(job.engines[1 - waiting])._round)
        assert job.run(lambda engine: run(engine, ones(engine), "y")[0]) == [3.0] * 2
        assert run(job.engines[1 - waiting], ones(job.engines[1 - waiting]), "x")[0] == 3.0
        assert caller.result()[0] == 3.0


@pytest.mark.parametrize("ending", ["own shutdown", "shutdown elsewhere", "own abort", "abort elsewhere", "vanishing"])
@pytest.mark.parametrize("waiting", [0, 1])
def test_who_waits_in_unison_is_told_of_the_end(start, ending, waiting, monkeypatch):
    monkeypatch.setattr("collectives.engine.deciders.unison.LATE_SECONDS", 1000.0)
    endings = {
        "own shutdown": (lambda job: job.engines[waiting].shutdown(), ShutDownError),
        "shutdown elsewhere": (lambda job: job.engines[1 - waiting].shutdown(), ShutDownError),
        "own abort": (lambda job: job.engines[waiting].abort(HorovodInternalError("enough")), HorovodInternalError),
        "abort elsewhere": (
            lambda job: job.engines[1 - waiting].abort(HorovodInternalError("enough")),
            HorovodInternalError,
        ),
        "vanishing": (lambda job: job.vanish(1 - waiting), PeerLostError),
    }
    end, kind = endings[ending]
    with start(2) as job:
        job.run(warm_up)
        caller = Caller(job.engines[waiting], "x")
        until(lambda: rounds_of(job.engines[waiting])._round > rounds_of(job.engines[1 - waiting])._round)
        end(job)
        assert type(caller.result()) is kind


@pytest.mark.parametrize("fatal", [False, True])
def test_a_rank_that_can_do_nothing_is_reported(start, caplog, fatal):
    """One that is stopped, or whose interpreter is held, cannot decline."""
    settings = {"stall_warning": 0.05, "stall_shutdown": 0.1 if fatal else 0.0}
    with start(3, **settings) as job:
        job.run(warm_up)
        stuck = job.engines[1]._driver._driving
        until(lambda: stuck.acquire(blocking=False))
        callers = [Caller(job.engines[rank], "x") for rank in (0, 2)]
        if not fatal:
            until(lambda: len(caplog.records) >= 2)
        else:
            error = callers[0].result()
            assert isinstance(error, CollectiveTimeoutError)
            assert "missing rank 1: 'x'" in str(error)
            assert "submitted by ranks 0, 2" in str(error)
        stuck.release()
        if not fatal:
            assert "missing rank 1: 'x'" in caplog.text
            assert run(job.engines[1], ones(job.engines[1]), "x")[0] == 6.0
            assert [caller.result()[0] for caller in callers] == [6.0] * 2


def test_a_rank_that_has_not_run_an_empty_batch_yet_hears_of_the_next_round(monkeypatch):
    monkeypatch.setattr(Job, "transport", SocketTransport)
    monkeypatch.setattr("collectives.engine.deciders.unison.LATE_SECONDS", 0.0)
    with running(2, shared_memory=True) as job:
        first, second = job.engines
        for name in ("x", "empty"):
            job.run(lambda engine, name=name: warm_up_without_rows(engine, name))
        job.run(lambda engine: [wait(engine, work) for work in [submit(engine, ones(engine), name) for name in "yz"]])
        job.run(lambda engine: run(engine, NOTHING, "empty", Operation.ALLGATHER))
        assert not in_unison(job)
        work = submit(second, NOTHING, "empty", Operation.ALLGATHER)
        until(lambda: not second._exchange.commands and not worker_of(second)._ready_ids)
        until(lambda: second._driver._driving.acquire(blocking=False))
        run(first, NOTHING, "empty", Operation.ALLGATHER)
        before = rounds_of(first)._round
        caller = Caller(first, body=lambda engine: run(engine, NOTHING, "x", Operation.ALLGATHER))
        until(lambda: first._exchange._decider._asked_of > before)
        second._driver._driving.release()
        wait(second, work)
        until(lambda: not rounds_of(first).on)
        run(second, NOTHING, "x", Operation.ALLGATHER)
        assert caller.result().size == 0


@pytest.mark.parametrize("rank", [0, 2])
def test_a_shutdown_does_not_wait_forever_for_a_rank_that_can_do_nothing(start, rank):
    with start(3, timeouts=replace(TIMEOUTS, shutdown=0.2)) as job:
        job.run(warm_up)
        stuck = job.engines[1]._driver._driving
        until(lambda: stuck.acquire(blocking=False))
        callers = [Caller(job.engines[rank], "x") for rank in (0, 2)]
        for engine in (job.engines[0], job.engines[2]):
            until(lambda engine=engine: rounds_of(engine)._round > rounds_of(job.engines[1])._round)
        job.engines[rank].shutdown()
        assert not job.engines[rank].is_ending
        assert [type(caller.result()) for caller in callers] == [ShutDownError] * 2
        stuck.release()


@pytest.mark.parametrize("rows", [0, 3, 300_000])
@pytest.mark.parametrize("listeners", [{0}, {1}, {0, 1}])
def test_events_are_the_same(start, listeners, rows):
    """Also where not all ranks listen, which must not change how often they cross the gate."""

    def body(engine):
        seen, rank = [], engine.topology.rank
        if rank in listeners:
            engine.events.subscribe(seen.append)
        for step in range(8):
            assert (run(engine, np.full(rows, rank + step), "x") == 2 * step + 1).all()
        assert rounds_of(engine).on
        return [type(event).__name__ for event in seen if type(event).__name__ in expected]

    with start(2) as job:
        expected = ["Submitted", "Decided", "Started", "Finished"] * 8
        assert job.run(body) == [expected if rank in listeners else [] for rank in range(2)]


def test_what_was_said_before_the_unison_began_runs_in_the_same_order_everywhere(start):
    """Rank 1 says y before it hears that the unison begins; the others, after it has begun."""
    with start(2, wrap=OneByOne) as job:
        first, second = job.engines
        for name in ("x", "y", "z"):
            job.run(lambda engine, name=name: warm_up(engine, name))
        job.run(lambda engine: [wait(engine, work) for work in [submit(engine, ones(engine), name) for name in "yz"]])
        job.run(lambda engine: run(engine, ones(engine), "x"))
        assert not in_unison(job)
        until(lambda: first._driver._driving.acquire(blocking=False))
        callers = [Caller(engine, "x") for engine in job.engines]
        until(lambda: worker_of(second)._in_flight and not worker_of(second)._ready_ids)
        callers.append(Caller(second, body=lambda engine: run(engine, 10 * ones(engine), "y")))
        until(lambda: len(worker_of(second)._in_flight) == 2)
        until(lambda: not second._exchange.commands and not worker_of(second)._ready_ids)
        first._driver._driving.release()
        assert [caller.result()[0] for caller in callers[:2]] == [3.0] * 2
        others = [submit(first, factor * ones(first), name) for name, factor in (("y", 10), ("z", 20))]
        callers.append(Caller(second, body=lambda engine: run(engine, 20 * ones(engine), "z")))
        assert [wait(first, work)[0] for work in others] == [30.0, 60.0]
        assert [caller.result()[0] for caller in callers[2:]] == [30.0, 60.0]


class Steps:
    """What the ranks of a job do, step by step: mostly one tensor at a time, but not always, nor in the same order."""

    OTHERS = ("burst", "swapped", "threads", "join", "new", "set", "barrier", "tune")

    def __init__(self, engine, seed):
        self._engine = engine
        self._common, self._own = random.Random(seed), random.Random(f"{seed} {engine.topology.rank}")

    def run(self):
        """How many steps were in unison."""
        count = 0
        for step in range(150):
            kind = self._common.choice(["lone"] * 12 + ["repeated"] * 6 + [*self.OTHERS])
            getattr(self, f"_{kind}")(step)
            count += rounds_of(self._engine).on
        return count

    def _mine(self, factor):
        return ones(self._engine) * factor

    def _check(self, factor, *results):
        size = self._engine.topology.size
        for result in results:
            assert result.tolist() == (total(size) * factor).tolist()

    def _lone(self, step):
        for number in range(self._common.randrange(1, 6)):
            factor = step + number / 8
            self._check(factor, run(self._engine, self._mine(factor), "lone"))

    def _burst(self, step):
        names = [f"burst {number}" for number in range(self._common.randrange(1, 8))]
        self._own.shuffle(names)
        works = [submit(self._engine, self._mine(step), name) for name in names]
        self._check(step, *(wait(self._engine, work) for work in works))

    def _repeated(self, step):
        """The same group and the same tensors several times."""
        names = self._common.choice([("a", "b"), ("b", "c", "d"), ("lone",), ()])
        for number in range(self._common.randrange(2, 7)):
            factor = step + number / 8
            arrays = [self._mine(factor) for _ in range(2)]
            works = [submit(self._engine, self._mine(factor), name) for name in names]
            works += group_of(self._engine, f"group of {len(names)}", arrays)
            if self._own.random() < 0.5:
                self._own.shuffle(works)
            self._check(factor, *(wait(self._engine, work) for work in works))

    def _tune(self, step):
        if self._engine.topology.rank == 0:
            threshold = self._own.choice([0, 40, 1 << 20])
            self._engine.propose(replace(self._engine.parameters, fusion_threshold=threshold))

    def _swapped(self, step):
        names = ["lone", "other"]
        self._own.shuffle(names)
        first = submit(self._engine, self._mine(step), names[0])
        self._check(step, run(self._engine, self._mine(step), names[1]), wait(self._engine, first))

    def _threads(self, step):
        bodies = [lambda engine, name=f"thread {number}": run(engine, self._mine(step), name) for number in range(3)]
        callers = [Caller(self._engine, body=body) for body in bodies]
        self._check(step, *(caller.result() for caller in callers))

    def _join(self, step):
        if self._common.randrange(3) == self._engine.topology.rank:
            assert run(self._engine, self._mine(step), "lone").tolist() == self._mine(step).tolist()
        self._engine.join()

    def _new(self, step):
        self._check(step, run(self._engine, self._mine(step), f"new {step}"))

    def _set(self, step):
        id = self._engine.add_process_set([0, 1])
        if self._engine.topology.rank < 2:
            for _ in range(3):
                result = run(self._engine, self._mine(step), "pair", process_set=id)
                assert result.tolist() == (total(2) * step).tolist()
        self._engine.remove_process_set(id)

    def _barrier(self, step):
        self._engine.barrier()


@pytest.mark.parametrize("seed", range(3))
def test_in_and_out_of_unison(start, seed):
    wrap = OneByOne if seed else lambda channel: channel
    with start(3, wrap=wrap, cache_capacity=[4, 1024, 1024][seed], local_size=[3, 1, 3][seed]) as job:
        counts = job.run(lambda engine: Steps(engine, seed).run())
    assert min(counts) > 20
