"""Keras' variables as NumPy arrays: to keep them, to put them back, and to give them to all ranks. On every backend."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from operator import methodcaller
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from collectives import InvalidRequestError, MismatchError
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.gradients.targets import is_complete
from hvd_cluster.ops.arguments import with_variable
from hvd_cluster.ops.arrays import broadcast_all

Array = npt.NDArray[Any]


def settle(model: Any) -> None:
    """Let the variables of ``model`` have their present values.

    Inside ``fit``, Keras' JAX trainer keeps them elsewhere, and reads the variables again before its next step.
    """
    sync = getattr(model, "jax_state_sync", None)
    if sync is not None:
        sync()


def require_variables(model: Any) -> None:
    """InvalidRequestError for a model whose variables Keras makes later."""
    if not is_complete(model):
        missing = "its layers are not built" if model.built else "it is not built"
        raise InvalidRequestError(
            f"the model {model.name!r} has no variables yet, or not all, because {missing}: call it on a batch first, "
            "such as model(x[:1]), or give it an Input. model.build() is not enough for a subclass of keras.Model "
            "without a build() of its own"
        )


def build_optimizer(model: Any) -> Any:
    """The optimizer of ``model``, with all its variables; None if there is none. Keras makes them in the first step."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    return optimizer


def require_variable(value: Any) -> Any:
    """``value``; InvalidRequestError if it is no variable of Keras."""
    if not isinstance(value, keras.Variable):
        raise InvalidRequestError(f"a {type(value).__name__} is not a keras.Variable; give one of model.variables")
    return value


def view(variable: Any) -> Array:
    """The values of ``variable``, in its own memory where that can be read: use them before it changes."""
    native = variable.value
    read = getattr(native, "read_value", None)  # of a tf.Variable
    array = as_array(native if read is None else read())
    return array.astype(np.dtype(variable.dtype), copy=False)  # Keras reads a bfloat16 of torch as float32


def as_array(tensor: Any) -> Array:
    """The values of a tensor of the backend, in its own memory where that can be read."""
    if hasattr(tensor, "detach"):  # of torch
        tensor = tensor.detach().cpu()
    for read in (memoryview, methodcaller("numpy"), keras.ops.convert_to_numpy):
        with suppress(AttributeError, TypeError, ValueError, BufferError, NotImplementedError):  # a GPU, a bfloat16
            return np.asarray(read(tensor))
    raise InvalidRequestError(
        f"a {type(tensor).__name__} has no values that can be read here; call this outside of functions that Keras or "
        "its backend traces"
    )


def copied(variable: Any, earlier: Array | None = None) -> Array:
    """A copy of the values of ``variable``, in the memory of the ``earlier`` one where that fits."""
    values = view(variable)
    if earlier is None or earlier.shape != values.shape or earlier.dtype != values.dtype:
        return np.array(values)
    np.copyto(earlier, values)
    return earlier


def put(variable: Any, array: Array) -> None:
    """Give ``variable`` the values of ``array``, which may be changed later: a framework keeps what it gets."""
    variable.assign(array.copy())


def description(variable: Any) -> str:
    """Its dtype and shape, as text."""
    return f"{variable.dtype} {tuple(variable.shape)}"


def broadcast(
    variables: Sequence[Any], root_rank: int, name: str, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite ``variables`` with those of the global rank ``root_rank``; they are matched by their position.

    HorovodInternalError when a rank is lost, or they differ in shape or dtype: then it has the path of the variable.
    """
    is_root = basics.rank() == root_rank
    arrays = [copied(variable) if is_root else _room_for(variable) for variable in variables]
    try:
        arrays = broadcast_all(arrays, root_rank, name, process_set)
    except MismatchError as error:
        raise with_variable(error, [variable.path for variable in variables]) from error.__cause__
    if not is_root:
        for variable, array in zip(variables, arrays, strict=True):
            put(variable, array)


def _room_for(variable: Any) -> Array:
    """Memory for its values, which may not be there: on JAX, a step that fails has deleted them."""
    return np.empty(tuple(variable.shape), np.dtype(variable.dtype))
