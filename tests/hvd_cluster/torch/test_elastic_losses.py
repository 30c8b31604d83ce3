"""Ranks that are killed anywhere in a step: the survivors agree bit for bit, and no committed step is lost."""

import hashlib
import os
import signal
from contextlib import nullcontext
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch

import hvd_cluster.torch as hvd
from collectives.api import InvalidRequestError
from hvd_cluster.elastic import snapshots
from hvd_cluster.ops import rank_copies
from hvd_cluster.torch.elastic.state import TorchState
from hvd_cluster.torch.optimizer.shard import ParameterShard
from tests.collectives.engine.job import until
from tests.hvd_cluster.torch.training import build, flat, loss_of
from tests.hvd_cluster.torch.worlds import await_center, go_to

ROWS = 12


def process():
    return int(os.environ["HOROVOD_RANK"])


def batch(step):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(ROWS, 7, generator=generator).double(), torch.randint(0, 3, (ROWS,), generator=generator)


def share(rows):
    return rows[hvd.rank() :: hvd.size()]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def alone(steps):
    model = build()
    optimizer = sgd(model)
    for step in range(steps):
        loss_of(model, *batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def new_state(make=sgd, **options):
    model = build()
    model.register_buffer("calls", torch.zeros(2))
    if process():
        with torch.no_grad():
            model[0].weight.zero_()
    return TorchState(
        model, hvd.DistributedOptimizer(make(model), model.named_parameters(), **options), batch=0, log=[]
    )


def digest(state):
    momentum = [entry["momentum_buffer"] for entry in state.optimizer.state.values()]
    tensors = [flat(state.model), state.model.calls, *momentum]
    return [hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for tensor in tensors], state.batch, state.log


def agreed_batch(state):
    """The batch with which the ranks go on; they agree on everything."""
    found = hvd.allgather_object(digest(state))
    assert all(each == found[0] for each in found)
    return state.batch


def live(worlds, cycle, batches, make_state=new_state):
    """As ``elastic.run`` does, with the ``worlds`` in which this process is, the arguments of ``go_to`` for each.

    Returns the batches with which it went on in each, and the parameters at the end.
    """
    os.environ["HOROVOD_CYCLE_TIME"] = "1"  # gradients travel in backward
    state, seen = None, []
    if worlds[0][0]:
        await_center(worlds[0][0])
    for world in worlds:
        go_to(*world)
        if state is None:
            state = make_state()
        else:
            state.on_reset()
        try:
            state.sync()
            seen.append(agreed_batch(state))
            while state.batch < batches:
                state.log.append(state.batch)
                state.model.calls += 1
                cycle(state)
            break
        except hvd.HorovodInternalError:
            state.interrupted()
    assert state.log == list(range(batches))
    assert state.model.calls.tolist() == [batches] * 2
    hvd.shutdown()
    return seen, flat(state.model), alone(batches)


def backward(state):
    images, labels = batch(state.batch)
    loss_of(state.model, share(images), share(labels)).backward()


def step(state):
    backward(state)
    state.optimizer.step()
    state.optimizer.zero_grad()


def commit(state):
    state.batch += 1
    state.commit()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def cycle(state, folder):
    """Three ranks are lost, each in another place; from batch 9 on there is a metric between step and commit."""
    place = process(), state.batch
    if place == (2, 4):  # the last gradient never comes, so no rank can finish this step
        state.model[0].weight.register_hook(lambda _: die())
    step(state)
    if place == (3, 8):
        until(lambda: all((folder / name).exists() for name in ("0 committed", "1 stepped")))
        die()
    if place == (1, 8) and not (folder / "1 stepped").exists():
        (folder / "1 stepped").touch()
        hvd.allreduce(torch.ones(1), name="of this rank alone")
    if place == (0, 12):
        (folder / "0 stepped").touch()
    if place == (1, 12):
        until((folder / "0 stepped").exists)
        die()
    if state.batch >= 9:
        hvd.allreduce(torch.ones(1), name="metric")
    commit(state)
    if place == (0, 8):
        (folder / "0 committed").touch()


PLACES = {
    0: [(0, 0, 3), (1, 0, 3), (2, 0, 2), (3, 0, 1)],
    1: [(0, 1, 3), (1, 1, 3), (2, 1, 2)],
    2: [(0, 2, 3)],
    3: [(1, 2, 3)],
}


def test_a_loss_in_the_gradients_before_the_commit_of_some_and_in_a_metric(fresh_pool, tmp_path):
    """Process 3 is a newcomer in the second world; then rank 0 is a commit ahead; in the last world it is alone."""
    pool = fresh_pool(4)
    pool.run(process)
    outcomes = pool.outcomes(lambda: live(PLACES[process()], lambda state: cycle(state, tmp_path), 16))
    assert outcomes[1:] == [None] * 3
    seen, parameters, expected = outcomes[0].unwrap()
    assert seen == [0, 4, 9, 12]
    torch.testing.assert_close(parameters, expected, rtol=1e-10, atol=1e-12)


def leave_at_5_and_die_in_sync(state):
    """The ranks go to another world after batch 5. There the source dies when it has sent half of its state."""
    if state.batch == 5 and process() < 2 and not hasattr(state, "has_left"):
        state.has_left = True
        if process() == 0:
            state._handlers["optimizer"].share = lambda root_rank: die()
        raise hvd.HorovodInternalError("to the next world")
    step(state)
    commit(state)


SYNC_PLACES = {0: [(0, 0, 2), (1, 0, 3)], 1: [(0, 1, 2), (1, 1, 3), (2, 0, 2)], 2: [(1, 2, 3), (2, 1, 2)]}


def test_the_source_of_a_state_is_lost_while_it_sends(fresh_pool):
    """The other rank with the state has it still, and gives it to the newcomer, which has received a part."""
    pool = fresh_pool(3)
    pool.run(process)
    outcomes = pool.outcomes(lambda: live(SYNC_PLACES[process()], leave_at_5_and_die_in_sync, 12))
    assert outcomes[0] is None
    (survivor, parameters, expected), (newcomer, others, _) = (outcome.unwrap() for outcome in outcomes[1:])
    assert (survivor, newcomer) == ([0, 5], [5])
    assert torch.equal(parameters, others)
    torch.testing.assert_close(parameters, expected, rtol=1e-10, atol=1e-12)


def kill(pool, rank, reached):
    until(reached.exists, 60)
    os.kill(pool.processes[rank].pid, signal.SIGKILL)


def free_cycle(state, folder):
    """Touches a file with the size of the world when ranks may be killed there, and goes on until they are."""
    if process() == 0 and (hvd.size(), state.batch) in ((3, 200), (2, 390)):
        hvd.allreduce(torch.ones(1), name="of this rank alone")
    step(state)
    commit(state)
    if process() == 0 and state.batch >= 20 * (4 - hvd.size()):
        (folder / str(hvd.size())).touch()


@pytest.mark.parametrize(
    ("operations", "options"),
    [("shm", {}), ("tcp", {}), ("gloo", {}), ("shm", {"sharded": "host"}), ("shm", {"sharded": "rank"})],
)
def test_kills_at_any_moment(fresh_pool, tmp_path, operations, options):
    """Ranks 2 and 1 are killed from outside."""
    pool = fresh_pool(3, environment={"HOROVOD_CPU_OPERATIONS": operations})
    pool.run(process)
    worlds = [[(round, rank, 3 - round) for round in range(3 - rank)] for rank in range(3)]

    def kill_two():
        kill(pool, 2, tmp_path / "3")
        kill(pool, 1, tmp_path / "2")

    outcomes = pool.outcomes(
        lambda: live(worlds[process()], lambda state: free_cycle(state, tmp_path), 400, partial(new_state, **options)),
        then=kill_two,
    )
    seen, parameters, expected = outcomes[0].unwrap()
    assert len(seen) == 3
    assert 20 <= seen[1] < seen[2]
    torch.testing.assert_close(parameters, expected, rtol=1e-9, atol=1e-11)


class Dying(torch.optim.SGD):
    """Ends its process when half of its parameters are updated."""

    hvd_element_wise = True
    dies = False

    def step(self, closure=None):
        if not Dying.dies:
            return super().step(closure)
        parameters = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        for each in parameters[: len(parameters) // 2 + 1]:
            each.data.add_(each.grad, alpha=-0.1)
        die()


def dying(model):
    return Dying(model.parameters(), lr=0.1, momentum=0.9)


def sharded_cycle(state, folder):
    """Ranks are lost between the step and its commit, in the update of their part, and while they copy it."""
    here = process(), state.batch
    Dying.dies = here == (3, 7)
    with dying_in_copy() if here == (1, 11) else nullcontext():
        step(state)
    if state.batch == 4:
        (folder / str(process())).touch()
        until(lambda: all((folder / str(number)).exists() for number in range(3)))
        if process() == 2:
            die()
    commit(state)


def dying_in_copy():
    return mock.patch.multiple(rank_copies, _write=die_half_way, allgather_object=die_half_way)


def die_half_way(row, *_):
    if isinstance(row, np.ndarray):
        row[100:200] = 7
    die()


def live_apart(*arguments):
    """As on hosts that share no memory."""
    rank_copies.host_memory = lambda *_: (None, "they are apart")
    return live(*arguments)


@pytest.mark.parametrize(("place", "run"), [("host", live), ("rank", live), ("rank", live_apart)])
def test_the_part_of_a_lost_rank_is_not_lost(fresh_pool, tmp_path, place, run):
    """Nor is a step that all ranks have ended; process 3 is a newcomer in the second world, at last rank 0 is alone."""
    pool = fresh_pool(4)
    pool.run(process)
    make_state = partial(new_state, dying, sharded=place)
    cycle = partial(sharded_cycle, folder=tmp_path)
    outcomes = pool.outcomes(lambda: run(PLACES[process()], cycle, 16, make_state))
    assert outcomes[1:] == [None] * 3
    seen, parameters, expected = outcomes[0].unwrap()
    assert seen == [0, 5, 7, 11]
    torch.testing.assert_close(parameters, expected, rtol=1e-10, atol=1e-12)


def first_sharded_cycle(state):
    """The first step in shared memory fails on rank 0, where the ranks meet; rank 1 goes on and updates its part."""
    meet = ParameterShard.meet

    def fail(shard, name):
        meet(shard, name)
        raise hvd.HorovodInternalError("to the next world")

    backward(state)
    hvd.clip_grad_norm_(state.optimizer, 1e9)  # so the ranks meet before the update
    fails = process() == 0 and not hasattr(state, "has_failed")
    state.has_failed = True
    with mock.patch.object(ParameterShard, "meet", fail) if fails else nullcontext():
        state.optimizer.step()
    state.optimizer.zero_grad()
    commit(state)


def test_a_first_step_that_only_some_ranks_have_begun(fresh_pool):
    """Rank 0 has made no step, but its parameters have the changes of rank 1: both go back to the commit."""
    pool = fresh_pool(2)
    pool.run(process)
    places = {rank: [(0, rank, 2), (1, rank, 2)] for rank in range(2)}
    make_state = partial(new_state, sharded="host")
    outcomes = pool.run(lambda: live(places[process()], first_sharded_cycle, 4, make_state))
    for seen, parameters, expected in outcomes:
        assert seen == [0, 0]
        torch.testing.assert_close(parameters, expected, rtol=1e-10, atol=1e-12)


def lone_cycle(state):
    """A rank alone, which makes rare copies, leaves its world for a larger one after 9 batches."""
    if (hvd.size(), state.batch) == (1, 9):
        raise hvd.HorovodInternalError("to the next world")
    with mock.patch.object(snapshots, "needs_copy", return_value=False):
        step(state)
        commit(state)


def test_a_lone_rank_of_a_sharded_optimizer_gives_its_last_commit_to_a_newcomer(fresh_pool):
    pool = fresh_pool(2)
    pool.run(process)
    places = {0: [(0, 0, 1), (1, 0, 2)], 1: [(1, 1, 2)]}
    outcomes = pool.run(lambda: live(places[process()], lone_cycle, 12, partial(new_state, sharded="host")))
    assert [seen for seen, _, _ in outcomes] == [[0, 9], [9]]
    for _, parameters, expected in outcomes:
        torch.testing.assert_close(parameters, expected, rtol=1e-10, atol=1e-12)


HOSTS = {
    **{number: [(0, number, 6, "aabbcc"), (1, number, 4, "aabb")] for number in (2, 3)},
    **{number: [(0, number, 6, "aabbcc")] for number in (4, 5)},
    0: [(0, 0, 6, "aabbcc"), (1, 0, 4, "aabb"), (2, 0, 3, "aad"), (3, 0, 2, "ad")],
    1: [(0, 1, 6, "aabbcc"), (1, 1, 4, "aabb"), (2, 1, 3, "aad")],
    6: [(2, 2, 3, "aad"), (3, 1, 2, "ad")],
}
"""Process 6 is a newcomer on a new host."""


def host_cycle(state, folder):
    """The ranks of a host are lost together: those of c after batch 4, those of b after 8; then one rank of a."""
    step(state)
    lost = {4: (4, 5), 8: (2, 3), 11: (1,)}.get(state.batch, ())
    if lost:
        (folder / f"{state.batch} {process()}").touch()
        until(lambda: len(list(folder.glob(f"{state.batch} *"))) == hvd.size())
        if process() in lost:
            die()
    commit(state)


@pytest.mark.parametrize(
    ("place", "redundancy", "run"), [(True, None, live), (True, 1, live), ("rank", 1, live_apart), ("rank", 2, live)]
)
def test_the_parts_of_a_lost_host_lie_on_another_one(fresh_pool, tmp_path, place, redundancy, run):
    """No host has all parts with redundancy=1, so the ranks that are left give theirs to each other."""
    pool = fresh_pool(7)
    pool.run(process)
    make_state = partial(new_state, sharded=place, redundancy=redundancy)
    outcomes = pool.outcomes(lambda: run(HOSTS[process()], partial(host_cycle, folder=tmp_path), 14, make_state))
    assert [each for number, each in enumerate(outcomes) if number not in (0, 6)] == [None] * 5
    results = [outcomes[number].unwrap() for number in (0, 6)]
    assert [seen for seen, _, _ in results] == [[0, 5, 9, 12], [9, 12]]
    for _, parameters, expected in results:
        torch.testing.assert_close(parameters, expected, rtol=1e-10, atol=1e-12)


def test_the_parts_of_a_lost_host_without_redundancy_are_lost_with_an_error(fresh_pool, tmp_path):
    pool = fresh_pool(6)
    pool.run(process)
    cycle, make_state = partial(host_cycle, folder=tmp_path), partial(new_state, sharded=True, redundancy=0)
    outcomes = pool.outcomes(lambda: live(HOSTS[process()], cycle, 14, make_state))
    for each in outcomes[:4]:
        with pytest.raises(InvalidRequestError, match=r"the state of commit 5 is lost: .* larger redundancy"):
            each.unwrap()


ONE_EACH = {0: [(0, 0, 6, "aabbcc"), (1, 0, 3, "abc")], 2: [(0, 2, 6, "aabbcc"), (1, 1, 3, "abc")]}
ONE_EACH |= {4: [(0, 4, 6, "aabbcc"), (1, 2, 3, "abc")]} | {each: [(0, each, 6, "aabbcc")] for each in (1, 3, 5)}


def restoring_cycle(state, folder):
    """A rank of each host is lost at the same time. Later the script goes back to its last commit by hand."""
    step(state)
    if state.batch == 4:
        (folder / str(process())).touch()
        until(lambda: len(list(folder.iterdir())) == 6)
        if process() % 2:
            die()
    if state.batch == 7 and not hasattr(state, "has_restored"):
        state.has_restored = True
        state.restore()
        state.sync()
        assert state.batch == 7
        state.log.append(7)
        state.model.calls += 1
        step(state)
    commit(state)


def test_ranks_with_some_parts_only_go_back_together(fresh_pool, tmp_path):
    """The parts of a killed rank lie on its own host, too; with redundancy=1 no rank has those of all."""
    pool = fresh_pool(6)
    pool.run(process)
    cycle, make_state = partial(restoring_cycle, folder=tmp_path), partial(new_state, sharded=True, redundancy=1)
    outcomes = pool.outcomes(lambda: live(ONE_EACH[process()], cycle, 10, make_state))
    for rank in (0, 2, 4):
        seen, parameters, expected = outcomes[rank].unwrap()
        assert seen == [0, 5]
        torch.testing.assert_close(parameters, expected, rtol=1e-10, atol=1e-12)


class Growing(torch.optim.SGD):
    """Has more state for each parameter from the fifth step on."""

    hvd_element_wise = True
    steps = 0

    def step(self, closure=None):
        super().step(closure)
        Growing.steps += 1
        for group in self.param_groups:
            for each in group["params"] if Growing.steps > 4 else ():
                self.state[each] |= {name: torch.zeros_like(each) for name in ("more", "even more")}


def growing(model):
    return Growing(model.parameters(), lr=0.1, momentum=0.9)


def dying_there(*_):
    die()


def growing_cycle(state):
    """A host is lost while the ranks make the first copy that needs new memory."""
    dies = state.batch == 4 and process() in (4, 5)
    with mock.patch.object(rank_copies.RankCopies, "_send", side_effect=dying_there) if dies else nullcontext():
        step(state)
    commit(state)


def test_a_copy_in_the_memory_before_is_not_lost(fresh_pool):
    pool = fresh_pool(6)
    pool.run(process)
    make_state = partial(new_state, growing, sharded=True, redundancy=1)
    places = {**HOSTS, **{each: HOSTS[each][:2] for each in (0, 1)}}
    outcomes = pool.outcomes(lambda: live(places[process()], growing_cycle, 8, make_state))
    for rank in range(4):
        seen, parameters, expected = outcomes[rank].unwrap()
        assert seen == [0, 4]
        torch.testing.assert_close(parameters, expected, rtol=1e-10, atol=1e-12)
