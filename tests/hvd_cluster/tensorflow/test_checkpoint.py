"""Checkpoints and seeds of TensorFlow on one, two and three ranks."""

import os
import random

import numpy as np
import pytest
import tensorflow as tf

import hvd_cluster.tensorflow as hvd
from tests.checks import each_check


class Net(tf.Module):
    """A layer, whose optimizer is a momentum that each rank has."""

    def __init__(self, value):
        super().__init__()
        self.weight = tf.Variable(tf.fill([3, 1], float(value)))
        self.momentum = tf.Variable(tf.zeros([3, 1]))

    def step(self):
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(tf.square(tf.ones([2, 3]) @ self.weight)) * (1.0 + hvd.rank())
        self.momentum.assign(0.9 * self.momentum + tape.gradient(loss, [self.weight])[0])
        self.weight.assign_sub(0.01 * self.momentum)


def check_a_training_goes_on(folder):
    folder = os.path.join(folder, str(hvd.rank()))
    first, second, count = Net(1), Net(2), tf.Variable(7)
    first.step()
    hvd.checkpoint.save(
        folder, {"net": first, "count": count}, step=1, epoch=3, metric=0.5, background=True, extra={"a": 1}
    )
    first.step()
    count.assign(0)
    found = hvd.checkpoint.load(folder, {"net": second, "count": count}, "best")
    second.step()
    assert (found.step, found.epoch, found.extra) == (1, 3, {"a": 1})
    assert os.path.basename(found.path) == "0000001-step-1.zip"
    assert count.numpy() == 7
    for one, other in ((first.weight, second.weight), (first.momentum, second.momentum)):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def check_other_variables(folder):
    hvd.checkpoint.save(folder, {"net": Net(1)}, step=1)
    for objects in ({"net": tf.Variable(1.0)}, {"other": Net(2)}, {"net": Net(2), "more": tf.Variable(1.0)}):
        with pytest.raises(
            hvd.checkpoint.CheckpointError, match=r"-step-1.zip has 2 variables, but .* or others under"
        ):
            hvd.checkpoint.load(folder, objects)
    assert Net(2).weight[0, 0] == 2


def check_errors(folder):
    with pytest.raises(hvd.checkpoint.CheckpointError, match="has no checkpoint"):
        hvd.checkpoint.load(folder, {})
    assert hvd.checkpoint.load(folder, {}, missing_ok=True) is None
    with pytest.raises(hvd.checkpoint.CheckpointError, match="rank 0 cannot make or read the checkpoint"):
        hvd.checkpoint.save(folder, {"net": object()}, step=1)
    hvd.checkpoint.wait()


def check_seeds():
    found = []
    for _ in range(2):
        own = hvd.set_seed(3)
        found.append([own, tf.random.normal([2]).numpy().tolist(), random.random(), np.random.rand()])
    assert found[0] == found[1]
    assert len(set(map(str, hvd.allgather_object(found[0])))) == hvd.size()
    assert hvd.set_seed(3, same=True) == 3
    assert hvd.metrics.average(tf.constant(float(hvd.rank()))) == (hvd.size() - 1) / 2


@pytest.mark.parametrize("ranks", [1, 2, 3], indirect=True)
@each_check(globals())
def test_on_ranks(ranks, check, tmp_path):
    ranks.run(check, *([str(tmp_path)] if check.__code__.co_argcount else []))
