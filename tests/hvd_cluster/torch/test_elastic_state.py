"""States of a training on ranks that stay: what a commit keeps, what a sync shares, and what users may do wrong."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import hvd_cluster.torch as hvd
from collectives.api import HostsUpdatedInterrupt, InvalidRequestError
from hvd_cluster.elastic import handlers, snapshots
from hvd_cluster.elastic import state as elastic_state
from hvd_cluster.elastic.state import ObjectState, State
from hvd_cluster.torch.elastic.state import StateHandler, TorchState, get_handler_registry, set_handler_registry
from tests.checks import each_check


def net():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)).double()


def training(**kwargs):
    torch.manual_seed(hvd.rank())
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 + hvd.rank())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    return TorchState(model, optimizer, batch=0, **kwargs)


def step(state, seed=0):
    torch.manual_seed(seed + hvd.rank())
    state.optimizer.zero_grad()
    state.model(torch.randn(8, 3).double()).square().mean().backward()
    state.optimizer.step()


def values(state):
    """All numbers of model and optimizer."""
    found = [state.model.state_dict(), state.optimizer.state_dict()]
    return copy.deepcopy(found)


def same(first, second):
    return str(first) == str(second)


def everywhere(value):
    return len({str(each) for each in hvd.allgather_object(value)}) == 1


def check_the_first_sync_shares_rank_0():
    state = training()
    state.batch = 10 + hvd.rank()
    assert not everywhere(values(state))
    state.sync()
    assert everywhere(values(state))
    assert (state.batch, state.optimizer.param_groups[0]["lr"]) == (10, 0.1)


def check_a_later_sync_shares_what_rank_0_has_by_then():
    state = training()
    state.sync()
    if hvd.rank() == 0:
        state.batch = 7
        with torch.no_grad():
            state.model[0].weight.fill_(3.0)
    state.sync()
    assert state.batch == 7
    assert state.model[0].weight.eq(3.0).all()


def check_restore_after_gradients_that_were_not_used():
    state = training(names=["a"])
    state.sync()
    step(state)
    state.batch = 1
    state.commit()
    expected = values(state)
    state.batch = 2
    state.names.append("b")
    state.optimizer.param_groups[0]["lr"] = 9.0
    state.model(torch.randn(8, 3).double()).square().mean().backward()  # moves the buffers
    state.optimizer.synchronize()
    assert not same(values(state), expected)
    state.restore()
    assert same(values(state), expected)
    assert (state.batch, state.names) == (1, ["a"])
    assert all(parameter.grad is None for parameter in state.model.parameters())


def check_restore_after_a_step_goes_back_to_a_full_copy():
    """save() makes one. The state that the user got back does not share memory with it."""
    state = training()
    state.sync()
    step(state)
    state.save()
    expected = values(state)
    for seed in (1, 2):
        step(state, seed)
        assert not same(values(state), expected)
        state.restore()
        assert same(values(state), expected)


def check_a_metric_after_the_step_makes_commits_copy():
    """So that a loss in it does not cost more than the step."""
    state = training()
    state.sync()
    for number in range(1, 4):
        step(state, number)
        hvd.allreduce(torch.ones(1), name="metric")
        state.commit()
        assert state._snapshots.copied == number
        expected = values(state)
        step(state, 10)
        state.restore()
        assert same(values(state), expected)


def check_a_metric_before_the_step_does_not(monkeypatch):
    monkeypatch.setattr(steps(), "interval", lambda *_: 1 << 16)
    state = training()
    state.sync()
    for number in range(1, 4):
        hvd.allreduce(torch.ones(1), name="metric")
        step(state, number)
        state.commit()
        assert state._snapshots.copied == 0
        assert state._snapshots.is_exact


def steps():
    from hvd_cluster.elastic import steps

    return steps


def check_a_step_of_another_optimizer_of_the_process_counts():
    """Fused optimizers move no version counter, and the state may not know them."""
    model = net()
    state = TorchState(model=model)
    state.sync()
    other = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    model(torch.randn(8, 3).double()).mean().backward()
    versions = [parameter._version for parameter in model.parameters()]
    other.step()
    assert versions == [parameter._version for parameter in model.parameters()]
    assert not state._snapshots.is_exact


class Counting(torch.optim.SGD):
    """Changes its state before it calls the closure."""

    def step(self, closure):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["steps"] = self.state[parameter].get("steps", 0) + 1
        return super().step(closure)


def check_a_closure_touches_nothing_unless_its_optimizer_has_done_so_before(monkeypatch):
    """Its collectives are those of a backward: with torch's own optimizers no commit need copy."""
    monkeypatch.setattr(steps(), "interval", lambda *_: 1 << 16)
    for kind, is_exact in ((torch.optim.SGD, True), (torch.optim.Adam, True), (Counting, False)):
        model = net()
        optimizer = kind(model.parameters(), lr=0.1)
        state = TorchState(model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters()))
        state.sync()
        found = []

        def closure(model=model, state=state, found=found):
            state.optimizer.zero_grad()
            loss = model(torch.randn(8, 3).double()).square().mean()
            loss.backward()
            found.append(state._snapshots.is_exact)
            return loss

        for number in (1, 2):
            state.optimizer.step(closure)
            assert not state._snapshots.is_exact
            state.commit()
            assert state._snapshots.copied == (0 if is_exact else number), kind
        assert found == [is_exact] * 2, kind


def check_changes_by_hand_count():
    state = training()
    state.sync()
    with torch.no_grad():
        state.model[0].bias.add_(1.0)
    assert not state._snapshots.is_exact


def check_several_models_and_optimizers_and_schedulers():
    torch.manual_seed(hvd.rank())
    models = {"generator": net(), "critic": net()}
    optimizers = {f"{name}_optimizer": torch.optim.SGD(each.parameters(), lr=0.5) for name, each in models.items()}
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers["critic_optimizer"], step_size=2)
    state = TorchState(**models, **optimizers, scheduler=scheduler, scaler=torch.amp.GradScaler("cpu"))
    for _ in range(hvd.rank() * 3):
        optimizers["critic_optimizer"].step()
        scheduler.step()
    state.sync()
    assert everywhere([each.state_dict() for each in (*models.values(), *optimizers.values(), scheduler)])
    assert state.scheduler is scheduler
    assert scheduler.last_epoch == 0
    optimizers["critic_optimizer"].step()
    scheduler.step()
    state.restore()
    assert scheduler.last_epoch == 0


def check_assignment_gives_the_handler_a_new_value():
    state = training()
    state.sync()
    model, replacement = state.model, net()
    state.model = replacement
    assert state.model is replacement
    assert state._handlers["model"].value is replacement
    state.batch = 5
    state.commit()
    assert state._snapshots.copied == 1
    expected = copy.deepcopy(replacement.state_dict())
    with torch.no_grad():
        replacement[0].weight.zero_()
    state.restore()
    assert same(replacement.state_dict(), expected)
    assert model is not replacement


def check_a_model_that_comes_later_and_goes():
    state = TorchState(batch=0)
    state.sync()
    state.model = model = net()
    assert state._handlers["model"].value is model
    state.batch = 1
    state.commit()
    expected = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model[0].weight.zero_()
    state.restore()
    assert state.model is model
    assert same(model.state_dict(), expected)
    state.model = None
    assert "model" not in state._handlers
    state.restore()
    assert (state.model, state.batch) == (None, 1)


def check_the_last_full_copy_counts_where_all_ranks_are_touched(monkeypatch):
    monkeypatch.setattr(steps(), "interval", lambda *_: 1 << 16)
    logged = []
    monkeypatch.setattr(snapshots.logger, "warning", lambda text, *values: logged.append(text % values))
    state = training()
    state.sync()
    step(state)
    state.save()
    expected = values(state)
    for number in range(3):
        step(state, number)
        state.batch = number
        state.commit()
    step(state)
    hvd.allreduce(torch.ones(1), name="metric")
    state.interrupted()
    state.sync()
    assert same(values(state), expected)
    assert (state.batch, state.lost_commits) == (0, 3)
    assert logged == ["the state goes back from commit 4 to the full copy of commit 1: the steps in between are lost"]
    step(state)
    hvd.allreduce(torch.ones(1), name="metric")
    state.commit()
    assert state._snapshots.copied == state._snapshots.commit == 2


def check_a_rank_that_is_behind_takes_the_state_of_one_that_is_ahead():
    state = training(log=[])
    state.sync()
    step(state)
    state.commit()
    step(state, 1)
    if hvd.rank() == 1:
        state.batch = 2
        state.log.append(1)
        state.commit()
    expected = hvd.broadcast_object(values(state), root_rank=1)
    state.interrupted()
    state.sync()
    assert same(values(state), expected)
    assert (state.batch, state.log, state.lost_commits) == (2, [1], 0)


def check_elastic_sampler():
    sampler = hvd.elastic.ElasticSampler(range(20), shuffle=False)
    state = TorchState(sampler=sampler)
    state.sync()
    sampler.record_batch(0, 2)
    state.commit()
    sampler.record_batch(1, 2)
    state.restore()
    assert sampler.processed_num == 2 * hvd.size()
    assert next(iter(sampler)) == 2 * hvd.size() + hvd.rank()


class Counter:
    def __init__(self):
        self.count = 0


class CounterHandler(StateHandler):
    """As scripts for Horovod write them: sync() has no argument."""

    def __init__(self, value):
        super().__init__(value)
        self.save()

    def save(self):
        self.kept = self.value.count

    def restore(self):
        self.value.count = self.kept

    def sync(self):
        self.value.count = hvd.broadcast_object(self.value.count)
        self.save()


def check_handlers_of_the_user():
    registry = get_handler_registry()
    set_handler_registry([(Counter, CounterHandler), *registry])
    try:
        state = training(counter=Counter())
    finally:
        set_handler_registry(registry)
    state.counter.count = hvd.rank()
    state.sync()
    assert state.counter.count == 0
    state.counter.count = 5
    state.commit()
    state.counter.count = 6
    state.restore()
    assert state.counter.count == 5
    state.counter = replacement = Counter()
    assert state._handlers["counter"].value is replacement
    assert len(get_handler_registry()) == len(registry)


def check_the_interface_of_a_handler():
    model = net()
    handler = dict((kind.__name__, make) for kind, make in get_handler_registry())["Module"](model)
    assert isinstance(handler, handlers.SnapshotHandler)
    handler.save()
    expected = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model[0].weight.zero_()
    handler.restore()
    assert same(model.state_dict(), expected)
    handler.sync()
    assert everywhere(model.state_dict())


def check_an_attribute_that_cannot_be_copied():
    with pytest.raises(InvalidRequestError, match=r"state\.lock, a lock, cannot be copied"):
        ObjectState(lock=threading.Lock(), epoch=0)


class OnlyHere:
    """It can be copied, but not pickled on rank 0."""

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        raise TypeError("I stay")


def check_an_attribute_that_cannot_be_pickled():
    state = ObjectState(thing=OnlyHere(), epoch=0)
    with pytest.raises(InvalidRequestError, match=r"rank 0: .*state\.thing, a OnlyHere, cannot be pickled.*I stay"):
        state.sync()
    hvd.barrier()


def check_models_that_differ():
    state = TorchState(model=torch.nn.Linear(3, 4 + hvd.rank()))
    with pytest.raises(
        InvalidRequestError, match=r"first in weight: float32 \(4, 3\) on rank 0, weight: float32 \(5, 3"
    ):
        state.sync()
    hvd.barrier()


def check_versions_that_differ(monkeypatch):
    state = ObjectState(epoch=0)
    if hvd.rank() == 1:
        monkeypatch.setattr(elastic_state, "__version__", "0.0.1")
    with pytest.raises(InvalidRequestError, match=r"different versions: .* on rank 0, 0\.0\.1 on rank 1"):
        state.sync()
    hvd.barrier()


def check_names_that_are_taken():
    with pytest.raises(InvalidRequestError, match="cannot have an attribute 'commit'"):
        ObjectState(commit=1)


def check_hosts_updated_by_hand():
    """As in Horovod's own tests; the present state counts."""
    state = ObjectState(hvd.broadcast_object, hvd.rank, epoch=0)
    state.sync()
    state.on_hosts_updated(1, 1)
    state.epoch = 3
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.check_host_updates()
    assert caught.value.skip_sync
    state.epoch = 4
    state.on_hosts_updated(1, 2)  # of the same time: nothing new
    state.check_host_updates()
    state.on_hosts_updated(2, 1)
    state.on_hosts_updated(3, 2)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.commit()
    assert not caught.value.skip_sync
    state.epoch = 5
    state.restore()
    assert state.epoch == 4


def check_all_ranks_get_what_callbacks_make_of_the_state_of_rank_0():
    """Parameters travel only if a callback may have changed them."""
    state, shared, seen = training(calls=0), [], []
    state.sync()

    def on_state_reset():
        seen.append(1)
        state.calls += 1 + hvd.rank()
        state.optimizer.param_groups[0]["lr"] = 0.5 + hvd.rank()
        state.model[1].running_mean.add_(1 + hvd.rank())
        if len(seen) > 1:
            step(state)
            step(state, seed=10)

    state.register_reset_callbacks([on_state_reset])
    handler = state._handlers["model"]
    handler.share = lambda root: shared.append(root) or type(handler).share(handler, root)
    for calls in (1, 2):
        state._reset_together()
        assert everywhere(values(state))
        assert (state.calls, state.optimizer.param_groups[0]["lr"]) == (calls, 0.5)
        assert shared == [0] * (calls - 1) * (hvd.size() > 1)
        assert everywhere((state._snapshots.commit, state._snapshots.is_exact))
    before = values(state)
    state.calls, state.optimizer.param_groups[0]["lr"] = 9, 9.0
    state.restore()
    assert state.calls == 2
    assert same(values(state), before)


def check_reset_callbacks():
    state, seen = ObjectState(epoch=0), []
    state.register_reset_callbacks([lambda: seen.append(1), lambda: seen.append(2)])
    state.on_reset()
    assert seen == [1, 2]


class Minimal(State):
    """A state as scripts for Horovod write them."""

    def __init__(self):
        super().__init__(hvd.broadcast_object, hvd.rank)
        self.calls = []

    def save(self):
        self.calls.append("save")

    def restore(self):
        self.calls.append("restore")

    def sync(self):
        self.calls.append("sync")


def check_states_of_the_user():
    state = Minimal()
    state.commit()
    state.interrupted()
    assert state.calls == ["save", "restore"]
    with pytest.raises(NotImplementedError, match="State has no save"):
        State(hvd.broadcast_object, hvd.rank).commit()


class Counted(ObjectState):
    saves = 0

    def save(self):
        self.saves += 1
        super().save()


def check_a_subclass_that_saves_more():
    state = Counted(epoch=0)
    state.commit()
    assert state.saves == 1


def check_the_collector_may_find_a_state_while_an_optimizer_steps():
    """Its end must not touch the hooks that torch goes through at this moment."""
    gc.disable()
    abandoned = weakref.ref(TorchState(net()))
    collecting = register_optimizer_step_pre_hook(lambda *_: gc.collect() and None)
    state = training()
    try:
        assert abandoned() is not None
        step(state)
    finally:
        collecting.remove()
        gc.enable()
    assert abandoned() is None


@each_check(globals())
@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_on_ranks(ranks, check):
    ranks.run(patched, check)


def patched(check):
    """Runs on every rank; a check may ask for the fixture monkeypatch."""
    with pytest.MonkeyPatch.context() as patch:
        check(patch) if "monkeypatch" in check.__code__.co_varnames[: check.__code__.co_argcount] else check()
    hvd.barrier()
