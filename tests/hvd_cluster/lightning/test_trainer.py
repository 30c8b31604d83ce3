"""Two ranks train like one process that has the batches of both."""

import pytest
import torch

from tests.hvd_cluster.lightning.training import PACKAGES, fit, flat, loader, regression, rows, trainer, weights

CLOSE = {"rel": 1e-4, "abs": 1e-6}


def train(package="lightning.pytorch", network=None, scheduler=None, batch=4, **options):
    """The weights, the metrics and the steps of a rank. Ranks start with different weights: those of rank 0 count."""
    import hvd_cluster.torch as hvd

    module = regression(package, seed=hvd.rank(), network=network, scheduler=scheduler)
    share = hvd.rank(), hvd.size()
    made = fit(module, loader(batch, share=share), loader(batch, share=share), package=package, **options)
    return (
        flat(weights(module)),
        {name: value.item() for name, value in made.callback_metrics.items()},
        made.global_step,
    )


def train_alone(network=None, scheduler=None, batch=4, **options):
    """The same in one process on batches of twice as many rows, with no strategy of ours."""
    module = regression(network=network, scheduler=scheduler)
    made = fit(module, loader(2 * batch), loader(2 * batch), **{**options, "package": PACKAGES[0], "strategy": "auto"})
    return (
        flat(weights(module)),
        {name: value.item() for name, value in made.callback_metrics.items()},
        made.global_step,
    )


def same_as_alone(pair, **options):
    """What ``train`` gives on both ranks, which is what ``train_alone`` gives."""
    one, two = pair.run(lambda: train(**options))
    alone = pair.run(lambda: train_alone(**options))[0]
    assert one == two
    assert one[0] == pytest.approx(alone[0], **CLOSE)
    assert one[1] == pytest.approx(alone[1], **CLOSE)
    assert one[2] == alone[2]
    return one


@pytest.mark.parametrize("package", PACKAGES)
def test_two_ranks_train_like_one_process(pair, package):
    _, metrics, steps = same_as_alone(pair, package=package)
    assert set(metrics) == {"loss", "loss_step", "loss_epoch", "error"}
    assert steps == 2 * 32 / 8


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_sees_averages(pair, algorithm):
    clipped, _, _ = same_as_alone(pair, gradient_clip_val=0.3, gradient_clip_algorithm=algorithm)
    assert clipped != pytest.approx(pair.run(train)[0][0], rel=0.01)


def test_accumulated_gradients(pair):
    """Four batches in an epoch, so that the last step has one only."""
    _, _, steps = same_as_alone(pair, accumulate_grad_batches=3)
    assert steps == 2 * 2


def test_only_the_last_batch_of_an_accumulation_is_exchanged(pair):
    def local_gradients():
        import hvd_cluster.torch as hvd

        found = []
        module = regression()
        module.on_after_backward = lambda: found.append(module.network[0].bias.grad.tolist())
        fit(module, loader(4, share=(hvd.rank(), 2)), max_epochs=1, accumulate_grad_batches=2)
        return found

    one, two = pair.run(local_gradients)
    assert [mine == theirs for mine, theirs in zip(one, two, strict=True)] == [False, True, False, True]


def test_a_scheduler_drives_the_distributed_optimizer(pair):
    def decay(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

    same_as_alone(pair, scheduler=decay)


def normalized():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))


def test_batch_normalization_over_all_ranks(pair):
    def kinds():
        import hvd_cluster.torch as hvd

        module = regression(network=normalized)
        seen = []
        module.on_train_start = lambda: seen.append(type(module.network[1]))
        fit(module, loader(4), max_epochs=1, sync_batchnorm=True)
        return seen == [hvd.SyncBatchNorm], type(module.network[1]) is torch.nn.BatchNorm1d

    same_as_alone(pair, network=normalized, sync_batchnorm=True)
    assert pair.run(kinds) == [(True, True)] * 2


def test_statistics_of_batches_are_those_of_each_rank_by_default(pair):
    one, two = pair.run(lambda: train(network=normalized)[0])
    assert one != two


@pytest.mark.parametrize("kind", ["adversarial", "raw"])
def test_two_optimizers_by_hand(pair, kind):
    """The second one also trains on what the first one has made; with "raw" it calls backward itself."""

    def by_hand(strategy, batch, share):
        module = regression()
        module.automatic_optimization = False
        module.critic = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(module.critic.weight, 0.5)
        torch.nn.init.constant_(module.critic.bias, 0.1)

        def training_step(batch, batch_idx):
            first, second = module.optimizers()
            made = module.network(batch[0])
            first.zero_grad()
            module.manual_backward((module.critic(made) - batch[1]).square().mean())
            module.clip_gradients(first, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
            first.step()
            second.zero_grad()
            loss = (module.critic(made.detach()) + batch[1]).square().mean()
            loss.backward() if kind == "raw" else module.manual_backward(loss)
            second.step()

        module.training_step = training_step
        module.configure_optimizers = lambda: [
            torch.optim.SGD(module.network.parameters(), lr=0.05),
            torch.optim.Adam(module.critic.parameters(), lr=0.01),
        ]
        fit(module, loader(batch, share=share), strategy=strategy)
        return flat(weights(module))

    def with_strategy():
        import hvd_cluster.torch as hvd

        return by_hand("horovod", 4, (hvd.rank(), 2))

    one, two = pair.run(with_strategy)
    assert one == two
    assert one == pytest.approx(pair.run(lambda: by_hand("auto", 8, (0, 1)))[0], **CLOSE)


@pytest.mark.parametrize("is_blocked", [False, True])
def test_gradients_that_add_up_by_hand(pair, is_blocked):
    def by_hand(strategy, batch, share):
        module = regression()
        module.automatic_optimization = False

        def training_step(batch, batch_idx):
            optimizer = module.optimizers()
            is_last = batch_idx % 2 == 1
            with optimizer.toggle_model(sync_grad=is_last or not is_blocked):
                module.manual_backward((module.network(batch[0]) - batch[1]).square().mean())
            if is_last:
                optimizer.step()
                optimizer.zero_grad()

        module.training_step = training_step
        fit(module, loader(batch, share=share), strategy=strategy)
        return flat(weights(module))

    def with_strategy():
        import hvd_cluster.torch as hvd

        return by_hand("horovod", 4, (hvd.rank(), 2))

    one, two = pair.run(with_strategy)
    assert one == two
    assert one == pytest.approx(pair.run(lambda: by_hand("auto", 8, (0, 1)))[0], **CLOSE)


def test_lbfgs(pair):
    def lbfgs(strategy, batch, share):
        module = regression()
        module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters(), max_iter=3)
        fit(module, loader(batch, share=share), strategy=strategy, max_epochs=1)
        return flat(weights(module))

    def with_strategy():
        import hvd_cluster.torch as hvd

        return lbfgs("horovod", 16, (hvd.rank(), 2))

    one, two = pair.run(with_strategy)
    assert one == two
    assert one == pytest.approx(pair.run(lambda: lbfgs("auto", 32, (0, 1)))[0], rel=0.01, abs=1e-4)


def test_mixed_precision(pair):
    one, two = pair.run(lambda: train(precision="bf16-mixed"))
    assert one == two
    assert one[0] == pytest.approx(pair.run(train)[0][0], rel=0.2, abs=0.05)


def test_a_scaler_of_gradients(pair):
    """Its first scale is too large on rank 1 only: all ranks skip the step, and then take the same ones."""

    def scaled():
        from lightning.pytorch.plugins import MixedPrecision

        import hvd_cluster.torch as hvd

        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        module = regression(seed=hvd.rank())
        broken = []
        forward = module.network.forward

        def overflowing(inputs):
            if hvd.rank() == 1 and not broken:
                broken.append(True)
                return forward(inputs) * 1e30
            return forward(inputs)

        module.network.forward = overflowing
        plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
        fit(module, loader(4, share=(hvd.rank(), 2)), plugins=plugins, gradient_clip_val=0.3)
        return flat(weights(module)), scaler.get_scale()

    one, two = pair.run(scaled)
    assert one == two
    assert one[1] == 2.0**9
    assert one[0] == pytest.approx(pair.run(lambda: train(gradient_clip_val=0.3))[0][0], rel=0.5, abs=0.2)


def test_options_of_the_optimizer(pair):
    """The sum of the gradients at half the rate is their average; 16 bits are close to it."""

    def with_options(rate, **options):
        import hvd_cluster.torch as hvd
        from hvd_cluster.lightning import HorovodStrategy

        module = regression()
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=rate)
        fit(module, loader(4, share=(hvd.rank(), 2)), strategy=HorovodStrategy(**options))
        return flat(weights(module))

    def all_kinds():
        import hvd_cluster.torch as hvd

        return (
            with_options(0.05),
            with_options(0.025, op=hvd.Sum),
            with_options(0.05, gradient_predivide_factor=2.0, groups=1),
            with_options(0.05, compression=hvd.Compression.fp16),
            with_options(0.05, op=hvd.Adasum),
        )

    one, two = pair.run(all_kinds)
    assert one == two
    average, total, predivided, small, adasum = one
    assert total == pytest.approx(average, **CLOSE)
    assert predivided == pytest.approx(average, **CLOSE)
    assert small == pytest.approx(average, rel=0.05, abs=0.01)
    assert small != average
    assert adasum != pytest.approx(average, rel=0.01)


def test_a_module_is_trained_again(pair):
    """The optimizers of the first training combine nothing any more, and callbacks find those of the schedulers."""

    def twice():
        import hvd_cluster.torch as hvd

        def decay(optimizer):
            return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

        module = regression(scheduler=decay)
        seen = []
        module.on_train_start = lambda: seen.append(module.trainer.optimizers[0])
        first = fit(module, loader(4, share=(hvd.rank(), 2)))
        assert module.trainer.optimizers[0] is not seen[0]
        assert module.trainer.optimizers[0] is module.trainer.lr_scheduler_configs[0].scheduler.optimizer
        second = fit(module, loader(4, share=(hvd.rank(), 2)))
        module.network(torch.ones(1, 4)).sum().backward()  # on one rank after the other, or on one only
        return flat(weights(module)), len(first.callbacks), len(second.callbacks), len(trainer().callbacks)

    one, two = pair.run(twice)
    assert one == two
    assert one[1] == one[2] == one[3]


def test_validate_test_and_predict(pair):
    def evaluate():
        import hvd_cluster.torch as hvd

        module = regression()
        made = trainer()
        share = hvd.rank(), 2
        found = made.validate(module, loader(4, share=share), verbose=False)
        again = made.test(module, loader(4, share=share), verbose=False)
        predicted = made.predict(module, loader(4, share=share))
        expected = module.network(rows()[0])[hvd.rank() :: 2]
        return found, again, torch.allclose(torch.cat(predicted), expected, atol=1e-6)

    def alone():
        return trainer(strategy="auto").validate(regression(), loader(8), verbose=False)

    one, two = pair.run(evaluate)
    assert one[:2] == two[:2]
    assert one[0] == one[1]
    assert one[0][0]["error"] == pytest.approx(pair.run(alone)[0][0]["error"])
    assert one[2]
    assert two[2]
