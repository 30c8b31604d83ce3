"""A script for Horovod with MXNet's Module API, which runs as it is, on the digits that scikit-learn ships.

::

    hvdrun --horovod-alias -np 2 python examples/mxnet_mnist_module.py
"""

import argparse
import hashlib
import logging

import horovod.mxnet as hvd
import mxnet as mx
import numpy as np
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="MXNet Module digits example")
parser.add_argument("--batch-size", type=int, default=32, help="training batch size of a process")
parser.add_argument("--epochs", type=int, default=8, help="number of training epochs")
parser.add_argument("--lr", type=float, default=0.05, help="learning rate for one process")
parser.add_argument("--momentum", type=float, default=0.9, help="SGD momentum")
args = parser.parse_args()
HELD_OUT = 360


def digits():
    bunch = load_digits()
    order = np.random.RandomState(7).permutation(len(bunch.target))
    images = bunch.images[order].astype(np.float32)[:, None] / 16
    labels = bunch.target[order].astype(np.float32)
    count = (len(labels) - HELD_OUT) // hvd.size()
    own = slice(HELD_OUT + hvd.rank(), None, hvd.size())
    training = mx.io.NDArrayIter(images[own][:count], labels[own][:count], args.batch_size, shuffle=True)
    return training, mx.io.NDArrayIter(images[:HELD_OUT], labels[:HELD_OUT], 60)


def network():
    data = mx.sym.var("data")
    conv = mx.sym.Convolution(data, kernel=(3, 3), pad=(1, 1), num_filter=16, name="conv1")
    pool = mx.sym.Pooling(mx.sym.Activation(conv, act_type="relu"), pool_type="max", kernel=(2, 2), stride=(2, 2))
    hidden = mx.sym.FullyConnected(mx.sym.flatten(pool), num_hidden=64, name="fc1")
    scores = mx.sym.FullyConnected(mx.sym.Activation(hidden, act_type="relu"), num_hidden=10, name="fc2")
    return mx.sym.SoftmaxOutput(scores, name="softmax")


logging.basicConfig(level=logging.INFO, format="%(message)s")
hvd.init()
np.random.seed(hvd.rank())
training, held_out = digits()
model = mx.mod.Module(network(), context=mx.cpu())
model.bind(data_shapes=training.provide_data, label_shapes=training.provide_label)
model.init_params(mx.init.Xavier())

arg_params, aux_params = model.get_params()
hvd.broadcast_parameters(arg_params, root_rank=0)
hvd.broadcast_parameters(aux_params, root_rank=0)
model.set_params(arg_params, aux_params)

sgd = mx.optimizer.create(
    "sgd", learning_rate=args.lr * hvd.size(), momentum=args.momentum, rescale_grad=1.0 / args.batch_size
)
model.fit(
    training,
    optimizer=hvd.DistributedOptimizer(sgd),
    kvstore=None,
    num_epoch=args.epochs,
    batch_end_callback=mx.callback.Speedometer(args.batch_size, 20) if hvd.rank() == 0 else None,
)

accuracy = model.score(held_out, mx.metric.Accuracy())[0][1]
trained, _ = model.get_params()
digest = hashlib.sha256(b"".join(trained[name].asnumpy().tobytes() for name in sorted(trained))).hexdigest()[:16]
hashes = hvd.allgather_object(digest)
if hvd.rank() == 0:
    print(f"accuracy {accuracy:.4f}")
    print(f"parameters: bit for bit the same on {hashes.count(hashes[0])} of {hvd.size()} ranks, sha256 {hashes[0]}")
