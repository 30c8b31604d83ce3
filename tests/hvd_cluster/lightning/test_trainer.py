"""Two ranks train like one process that has the batches of both."""

import pytest

from tests.hvd_cluster.lightning.training import PACKAGES, fit, flat, loader, regression, weights

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
