"""A training for launchers that pickle it: its arguments and results are plain values."""

import pytest


def train(epochs):
    """The world, the parameters and the loss after ``epochs``, in the strategy with a name."""
    import hvd_cluster.lightning
    from tests.hvd_cluster.lightning.training import fit, flat, loader, regression, weights

    assert hvd_cluster.lightning
    module = regression()
    made = fit(module, loader(16), loader(16), max_epochs=epochs)
    return made.world_size, flat(weights(module)), made.callback_metrics["error"].item()


def require_training(results):
    """Two ranks have trained together."""
    one, two = results
    assert one == two
    size, _, error = one
    assert size == 2
    assert error == pytest.approx(0, abs=12)  # the variance of the targets is 14
