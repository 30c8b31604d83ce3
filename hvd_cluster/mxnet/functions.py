"""The same start on every rank: parameters from one rank to all; and objects of Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mxnet as mx

from collectives import InvalidRequestError
from hvd_cluster.comparison.meeting import matched, refusing_list
from hvd_cluster.core import basics, seeds
from hvd_cluster.core.process_sets import global_process_set
from hvd_cluster.mxnet.arrays import Array, NDArray
from hvd_cluster.mxnet.mpi_ops import broadcast_
from hvd_cluster.ops.objects import allgather_object, broadcast_object

__all__ = ["allgather_object", "broadcast_object", "broadcast_parameters", "set_seed"]

Parameter = mx.gluon.Parameter
PARAMETERS = (Mapping, getattr(mx.gluon, "ParameterDict", Mapping))  # MXNet 2 gives dicts
ADVICE = "give net.collect_params(), or a dict of names to Parameters or NDArrays"


def broadcast_parameters(params: Any, root_rank: int = 0, prefix: str | None = None) -> None:
    """Overwrite ``params`` in place with the parameters of the global rank ``root_rank``.

    A dict or ``ParameterDict`` of NDArrays or Parameters, such as ``net.collect_params()`` or the ``arg_params`` of a
    module. A Parameter whose shape is not known yet follows when the first forward initializes it, which is why all
    ranks run one. ``prefix`` goes before the names, for several calls at the same time. InvalidRequestError, a
    ValueError, for anything else; MismatchError, on all ranks, where these have different parameters.
    """
    with refusing_list("broadcast_parameters", global_process_set):
        entries = _entries(params)
    known = [(name, array) for name, value in entries if (array := _array_of(value)) is not None]
    if basics.size() == 1:
        return
    label = f"parameter.{prefix or ''}"
    for name, array in matched(known, "broadcast_parameters", global_process_set):
        broadcast_(array, root_rank, f"{label}{name}")
    for place, parameter in enumerate([value for _, value in entries if _array_of(value) is None]):
        _broadcast_later(parameter, root_rank, f"{label}deferred.{place}")


def _entries(params: Any) -> list[tuple[str, Any]]:
    if not isinstance(params, PARAMETERS):
        raise InvalidRequestError(f"params is a {type(params).__name__}; {ADVICE}")
    entries = sorted(((str(name), value) for name, value in params.items()), key=lambda entry: entry[0])
    for name, value in entries:
        if not isinstance(value, NDArray | Parameter):
            raise InvalidRequestError(f"params[{name!r}] is a {type(value).__name__}; {ADVICE}")
    return entries


def _array_of(value: Any) -> Array | None:
    """The array of a Parameter, or the NDArray itself; None where the shape is not known yet."""
    if not isinstance(value, Parameter):
        return value
    try:
        return value.data()
    except mx.gluon.parameter.DeferredInitializationError:
        return None


def _broadcast_later(parameter: Any, root_rank: int, name: str) -> None:
    """MXNet calls the private method of the parameter when its shape is known."""
    initialize = parameter._init_impl

    def initialize_alike(*args: Any, **kwargs: Any) -> None:
        del parameter._init_impl  # the method of the class is back
        initialize(*args, **kwargs)
        broadcast_(parameter.data(), root_rank, name)

    parameter._init_impl = initialize_alike


def set_seed(seed: int, *, same: bool = False) -> int:
    """Seed ``random``, NumPy and MXNet, on all its devices. Returns the seed of this rank, below 2**32.

    Each rank gets another seed, made of ``seed`` and its rank, or ``seed`` itself if it is the ``same`` on all ranks. A
    run with the same seed and number of ranks draws the same numbers. Workers of a DataLoader that run keep their
    state. InvalidRequestError unless ``seed`` is an integer from 0 to 2**32 - 1, NotInitializedError before ``init()``,
    unless it is the ``same``.
    """
    return seeds.set_seed(seed, same, mx.random.seed)
