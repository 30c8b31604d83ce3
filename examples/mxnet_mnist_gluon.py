"""Learn handwritten digits with MXNet's Gluon, on one process or on many, in the shape of Horovod's own example.

::

    hvdrun -np 2 python examples/mxnet_mnist_gluon.py
    python examples/mxnet_mnist_gluon.py --num-proc 2      # hvd_cluster.run starts the processes

The data are the 1,797 images of 8 x 8 pixels that scikit-learn ships.
"""

import argparse
import hashlib
import logging

import hvd_cluster
import hvd_cluster.mxnet as hvd  # before mxnet, which needs it next to NumPy 2

# isort: split
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="MXNet digits example")
parser.add_argument("--batch-size", type=int, default=32, help="training batch size of a process")
parser.add_argument("--epochs", type=int, default=8, help="number of training epochs")
parser.add_argument("--lr", type=float, default=0.02, help="learning rate for one process")
parser.add_argument("--momentum", type=float, default=0.9, help="SGD momentum")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0, help="divide gradients before the sum")
parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
parser.add_argument("--num-proc", type=int, help="start so many processes on this machine")
HELD_OUT = 360


def digits(batch_size):
    """Batches of this rank's training images, and of all held-out ones."""
    bunch = load_digits()
    order = np.random.RandomState(7).permutation(len(bunch.target))
    images = bunch.images[order].astype(np.float32)[:, None] / 16
    labels = bunch.target[order].astype(np.float32)
    own = slice(HELD_OUT + hvd.rank(), None, hvd.size())
    count = (len(labels) - HELD_OUT) // hvd.size()  # the same number of batches on all ranks
    training = mx.io.NDArrayIter(
        images[own][:count], labels[own][:count], batch_size, shuffle=True, last_batch_handle="discard"
    )
    return training, mx.io.NDArrayIter(images[:HELD_OUT], labels[:HELD_OUT], 60)


def conv_net():
    """A small convolutional network."""
    net = gluon.nn.HybridSequential()
    net.add(
        gluon.nn.Conv2D(channels=16, kernel_size=3, padding=1, activation="relu"),
        gluon.nn.BatchNorm(),
        gluon.nn.Conv2D(channels=32, kernel_size=3, padding=1, activation="relu"),
        gluon.nn.MaxPool2D(pool_size=2, strides=2),
        gluon.nn.Flatten(),
        gluon.nn.Dense(64, activation="relu"),
        gluon.nn.Dense(10),
    )
    return net


def evaluate(net, data):
    """The share of images that the network knows."""
    metric = mx.metric.Accuracy()
    data.reset()
    for batch in data:
        metric.update(batch.label, [net(batch.data[0])])
    return metric.get()[1]


def fingerprint(net):
    """A hash of all parameters that are trained."""
    parameters = [each for _, each in sorted(net.collect_params().items()) if each.grad_req != "null"]
    return hashlib.sha256(b"".join(each.data().asnumpy().tobytes() for each in parameters)).hexdigest()[:16]


def main(args):
    """Train; returns the accuracy."""
    hvd.init()
    mx.random.seed(hvd.rank())  # the broadcast makes the parameters equal
    np.random.seed(hvd.rank())
    training, held_out = digits(args.batch_size)
    net = conv_net()
    net.hybridize()
    net.initialize(mx.init.Xavier())

    params = net.collect_params()
    hvd.broadcast_parameters(params, root_rank=0)  # also those whose shapes the first forward tells
    optimizer_params = {"momentum": args.momentum, "learning_rate": args.lr * hvd.size()}
    trainer = hvd.DistributedTrainer(
        params,
        "sgd",
        optimizer_params,
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()

    for epoch in range(args.epochs):
        training.reset()
        for batch in training:
            with autograd.record():
                loss = loss_of(net(batch.data[0]), batch.label[0])
            loss.backward()
            trainer.step(args.batch_size)
        accuracy = float(hvd.allreduce(mx.nd.array([evaluate(net, held_out)]), name="accuracy").asscalar())
        if hvd.rank() == 0:
            logging.info("epoch %d: loss %.4f, held-out accuracy %.4f", epoch + 1, loss.mean().asscalar(), accuracy)

    hashes = hvd.allgather_object(fingerprint(net))
    if hvd.rank() == 0:
        same = hashes.count(hashes[0])
        print(f"accuracy {accuracy:.4f}")
        print(f"parameters: bit for bit the same on {same} of {hvd.size()} ranks, sha256 {hashes[0]}")
    return accuracy


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments = parser.parse_args()
    if arguments.num_proc:
        hvd_cluster.run(main, args=(arguments,), num_proc=arguments.num_proc)
    else:
        main(arguments)
