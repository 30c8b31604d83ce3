"""Parameters of tuning: every batch runs under the same ones on all ranks, whenever they change."""

import random
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.api import InvalidRequestError, Parameters
from collectives.controller.messages import Run
from tests.collectives.backends.inproc import InprocBackend
from tests.collectives.controller.negotiation_simulation import World, gather, outcomes, scripts, tensor
from tests.collectives.engine.job import ones, outcome, run, running, total, until

changes = st.builds(
    Parameters,
    fusion_threshold=st.sampled_from([0, 30, 1 << 20]),
    cycle_time=st.sampled_from([0.0, 1.0, 5.0]),
    patient=st.booleans(),
    cache_capacity=st.integers(0, 3),
    hierarchical_allreduce=st.booleans(),
)


class TunedWorld(World):
    """A coordinator that is told one of ``changes`` now and then."""

    def tune(self, changes, chance):
        self.changes, self.chance = changes, chance

    def decide(self):
        if self.changes and self.chance.random() < 0.3:
            self.coordinator.propose(self.chance.choice(self.changes))
        return super().decide()


def by_id(world):
    """For each batch: what each of its ranks ran, and under which parameters."""
    found = {}
    for rank, batches in enumerate(world.batches):
        for batch in batches:
            found.setdefault(batch.id, {})[rank] = (batch.responses, batch.parameters)
    return found


@settings(max_examples=150)
@given(scripts(), st.lists(changes, max_size=4), st.integers(0, 3), st.integers(0, 1 << 32))
def test_for_every_batch_all_ranks_use_the_same_version(scripted, proposed, capacity, seed):
    size, sets, script = scripted
    world, chance = TunedWorld(size, sets, capacity=capacity), random.Random(seed)
    world.tune(proposed, chance)
    script.play(world, chance)
    batches = by_id(world)
    assert sorted(batches) == list(range(len(batches)))
    for ran in batches.values():
        process_set = next(iter(ran.values()))[0][0].request.process_set
        assert sorted(ran) == list(world.process_sets.ranks(process_set))
        assert len({(responses, parameters) for responses, parameters in ran.values()}) == 1
    versions = [next(iter(batches[id].values()))[1].version for id in sorted(batches)]
    assert versions == sorted(versions)
    for rank in range(size):
        assert [batch.id for batch in world.batches[rank]] == sorted(batch.id for batch in world.batches[rank])
        assert outcomes(world, rank) == script.expected(rank)


def test_parameters_travel_with_the_first_batch_and_when_they_change():
    world = World(3, sets=((0, 1),))
    for process_set in (1, 1, 0, 0):
        world.submit(tensor(process_set=process_set))
        world.settle()
    sent = [message.parameters is not None for message in world.sent(Run)]
    assert sent == [True, True, False, False, True, True, True, False, False, False]
    world.coordinator.propose(world.workers[0].parameters)  # which changes nothing
    world.submit(tensor())
    world.settle()
    assert [message.parameters for message in world.sent(Run)] == [None] * 3


def test_the_parameters_of_rank_0_replace_those_of_the_others():
    world = World(2, threshold=77)
    world.submit(tensor())
    world.settle()
    assert world.workers[1].parameters == world.workers[0].parameters
    assert world.workers[1].parameters.fusion_threshold == 77


def test_a_cache_that_is_switched_off_and_on_again():
    world = World(2, capacity=4)

    def say(rows=1):
        world.traffic.clear()
        world.submit(gather("g", rows))
        world.settle()
        return [bool(message.ids) for message in world.sent()]

    assert [say(), say()] == [[False, False], [True, True]]
    world.coordinator.propose(replace(world.workers[0].parameters, cache_capacity=0))
    assert any(say())  # by the id, then in full: the coordinator has dropped it
    assert [say(), say()] == [[False, False]] * 2
    world.coordinator.propose(replace(world.workers[0].parameters, cache_capacity=4))
    assert [say(), say()] == [[False, False], [True, True]]
    assert [len(ran) for ran in (world.ran(0), world.ran(1))] == [7, 7]


def test_a_smaller_cache_keeps_what_was_used_last():
    world = World(2, capacity=4)
    for name in "abca":
        world.submit(tensor(name))
        world.settle()
    world.coordinator.propose(replace(world.workers[0].parameters, cache_capacity=2))
    world.submit(tensor("z", process_set=0))
    world.settle()
    world.traffic.clear()
    world.submit(tensor("a"))
    world.submit(tensor("b"))
    world.settle()
    first, *_ = world.sent()
    assert len(first.ids) == 1
    assert [request.name for request in first.requests] == ["b"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"fusion_threshold": -1},
        {"cache_capacity": 1.5},
        {"pipeline_piece": 0},
        {"cycle_time": -0.1},
        {"cycle_time": "fast"},
        {"patience": float("nan")},
    ],
)
def test_what_is_out_of_range_is_refused_by_name_and_value(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(InvalidRequestError, match=f"parameter {name}={value!r} must be"):
        Parameters(**wrong)


# In an engine.


@pytest.mark.usefixtures("transport")
def test_all_ranks_switch_at_the_same_tensor():
    def body(engine):
        seen = []
        for step in range(30):
            if step == 10 and engine.topology.rank == 0:
                engine.propose(fusion_threshold=step, patient=True)
            run(engine, ones(engine), f"x{step % 7}")
            seen.append((engine.parameters.version, engine.parameters.fusion_threshold, engine.patient))
        return seen

    with running(3) as job:
        first, *others = job.run(body)
    assert others == [first, first]
    assert first[-1] == (2, 10, True)


@pytest.mark.parametrize("kind", [{}, {"shared_memory": True}, {"over_tcp": True}], ids=["inproc", "shm", "tcp"])
@pytest.mark.usefixtures("unhurried")
def test_ranks_in_the_bypass_leave_it_for_new_parameters(kind):
    def body(engine):
        for _ in range(6):
            run(engine, ones(engine), "x")

    def tune(engine):
        if engine.topology.rank == 0:
            engine.propose(fusion_threshold=3)
        for _ in range(6):
            assert run(engine, ones(engine), "x")[0] == total(2)[0]
        return engine.parameters

    with running(2, **kind) as job:
        job.run(body)
        until(lambda: all(engine._loop._bypass.on for engine in job.engines))
        first, second = job.run(tune)
        until(lambda: all(engine._loop._bypass.on for engine in job.engines))
    assert first == second
    assert (first.version, first.fusion_threshold) == (2, 3)


def test_only_rank_0_proposes():
    with running(2) as job:
        error = outcome(lambda: job.engines[1].propose(fusion_threshold=0))
        assert isinstance(error, InvalidRequestError)
        assert "rank 1 cannot change parameters; propose them on rank 0" in str(error)


def test_backends_adopt_them_also_those_of_sets_that_are_added_later(monkeypatch):
    adopted = defaultdict(list)
    monkeypatch.setattr(
        InprocBackend, "adopt", lambda backend, parameters: adopted[backend.size].append(parameters.version)
    )

    def body(engine):
        run(engine, ones(engine), "x")
        engine.add_process_set([0, 2])
        if engine.topology.rank == 0:
            engine.propose(pipeline_piece=7)
        run(engine, ones(engine), "x")

    with running(3) as job:
        job.run(body)
    assert dict(adopted) == {3: [1, 1, 1, 2, 2, 2], 2: [1, 1, 2, 2]}
