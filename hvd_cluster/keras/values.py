"""Collectives of plain values, for code around ``model.fit``: numbers, lists and NumPy arrays.

In a function that TensorFlow traces, such as a ``train_step``, each is a node of the graph instead, and returns a
tensor, as those of :mod:`hvd_cluster.tensorflow` do. On JAX, UnsupportedRequestError there.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from collectives import Operation, ReduceOp
from hvd_cluster.core import seeds
from hvd_cluster.core.process_sets import global_process_set
from hvd_cluster.gradients.compression import NoneCompressor
from hvd_cluster.keras.backends import in_graph
from hvd_cluster.keras.variables import as_array, view
from hvd_cluster.ops.arguments import Average, reduction
from hvd_cluster.ops.arrays import gathered, in_place
from hvd_cluster.ops.submission import run

Array = npt.NDArray[Any]


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: Any = NoneCompressor,
) -> Any:
    """``value`` of all ranks combined, element by element; a NumPy array, or a scalar for a scalar.

    The arguments are those of :mod:`hvd_cluster.ops`.
    """
    graph = in_graph(value)
    if graph is not None:
        factors = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
        return graph.allreduce(value, average=average, op=op, compression=compression, name=name, **factors)
    how = reduction(average, op, prescale_factor, postscale_factor)
    tensor, context = compression.compress(value if compression is NoneCompressor else _tensor(value))
    array = _array(tensor)
    result = run(Operation.ALLREDUCE, in_place, array.reshape(-1).copy(), name, global_process_set, how)
    shaped = result.reshape(array.shape)
    if context is not None:
        shaped = _array(compression.decompress(_tensor(shaped), context))
    return shaped[()]


def allgather(value: Any, name: str | None = None) -> Any:
    """The arrays of all ranks, one after the other along the first dimension, in which alone they may differ."""
    graph = in_graph(value)
    if graph is not None:
        return graph.allgather(value, name=name)
    array: Array = run(Operation.ALLGATHER, gathered, _array(value), name, global_process_set)
    return array


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """``value`` of the rank ``root_rank``; the others give one of the same shape and dtype."""
    graph = in_graph(value)
    if graph is not None:
        return graph.broadcast(value, root_rank, name=name)
    array = _array(value)
    flat = array.reshape(-1).copy()
    run(Operation.BROADCAST, in_place, flat, name, global_process_set, root_rank=root_rank)
    return flat.reshape(array.shape)[()]


def reducescatter(value: Any, name: str | None = None, op: ReduceOp = Average) -> Any:
    """This rank's rows of the arrays of all ranks, combined; the first ranks have a row more if they do not divide."""
    graph = in_graph(value)
    if graph is not None:
        return graph.reducescatter(value, op=op, name=name)
    how = reduction(None, op)
    array: Array = run(Operation.REDUCESCATTER, gathered, _array(value), name, global_process_set, how)
    return array


def _array(value: Any) -> Array:
    """Contiguous; 0-d for a number."""
    if isinstance(value, keras.Variable):
        return view(value)
    return np.asarray(as_array(value) if keras.ops.is_tensor(value) else value, order="C")


def _tensor(value: Any) -> Any:
    return keras.ops.convert_to_tensor(value)


def set_seed(seed: int, *, same: bool = False) -> int:
    """Seed ``random``, NumPy, Keras and the framework below it. Returns the seed of this rank, below 2**32.

    Each rank gets another seed, made of ``seed`` and its rank, or ``seed`` itself if it is the ``same`` on all ranks. A
    run with the same seed and number of ranks draws the same numbers. Call it before layers are made: dropout and other
    layers with a ``SeedGenerator`` take their seed then. Generators and workers that exist keep their state.
    InvalidRequestError unless ``seed`` is an integer from 0 to 2**32 - 1, NotInitializedError before ``init()``, unless
    it is the ``same``.
    """
    return seeds.set_seed(seed, same, keras.utils.set_random_seed)
