"""Python objects through collectives: cloudpickle, a length, then bytes. Shared by all bindings."""

from __future__ import annotations

from typing import Any, TypeVar

import cloudpickle
import numpy as np
import numpy.typing as npt

from collectives.api import Operation
from collectives.buffers import Buffer, as_buffer, empty
from hvd_cluster import basics
from hvd_cluster.operations import start
from hvd_cluster.process_sets import ProcessSet, global_process_set

__all__ = ["allgather_object", "broadcast_object"]

T = TypeVar("T")


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """``obj`` of the global rank ``root_rank``, on every member; what the others give is ignored.

    Needs objects that cloudpickle takes; only ranks of this job are listened to. Raises HorovodInternalError when a
    rank is lost.
    """
    is_root = basics.rank() == root_rank
    data = np.frombuffer(cloudpickle.dumps(obj), np.uint8).copy() if is_root else np.empty(0, np.uint8)
    length = _broadcast(np.array([data.size], np.int64), root_rank, _part(name, "sz"), process_set)
    if not is_root:
        data = np.empty(int(length[0]), np.uint8)
    received = _broadcast(data, root_rank, _part(name, "t"), process_set)
    return obj if is_root else cloudpickle.loads(received.tobytes())


def _part(name: str | None, part: str) -> str | None:
    return None if name is None else f"{name}.{part}"


def _broadcast(array: npt.NDArray[Any], root_rank: int, name: str | None, process_set: ProcessSet) -> npt.NDArray[Any]:
    buffer = as_buffer(array)
    start(Operation.BROADCAST, buffer, buffer, name, process_set, wait=True, root_rank=root_rank)
    return array


def allgather_object(obj: T, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[T]:
    """The objects of all members, in rank order. Raises what :func:`broadcast_object` raises."""
    data = np.frombuffer(cloudpickle.dumps(obj), np.uint8).copy()
    lengths = _allgather(np.array([data.size], np.int64), _part(name, "sz"), process_set)
    gathered = _allgather(data, _part(name, "t"), process_set)
    ends = np.cumsum(lengths)
    return [cloudpickle.loads(piece.tobytes()) for piece in np.split(gathered, ends[:-1])]


def _allgather(array: npt.NDArray[Any], name: str | None, process_set: ProcessSet) -> npt.NDArray[Any]:
    source = as_buffer(array)

    def allocate(shape: tuple[int, ...]) -> Buffer:
        return empty(source.dtype, shape)

    work = start(Operation.ALLGATHER, source, allocate, name, process_set, wait=True)
    result: npt.NDArray[Any] = work.result().owner
    return result
