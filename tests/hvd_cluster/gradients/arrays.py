"""A framework of NumPy arrays: enough of one to show what the optimizer core asks of a binding."""

import contextlib
import weakref

import numpy as np

from collectives.api import Operation, ReduceOp
from hvd_cluster.gradients.binding import Binding, DifferenceBinding, Tensors
from hvd_cluster.gradients.buckets import Size
from hvd_cluster.ops import handles
from hvd_cluster.ops.arrays import gathered, in_place
from hvd_cluster.ops.operands import start, start_group


class Parameter:
    """``backward`` puts a gradient there, or adds to it, and calls the functions that watch it."""

    def __init__(self, *shape, dtype=np.float64):
        self.data = np.zeros(shape, dtype)
        self.shape, self.dtype = self.data.shape, self.data.dtype
        self.gradient = None
        self.version = 0
        self.trained = True
        self.watchers = []

    def backward(self, gradient):
        if self.gradient is None or isinstance(gradient, Rows):
            self.gradient, self.version = gradient, 0
        else:
            self.gradient += gradient
            self.version += 1
        for watcher in list(self.watchers):
            watcher(self)


class Rows:
    """A sparse gradient: the ``values`` of some rows."""

    def __init__(self, indices, values, shape):
        self.indices, self.values, self.shape = np.array(indices, np.int64), np.array(values, np.float64), shape

    def dense(self):
        array = np.zeros(self.shape)
        np.add.at(array, self.indices, self.values)
        return array


class Pack:
    """Copies of gradients in one row of memory."""

    def __init__(self, gradients):
        self.tensor = np.concatenate([gradient.reshape(-1) for gradient in gradients])

    def spread(self, combined, gradients):
        bounds = np.cumsum([gradient.size for gradient in gradients])[:-1]
        for gradient, piece in zip(gradients, np.split(combined, bounds), strict=True):
            gradient[...] = piece.reshape(gradient.shape)


class ArrayTensors(Tensors[Parameter]):
    def gradient(self, parameter):
        return parameter.gradient

    def is_trained(self, parameter):
        return parameter.trained

    def start_group(self, tensors, name, process_set, fields):
        return start_group(Operation.ALLREDUCE, in_place, tensors, tuple, name, process_set, **fields)

    def wait(self, handle):
        return handles.synchronize(handle)

    def unrecorded(self):
        return contextlib.nullcontext()


class ArrayDifferences(ArrayTensors, DifferenceBinding[Parameter]):
    def snapshot(self, parameter):
        return parameter.data.copy()

    def difference(self, parameter, start):
        return parameter.data - start

    def move(self, parameter, start, change):
        parameter.data[...] = start + change

    def restore(self, parameter, start):
        parameter.data[...] = start

    def is_finite(self, gradient):
        return np.isfinite(gradient).all()

    def spoil(self, gradient):
        gradient[...] = np.inf


class Held(np.ndarray):
    """The elements of a gradient; a view of it keeps this class, and its combination has memory of its own."""


def in_place_or_beside(array):
    return in_place(array.copy().view(np.ndarray) if isinstance(array, Held) else array)


class ArrayBinding(ArrayTensors, Binding[Parameter]):
    change_remedy = "change it after combine()"
    send_remedy = "call combine() first"
    repeat_remedy = "compute it once"
    can_hold = True

    def __init__(self, on_gradient):
        self.on_gradient = weakref.WeakMethod(on_gradient)

    def set_gradient(self, parameter, gradient):
        parameter.gradient = gradient

    def set_zeros(self, parameter):
        parameter.gradient = np.zeros_like(parameter.data)

    def state(self, parameter):
        return parameter.gradient, parameter.version

    def size(self, tensor):
        array = tensor.data if isinstance(tensor, Parameter) else tensor.dense() if isinstance(tensor, Rows) else tensor
        return Size(array.nbytes, array.dtype)

    def count(self, parameter):
        return parameter.data.size

    def sparse_dimensions(self, gradient):
        return 1 if isinstance(gradient, Rows) else None

    def to_sparse(self, gradient, dimensions):
        (rows,) = np.nonzero(gradient.any(axis=tuple(range(dimensions, gradient.ndim))))
        return Rows(rows, gradient[rows], gradient.shape)

    def to_dense(self, gradient):
        return gradient.dense()

    def pack(self, gradients, earlier):
        return Pack(gradients)

    def outgoing(self, gradient):
        return gradient

    def hold(self, gradient):
        return (gradient.values if isinstance(gradient, Rows) else gradient).copy().view(Held)

    def is_unchanged(self, gradient, held):
        return np.array_equal(gradient.values if isinstance(gradient, Rows) else gradient, held, equal_nan=True)

    def incoming(self, gradient, combined):
        gradient[...] = combined.reshape(gradient.shape)

    def placeholder(self, parameter):
        return np.empty((0,) * (parameter.data.ndim + 1), parameter.data.dtype)

    def marker(self):
        return np.zeros((), np.uint8)

    def start(self, tensor, name, process_set, fields):
        return start(Operation.ALLREDUCE, in_place_or_beside, tensor, name, process_set, **fields)

    def start_group(self, tensors, name, process_set, fields):
        return start_group(Operation.ALLREDUCE, in_place_or_beside, tensors, tuple, name, process_set, **fields)

    def start_sparse(self, gradient, name, factor, op, process_set):
        pieces = [gradient.indices, gradient.values / factor]
        handle = start_group(Operation.ALLGATHER, gathered, pieces, tuple, name, process_set)

        def finish():
            indices, values = handles.synchronize(handle)
            divisor = process_set.size() if op is ReduceOp.AVERAGE else 1
            return Rows(indices, values * factor / divisor, gradient.shape)

        return finish

    def watch(self, parameter):
        def watcher(parameter):
            on_gradient = self.on_gradient()
            if on_gradient is not None:
                on_gradient(parameter)

        parameter.watchers.append(watcher)
        return lambda: parameter.watchers.remove(watcher)
