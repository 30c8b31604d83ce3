"""Python objects through collectives: cloudpickle, a header, then bytes. Shared by all bindings.

The header is the number of bytes, and whether they are an object or the text of why there is none: a rank that cannot
pickle its object says so, because the others already wait for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import cloudpickle
import numpy as np
import numpy.typing as npt

from collectives.api import InvalidRequestError, Operation
from collectives.buffers import Buffer, as_buffer, empty
from hvd_cluster import basics
from hvd_cluster.operations import start
from hvd_cluster.process_sets import ProcessSet, global_process_set

__all__ = ["allgather_object", "broadcast_object"]

T = TypeVar("T")


class _Parcel(NamedTuple):
    """What a rank sends: an object that was pickled, or the reason why it was not."""

    data: npt.NDArray[np.uint8]
    failed: bool = False

    @property
    def header(self) -> npt.NDArray[np.int64]:
        return np.array([self.data.size, self.failed], np.int64)


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """``obj`` of the global rank ``root_rank``, on every member; what the others give is ignored.

    Needs objects that cloudpickle takes; only ranks of this job are listened to. Raises InvalidRequestError, on every
    member, when the object cannot be pickled, and HorovodInternalError when a rank is lost.
    """
    is_root = basics.rank() == root_rank
    parcel = _pickle(obj) if is_root else _Parcel(np.empty(0, np.uint8))
    length, failed = _broadcast(parcel.header, root_rank, _part(name, "sz"), process_set).tolist()
    data = parcel.data if is_root else np.empty(length, np.uint8)
    _broadcast(data, root_rank, _part(name, "t"), process_set)
    if failed:
        raise _not_pickled(root_rank, data)
    return obj if is_root else cloudpickle.loads(data.tobytes())


def _pickle(obj: object) -> _Parcel:
    try:
        return _Parcel(_as_array(cloudpickle.dumps(obj)))
    except Exception as error:  # noqa: BLE001  pickling runs code of the user
        text = f"an object of type {type(obj).__name__} cannot be pickled ({type(error).__name__}: {error})"
        return _Parcel(_as_array(text.encode("utf-8", "replace")), failed=True)


def _as_array(data: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8).copy()


def _not_pickled(rank: int, text: npt.NDArray[np.uint8]) -> InvalidRequestError:
    return InvalidRequestError(
        f"rank {rank}: {text.tobytes().decode()}; send plain data, and make locks, files and connections where they "
        "are used"
    )


def _part(name: str | None, part: str) -> str | None:
    return None if name is None else f"{name}.{part}"


def _broadcast(array: npt.NDArray[Any], root_rank: int, name: str | None, process_set: ProcessSet) -> npt.NDArray[Any]:
    buffer = as_buffer(array)
    start(Operation.BROADCAST, buffer, buffer, name, process_set, wait=True, root_rank=root_rank)
    return array


def allgather_object(obj: T, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[T]:
    """The objects of all members that have not joined, in rank order. Raises what :func:`broadcast_object` raises."""
    parcel = _pickle(obj)
    header = np.append(parcel.header, basics.rank())
    headers = _allgather(header, _part(name, "sz"), process_set).reshape(-1, 3)
    gathered = _allgather(parcel.data, _part(name, "t"), process_set)
    pieces = np.split(gathered, np.cumsum(headers[:-1, 0]))
    for (_, failed, rank), piece in zip(headers.tolist(), pieces, strict=True):
        if failed:
            raise _not_pickled(rank, piece)
    return [cloudpickle.loads(piece.tobytes()) for piece in pieces]


def _allgather(array: npt.NDArray[Any], name: str | None, process_set: ProcessSet) -> npt.NDArray[Any]:
    source = as_buffer(array)

    def allocate(shape: tuple[int, ...]) -> Buffer:
        return empty(source.dtype, shape)

    work = start(Operation.ALLGATHER, source, allocate, name, process_set, wait=True)
    result: npt.NDArray[Any] = work.result().owner
    return result
