"""Strategies with ``sharded``: the training and its checkpoints are those without it, to the last bit."""

import pytest
import torch

from tests.hvd_cluster.lightning.test_fabric import fabric
from tests.hvd_cluster.lightning.test_fabric import train as train_by_fabric
from tests.hvd_cluster.lightning.training import PACKAGES, fit, flat, loader, regression, trainer, weights

PLACES = [True, "host", "rank"]
# More than one block of each parameter, so that the ranks cut some of them.
WIDTH = 67


def wide():
    return torch.nn.Sequential(torch.nn.Linear(4, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def strategy(sharded, package="lightning.pytorch"):
    from hvd_cluster.lightning.packages import installed_classes

    return installed_classes()[package.partition(".")[0]].trainer(sharded=sharded)


def count_of_shared(module):
    """How many parameters lie in memory that ranks share."""
    from hvd_cluster.torch.optimizer.shard import _on_host

    return len(set(module.parameters()) & set(_on_host))


def adam(module):
    """Let ``module`` train by Adam; the list gets the optimizers that it makes."""
    made = []

    def configure_optimizers():
        made.append(torch.optim.Adam(module.parameters(), lr=0.01))
        return {"optimizer": made[-1], "lr_scheduler": {"scheduler": halving(made[-1]), "interval": "step"}}

    module.configure_optimizers = configure_optimizers
    return made


def plain(state):
    """A nested ``state`` without tensors."""
    if isinstance(state, torch.Tensor):
        return state.tolist()
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return [plain(each) for each in state] if isinstance(state, list | tuple) else state


def train(sharded, package="lightning.pytorch", **options):
    """The weights at the end of a training by Adam, and the state of the optimizer that the module has made."""
    import hvd_cluster.torch as hvd

    module = regression(package, seed=hvd.rank(), network=wide)
    made = adam(module)
    batches = loader(4, share=(hvd.rank(), 2))
    fit(module, batches, batches, package=package, strategy=strategy(sharded, package), **options)
    return flat(weights(module)), plain(made[-1].state_dict())


def assert_same_training(pair, function, places=PLACES):
    """``function`` gives on both ranks with ``sharded`` what it gives without it."""
    expected = pair.run(lambda: function(False))
    assert expected[0] == expected[1]
    for place in places:
        assert pair.run(lambda place=place: function(place)) == expected
    return expected[0]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_training_is_that_without_sharded(pair, package):
    _, state = assert_same_training(pair, lambda sharded: train(sharded, package))
    assert state["state"][0]["step"] == 8
    assert len(state["state"]) == 4


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.3},
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 3},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
    ],
    ids=str,
)
def test_options_of_the_trainer(pair, options):
    found = assert_same_training(pair, lambda sharded: train(sharded, **options), ["host", "rank"])
    assert found != pair.run(lambda: train(False))[0]


def test_a_scaler_of_gradients(pair):
    def scaled(sharded):
        from lightning.pytorch.plugins import MixedPrecision

        plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))]
        return train(sharded, plugins=plugins, gradient_clip_val=0.3)

    assert_same_training(pair, scaled)


def test_each_rank_has_its_part_while_it_trains(pair):
    def parts(sharded):
        import hvd_cluster.torch as hvd

        module = regression(network=wide)
        made = adam(module)
        seen = []

        def on_train_batch_end(*_):
            state = module.trainer.optimizers[0].state.values()
            seen.append((sum(each["exp_avg"].numel() for each in state), count_of_shared(module)))

        module.on_train_batch_end = on_train_batch_end
        fit(module, loader(4, share=(hvd.rank(), 2)), strategy=strategy(sharded))
        after = count_of_shared(module), len(made[0].state)
        with torch.no_grad():
            module.network[0].weight.fill_(float(hvd.rank()))
        hvd.barrier()
        return seen[-1], after, module.network[0].weight.mean().item()

    total = sum(each.numel() for each in wide().parameters())
    for place in PLACES:
        found = pair.run(lambda place=place: parts(place))
        assert sum(own for (own, _), _, _ in found) == total
        assert all(own < total for (own, _), _, _ in found)
        assert {shared for (_, shared), _, _ in found} == {0 if place == "rank" else 4}
        assert [after for _, after, _ in found] == [(0, 4)] * 2
        assert [own for _, _, own in found] == [0.0, 1.0]


def test_checkpoints_are_those_without_sharded(pair, tmp_path):
    """That of a callback in the middle, and that of all ranks after the training; a plain optimizer loads them."""

    def save(sharded):
        from lightning.pytorch.callbacks import ModelCheckpoint

        import hvd_cluster.torch as hvd

        folder = tmp_path / str(sharded)
        module = regression(network=wide)
        adam(module)
        batches = loader(4, share=(hvd.rank(), 2))
        callback = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=3)
        options = {"enable_checkpointing": True, "callbacks": [callback], "strategy": strategy(sharded)}
        made = fit(module, batches, batches, **options)
        made.save_checkpoint(folder / "end.ckpt")
        files = sorted(path.name for path in folder.iterdir())
        found = [torch.load(folder / name, weights_only=False) for name in files]
        alone = torch.optim.Adam(wide().parameters())
        alone.load_state_dict(found[0]["optimizer_states"][0])
        return files, [plain([each[key] for key in ("state_dict", "optimizer_states")]) for each in found]

    files, states = assert_same_training(pair, save)
    assert files == ["end.ckpt", "step=3.ckpt", "step=6.ckpt"]
    assert [state[1][0]["state"][0]["step"] for state in states] == [8, 3, 6]


@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, "rank"), ("rank", "host")])
def test_a_resumed_training_is_one_without_a_break(pair, tmp_path, before, after):
    def start():
        import hvd_cluster.torch as hvd

        module = regression(network=wide)
        adam(module)
        module.on_train_epoch_end = lambda: module.trainer.save_checkpoint(tmp_path / "shared.ckpt")
        fit(module, loader(4, share=(hvd.rank(), 2)), max_epochs=1, strategy=strategy(before))

    pair.run(start)
    resumed = pair.run(lambda: train(after, ckpt_path=tmp_path / "shared.ckpt"))
    assert resumed == pair.run(lambda: train(False))


def test_a_module_and_its_optimizer_are_trained_again(pair):
    def twice(sharded):
        import hvd_cluster.torch as hvd

        module = regression(network=wide)
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        module.configure_optimizers = lambda: optimizer
        for kind in (sharded, False, sharded):
            made = fit(module, loader(4, share=(hvd.rank(), 2)), strategy=strategy(kind))
        assert made.optimizers[0] is optimizer
        return flat(weights(module)), plain(optimizer.state_dict())

    _, state = assert_same_training(pair, twice)
    assert state["state"][0]["step"] == 24


def test_averages_of_weights(pair):
    """They take the place of the parameters for each validation."""

    def averaged(sharded):
        from lightning.pytorch.callbacks import WeightAveraging

        return train(sharded, callbacks=[WeightAveraging(use_buffers=False)])

    def has_averaging():
        from lightning.pytorch import callbacks

        return hasattr(callbacks, "WeightAveraging")

    if not all(pair.run(has_averaging)):
        pytest.skip("this Lightning has no WeightAveraging")
    assert_same_training(pair, averaged, ["rank"])
    with pytest.raises(ValueError, match=r'share parameters, but WeightAveraging .*; give sharded="rank"'):
        pair.run(lambda: averaged(True))


def test_two_optimizers_by_hand(pair):
    def by_hand(sharded):
        import hvd_cluster.torch as hvd

        module = regression(network=wide)
        module.automatic_optimization = False
        module.critic = torch.nn.Linear(1, 90)

        def training_step(batch, batch_idx):
            first, second = module.optimizers()
            made = module.network(batch[0])
            first.zero_grad()
            module.manual_backward((module.critic(made) - batch[1]).square().mean())
            module.clip_gradients(first, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
            first.step()
            second.zero_grad()
            (module.critic(made.detach()) + batch[1]).square().mean().backward()
            second.step()

        module.training_step = training_step
        own = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (module.network, module.critic)]
        module.configure_optimizers = lambda: own
        fit(module, loader(4, share=(hvd.rank(), 2)), strategy=strategy(sharded))
        return flat(weights(module)), [plain(each.state_dict()) for each in own]

    assert_same_training(pair, by_hand)


def test_ranks_with_different_numbers_of_batches_are_an_error(fresh_pool):
    def uneven():
        import hvd_cluster.torch as hvd

        hvd.init()
        module = regression(network=wide)
        try:
            fit(module, loader(4 + 4 * hvd.rank()), strategy=strategy(True))
        except (hvd.HorovodInternalError, ValueError) as error:
            return str(error), count_of_shared(module)
        finally:
            hvd.shutdown()

    one, two = fresh_pool(2).run(uneven)
    assert "equally many steps, or leave out sharded" in one[0]
    assert "rank 0" in two[0]
    assert one[1] == two[1] == 0


@pytest.mark.parametrize(("options", "problem"), [({"sharded": "gpu"}, "sharded='gpu' must be"), ({}, "Adasum")])
def test_bad_arguments(alone, options, problem):
    def make():
        import hvd_cluster.torch as hvd
        from hvd_cluster.lightning import HorovodStrategy

        with pytest.raises(ValueError, match=problem):
            trainer(strategy=HorovodStrategy(**{"sharded": True, "op": hvd.Adasum, **options}))

    alone.run(make)


def test_a_world_of_one(alone):
    def one(sharded):
        module = regression(network=wide)
        adam(module)
        fit(module, loader(4), strategy=strategy(sharded))
        return flat(weights(module))

    assert alone.run(lambda: one(True)) == alone.run(lambda: one(False))


@pytest.mark.parametrize("options", [{}, {"passes": 2, "clip": 0.3}, {"closure": True, "together": False}])
def test_fabric_trains_as_without_sharded(pair, options):
    def with_strategy(sharded):
        import hvd_cluster.torch as hvd
        from hvd_cluster.lightning import HorovodFabricStrategy

        made = fabric(strategy=HorovodFabricStrategy(sharded=sharded))
        return train_by_fabric(made, 4, (hvd.rank(), 2), **options)

    assert_same_training(pair, with_strategy)


def test_fabric_saves_and_loads(pair, tmp_path):
    """The second training goes on from the state of the first, with ``sharded`` and without it."""

    def prepared(sharded, seed=0):
        from hvd_cluster.lightning import HorovodFabricStrategy

        made = fabric(strategy=HorovodFabricStrategy(sharded=sharded))
        torch.manual_seed(seed)
        network = wide()
        module, optimizer = made.setup(network, torch.optim.Adam(network.parameters(), lr=0.01))
        return made, module, optimizer

    def steps(made, module, optimizer, count=3):
        import hvd_cluster.torch as hvd

        for inputs, targets in list(loader(4, share=(hvd.rank(), 2)))[:count]:
            optimizer.zero_grad()
            made.backward((module(inputs) - targets).square().mean())
            optimizer.step()

    def save_and_go_on(sharded):
        path = tmp_path / f"{sharded}.ckpt"
        made, module, optimizer = prepared(sharded)
        steps(made, module, optimizer)
        made.save(path, {"module": module, "optimizer": optimizer})
        made.barrier()
        saved = torch.load(path, weights_only=False)
        steps(made, module, optimizer, 2)
        found = []
        for kind in (False, sharded):
            made, again, other = prepared(kind, seed=1)
            made.load(path, {"module": again, "optimizer": other})
            steps(made, again, other, 2)
            found.append((flat(weights(again)), plain(other.state_dict())))
        assert found == [(flat(weights(module)), plain(optimizer.state_dict()))] * 2
        if sharded:
            optimizer.unshare_parameters()
        assert count_of_shared(module) == 0
        return plain(saved), found[0]

    saved, _ = assert_same_training(pair, save_and_go_on)
    assert saved["optimizer"]["state"][0]["step"] == 3
