"""The driver of a job on a cluster of its own, of Ray or of Spark, by its argument; prints the result of each rank."""

import os
import sys
import tempfile


def train():
    """A fingerprint of the parameters at the start, before the broadcast, and one at the end."""
    # The order does not matter in a function that is sent to workers.
    import hashlib

    import mxnet as mx

    import hvd_cluster.mxnet as hvd

    hvd.init()
    mx.random.seed(hvd.rank())
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.Conv2D(4, 3, in_channels=1, activation="relu"), mx.gluon.nn.Dense(3, in_units=36))
    net.initialize(mx.init.Xavier())
    parameters = [each for _, each in sorted(net.collect_params().items())]

    def fingerprint():
        return hashlib.sha256(b"".join(each.data().asnumpy().tobytes() for each in parameters)).hexdigest()[:16]

    start = fingerprint()
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    images, labels = mx.nd.random.normal(shape=(6, 1, 5, 5)), mx.nd.array([0, 1, 2] * 2)
    for _ in range(5):
        with mx.autograd.record():
            loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()(net(images), labels)
        loss.backward()
        trainer.step(len(labels))
    return f"{hvd.rank()} of {hvd.size()} {start} {fingerprint()}"


def on_ray():
    """As a function on the workers of a RayExecutor."""
    from ray_cluster import running_cluster

    from hvd_cluster.ray import RayExecutor

    with running_cluster(nodes=1), RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=2) as executor:
        return executor.run(train)


def on_spark():
    """As a function in the executor of Spark, which is the driver's own: that starts faster."""
    from spark_cluster import session, variables

    from hvd_cluster.spark import run

    with tempfile.TemporaryDirectory(prefix="hvd-") as folder:
        os.environ.update(variables(folder))
        with session("local[2]"):
            return run(train, num_proc=2)


if __name__ == "__main__":
    for line in {"ray": on_ray, "spark": on_spark}[sys.argv[1]]():
        print("result", line)  # noqa: T201 - for the test
