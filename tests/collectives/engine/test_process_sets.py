"""Process sets that come and go, on the engines of several ranks."""

import pytest

from collectives.api import (
    CollectiveTimeoutError,
    InvalidRequestError,
    MismatchError,
    Operation,
    Parameters,
    PeerLostError,
    Request,
)
from collectives.controller.messages import Response
from collectives.controller.process_sets import ProcessSets
from collectives.controller.worker import Batch
from collectives.engine.counters import Counters
from collectives.engine.registration import Registration, SetBackends
from collectives.engine.runner import Runner
from collectives.engine.threads import CommandQueue, Waiters
from collectives.engine.work_table import WorkTable
from collectives.events import EventStream
from collectives.net.channel import InprocHub
from collectives.stalls.stragglers import WaitWindows
from tests.collectives.backends.inproc import InprocBackend, InprocGroup
from tests.collectives.backends.members import group_of
from tests.collectives.engine.job import (
    Formation,
    Job,
    ones,
    outcome,
    run,
    running,
    submit,
    until,
    wait,
)

pytestmark = pytest.mark.usefixtures("transport")


# Process sets that come and go.


def test_sets_are_added_used_removed_and_added_again():
    def body(engine):
        rank, results = engine.topology.rank, []
        for ranks in ((0, 1), (1, 2)):
            id = engine.add_process_set(ranks)
            other = engine.add_process_set((0, 2))
            if rank in ranks:
                results.append(run(engine, ones(engine), "x", process_set=id)[0])
                results.append(run(engine, ones(engine), process_set=id)[0])
            results.append((id, other))
            engine.remove_process_set(id)
            engine.remove_process_set(other)
        return results, engine.process_sets.ids()

    with running(3) as job:
        assert job.run(body) == [
            ([3.0, 3.0, (1, 2), (1, 2)], [0]),
            ([3.0, 3.0, (1, 2), 5.0, 5.0, (1, 2)], [0]),
            ([(1, 2), 5.0, 5.0, (1, 2)], [0]),
        ]


def test_a_set_cannot_be_used_after_its_removal():
    def body(engine):
        id = engine.add_process_set([0])
        engine.remove_process_set(id)
        return outcome(lambda: run(engine, ones(engine), process_set=id))

    with running(2) as job:
        for error in job.run(body):
            assert isinstance(error, InvalidRequestError)
            assert "process set 1 does not exist" in str(error)


def test_all_that_is_in_flight_on_a_removed_set_fails_also_what_waits_for_a_name():
    def body(engine):
        id = engine.add_process_set([0, 1])
        stuck = [submit(engine, ones(engine), process_set=id) for _ in range(600 * (engine.topology.rank == 0))]
        engine.barrier()
        engine.remove_process_set(id)
        again = engine.add_process_set([0, 1])
        texts = {str(outcome(lambda work=work: wait(engine, work))) for work in stuck}
        return texts, id == again, engine.topology.rank < 2 and run(engine, ones(engine), process_set=again)[0]

    with running(3) as job:
        (texts, *rest), *others = job.run(body)
    assert texts == {"process set 1 was removed while the tensor was in flight"}
    assert [rest, *others] == [[True, 3.0], (set(), True, 3.0), (set(), True, False)]


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ([0, 0], "must name each rank once"),
        ([5], "must name each rank once"),
        ([1, 0], "exists already"),
        ([], "least"),
    ],
)
def test_a_set_that_cannot_be_is_refused_on_the_rank_that_asks(ranks, says):
    with running(2) as job:
        for engine in job.engines:
            with pytest.raises(InvalidRequestError, match=says):
                engine.add_process_set(ranks)
        for id, text in ((0, "cannot be removed"), (3, "does not exist")):
            with pytest.raises(InvalidRequestError, match=text):
                job.engines[0].remove_process_set(id)


def test_sets_may_be_forbidden():
    with running(2, dynamic_process_sets=False) as job, pytest.raises(InvalidRequestError, match="DYNAMIC_PROCESS_SET"):
        job.engines[0].add_process_set([0])


def test_ranks_that_ask_for_different_sets_are_told_and_go_on():
    def body(engine):
        rank = engine.topology.rank
        error = outcome(lambda: engine.add_process_set([rank]))
        return str(error), engine.add_process_set([1])

    with running(2) as job:
        results = job.run(body)
    assert [id for _, id in results] == [1, 1]
    assert len({text for text, _ in results}) == 1
    assert "the ranks disagree about the ranks: (0,) on rank 0; (1,) on rank 1" in results[0][0]


def test_a_rank_that_is_lost_while_a_set_connects_is_named():
    class Silent(Job):
        def _connect(self, rank, members, scope):
            if rank == 0:
                self.vanish(1)
                until(lambda: self.engines[0]._ends.ending.lost is not None)
                raise CollectiveTimeoutError("a member did not come")
            return super()._connect(rank, members, scope)

    job = Silent(3)
    error, _, third = job.outcomes(lambda engine: (engine.add_process_set([0, 1]), run(engine, ones(engine))))
    job.shutdown()
    for each in (error, third):
        assert isinstance(each, PeerLostError)
        assert "rank 1 on host" in str(each)


def test_a_set_that_connects_while_everything_is_aborted_does_not_come_about():
    error = PeerLostError("rank 1 is gone")

    def connect(scope):
        runner.abort(error)
        return SetBackends.of([InprocBackend(group_of(2), InprocGroup(2))])

    queue = CommandQueue(InprocHub(1).channel(0))
    works, counters = WorkTable(0, queue), Counters(WaitWindows(3), lambda report: None)
    runner = Runner(0, ProcessSets(3), {}, works, EventStream(), counters, Waiters(), queue, Parameters())
    request = Request("add", Operation.ADD_PROCESS_SET, splits=(0, 1))
    registration = Registration(request)
    registration.formation = Formation(connect)
    works.enter([registration], unnamed=False)
    with pytest.raises(PeerLostError):
        runner.run(
            Batch(
                (Response(1, request, (1,), (b"here", b"there")),), begins_rounds=False, id=0, parameters=Parameters()
            )
        )
    assert runner.backends()  # which are aborted and closed with the rest


def test_what_is_in_flight_on_a_removed_set_fails():
    def body(engine):
        id = engine.add_process_set([0, 1])
        stuck = submit(engine, ones(engine), "x", process_set=id) if engine.topology.rank == 0 else None
        engine.barrier()
        engine.remove_process_set(id)
        return stuck and outcome(lambda: wait(engine, stuck))

    with running(3) as job:
        error, *rest = job.run(body)
    assert isinstance(error, MismatchError)
    assert "process set 1 was removed while the tensor was in flight" in str(error)
    assert rest == [None, None]
