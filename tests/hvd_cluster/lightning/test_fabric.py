"""Fabric on two ranks trains like one process that has the batches of both."""

import importlib

import pytest
import torch

from tests.hvd_cluster.lightning.training import flat, loader, perceptron, rows, weights

FABRICS = ["lightning.fabric", "lightning_fabric"]


def fabric(package="lightning.fabric", strategy="horovod", **options):
    made = importlib.import_module(package).Fabric(accelerator="cpu", strategy=strategy, **options)
    made.launch()
    return made


def train(made, batch, share=(0, 1), passes=1, clip=None, closure=False, together=True):
    """The parameters after an epoch, of which each step has ``passes`` batches."""
    torch.manual_seed(share[0])
    network = perceptron()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    if together:
        module, optimizer = made.setup(network, optimizer)
    else:
        module = made.setup_module(network)
        optimizer = made.setup_optimizers(optimizer)
    for number, (inputs, targets) in enumerate(loader(batch, share=share)):
        is_last = number % passes == passes - 1
        with made.no_backward_sync(module, enabled=not is_last):
            loss = (module(inputs) - targets).square().mean()
            made.backward(loss / passes)
        if is_last:
            if clip is not None:
                made.clip_gradients(module, optimizer, max_norm=clip)
            optimizer.step(closure=lambda: None) if closure else optimizer.step()
            optimizer.zero_grad()
    return flat(weights(network))


def on_two(pair, package="lightning.fabric", precision=None, **options):
    def with_strategy():
        import hvd_cluster.torch as hvd

        return train(fabric(package, precision=precision), 4, (hvd.rank(), 2), **options)

    one, two = pair.run(with_strategy)
    assert one == two
    return one


@pytest.mark.parametrize("package", FABRICS)
@pytest.mark.parametrize("options", [{}, {"passes": 2, "clip": 0.3}, {"closure": True, "together": False}])
def test_two_ranks_train_like_one_process(pair, package, options):
    alone = pair.run(lambda: train(fabric(strategy="auto", devices=1), 8, **{**options, "closure": False}))[0]
    assert on_two(pair, package, **options) == pytest.approx(alone, rel=1e-4, abs=1e-6)


def test_mixed_precision(pair):
    assert on_two(pair, precision="bf16-mixed") == pytest.approx(on_two(pair), rel=0.2, abs=0.05)


def test_a_scaler_of_gradients(pair):
    def scaled():
        from lightning.fabric.plugins import MixedPrecision

        import hvd_cluster.torch as hvd

        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))
        return train(fabric(plugins=[plugin]), 4, (hvd.rank(), 2), clip=0.3)

    one, two = pair.run(scaled)
    assert one == two
    assert one == pytest.approx(on_two(pair, clip=0.3), rel=0.1, abs=0.02)


def test_options_of_the_optimizer(pair):
    def small():
        import hvd_cluster.torch as hvd
        from hvd_cluster.lightning import HorovodFabricStrategy

        strategy = HorovodFabricStrategy(compression=hvd.Compression.fp16)
        return train(fabric(strategy=strategy), 4, (hvd.rank(), 2))

    one, two = pair.run(small)
    exact = on_two(pair)
    assert one == two != exact
    assert one == pytest.approx(exact, rel=0.05, abs=0.01)


def test_a_module_is_set_up_again(pair):
    """The first optimizer is gone, and combines nothing any more."""

    def twice():
        import hvd_cluster.torch as hvd

        made, network = fabric(), perceptron()
        for _ in range(2):
            module, optimizer = made.setup(network, torch.optim.SGD(network.parameters(), lr=0.05))
            made.backward(module(torch.full((1, 4), float(hvd.rank()))).sum())
            optimizer.step()
            optimizer.zero_grad()
        return flat(weights(network))

    one, two = pair.run(twice)
    assert one == two


def test_collectives(pair):
    def call():
        import hvd_cluster.torch as hvd

        made = fabric()
        own = torch.tensor([1.0, 2.0]) * (hvd.rank() + 1)
        part = torch.tensor(float(hvd.rank() + 1), requires_grad=True)
        made.all_gather(part, sync_grads=True).prod().backward()
        return (
            [made.all_reduce(own, reduce_op=op).tolist() for op in ("mean", "sum", "max", "min", "product")],
            made.all_reduce(torch.tensor(hvd.rank())).item(),
            made.all_reduce("a word") if hvd.rank() else "a word",
            made.all_gather(own).tolist(),
            made.broadcast({"from": hvd.rank()}, src=1),
            made.strategy.reduce_boolean_decision(hvd.rank() == 0),
            made.strategy.reduce_boolean_decision(hvd.rank() == 0, all=False),
            made.world_size,
            part.grad.item(),
        )

    one, two = pair.run(call)
    assert one[:-1] == two[:-1]
    reductions, mean, word, gathered, sender, both, any_of_them, size, gradient = one
    assert reductions == [[1.5, 3.0], [3.0, 6.0], [2.0, 4.0], [1.0, 2.0], [2.0, 8.0]]
    assert mean == 0.5
    assert word == "a word"
    assert gathered == [[1.0, 2.0], [2.0, 4.0]]
    assert sender == {"from": 1}
    assert (both, any_of_them, size) == (False, True, 2)
    assert (gradient, two[-1]) == (2.0, 1.0)


def test_data_and_checkpoints(pair, tmp_path):
    def save():
        made = fabric()
        network, optimizer = made.setup(perceptron(), torch.optim.SGD(perceptron().parameters(), lr=0.1))
        data = torch.utils.data.TensorDataset(*rows())
        found = torch.cat([inputs for inputs, _ in made.setup_dataloaders(torch.utils.data.DataLoader(data, 4))])
        state = {"network": network, "optimizer": optimizer, "step": 3}
        made.save(tmp_path / "state.ckpt", state)
        made.barrier()
        with torch.no_grad():
            network.module[0].bias.zero_()
        state["step"] = 0
        made.load(tmp_path / "state.ckpt", state)
        return found.tolist(), state["step"], network.module[0].bias.abs().sum().item() > 0

    one, two = pair.run(save)
    assert sorted(one[0] + two[0]) == sorted(rows()[0].tolist())
    assert one[1:] == two[1:] == (3, True)
