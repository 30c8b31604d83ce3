"""Python objects through collectives: cloudpickle, a header, then bytes. Shared by all bindings.

The header is the number of bytes, whether they are an object or the text of an error, and the rank. A rank that cannot
pickle its object sends the reason, because the others already wait for it.
"""

from __future__ import annotations

import io
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import cloudpickle
import numpy as np
import numpy.typing as npt

from collectives import InvalidRequestError, Operation, as_buffer
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.ops.arrays import gathered
from hvd_cluster.ops.submission import run, submit

T = TypeVar("T")

HEADER_BYTES = 24


class _Parcel(NamedTuple):
    """The message of a rank, with room for its header: a pickled object, or the reason why it could not be pickled."""

    message: npt.NDArray[np.uint8]
    failed: bool = False

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        return self.message[HEADER_BYTES:]

    @property
    def header(self) -> npt.NDArray[np.int64]:
        return np.array([self.data.size, self.failed, basics.rank()], np.int64)

    def with_header(self) -> npt.NDArray[np.uint8]:
        """The whole message, complete."""
        self.message[:HEADER_BYTES] = self.header.view(np.uint8)
        return self.message


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """``obj`` of the global rank ``root_rank``, on every member; the objects of the others are ignored.

    cloudpickle must be able to pickle the object. Data comes only from ranks of this job. The pickle needs memory in
    addition to the object. A newcomer of an elastic job gets its own object, because it reaches no other rank yet.
    Raises InvalidRequestError on every member if the object cannot be pickled, and on each member that cannot unpickle
    it; HorovodInternalError when a rank is lost.
    """
    worlds = basics.worlds()
    is_root = basics.rank() == root_rank or (worlds is not None and worlds.is_alone)
    parcel = _pickle(obj) if is_root else _Parcel(np.empty(HEADER_BYTES, np.uint8))
    length, failed, _ = _broadcast(parcel.header, root_rank, _suffixed(name, "sz"), process_set).tolist()
    data = parcel.data if is_root else np.empty(length, np.uint8)
    _broadcast(data, root_rank, _suffixed(name, "t"), process_set)
    if failed:
        raise _not_pickled(root_rank, data)
    return obj if is_root else _unpickle(data, root_rank)


def _pickle(obj: object) -> _Parcel:
    file = io.BytesIO(bytes(HEADER_BYTES))  # its memory is sent as it is, with no copy
    file.seek(HEADER_BYTES)
    try:
        cloudpickle.dump(obj, file)
    except Exception as error:  # noqa: BLE001  pickling runs code of the user
        text = f"an object of type {type(obj).__name__} cannot be pickled ({described(error)})"
        message = bytearray(HEADER_BYTES) + text.encode(errors="replace")
        return _Parcel(np.frombuffer(message, np.uint8), failed=True)
    return _Parcel(np.frombuffer(file.getbuffer(), np.uint8))


def _unpickle(data: npt.NDArray[np.uint8], rank: int) -> Any:
    try:
        return cloudpickle.loads(data)
    except Exception as error:
        raise InvalidRequestError(
            f"the object of rank {rank} cannot be unpickled on rank {basics.rank()} ({described(error)}); its classes "
            "must be there on all ranks"
        ) from error


def described(error: Exception) -> str:
    """Class and text of ``error``, even if ``str()`` of it fails."""
    return traceback.format_exception_only(error)[0].strip()


def _not_pickled(rank: int, text: npt.NDArray[np.uint8]) -> InvalidRequestError:
    return InvalidRequestError(
        f"rank {rank}: {text.tobytes().decode()}; send plain data, and make locks, files and connections where they "
        "are used"
    )


def _suffixed(name: str | None, suffix: str) -> str | None:
    return None if name is None else f"{name}.{suffix}"


def _broadcast(array: npt.NDArray[Any], root_rank: int, name: str | None, process_set: ProcessSet) -> npt.NDArray[Any]:
    buffer = as_buffer(array)
    submit(Operation.BROADCAST, buffer, buffer, name, process_set, wait=True, root_rank=root_rank)
    return array


def allgather_object(obj: T, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[T]:
    """The objects of all members that have not joined, in rank order. Raises as :func:`broadcast_object`."""
    messages = _allgather(_pickle(obj).with_header(), _suffixed(name, "t"), process_set)
    headers, pieces = [], []
    while messages.size:
        headers.append(messages[:HEADER_BYTES].view(np.int64).tolist())
        end = HEADER_BYTES + headers[-1][0]
        pieces.append(messages[HEADER_BYTES:end])
        messages = messages[end:]
    return _unpacked(headers, pieces)


def gather_object(
    obj: T, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[T] | None:
    """The objects of all members, in rank order, on the global rank ``root_rank``; None on the others.

    Raises as :func:`broadcast_object`, and InvalidRequestError unless the root is a member.
    """
    ranks = process_set.ranks or []
    if root_rank not in ranks:
        raise InvalidRequestError(f"root_rank={root_rank} is not one of the ranks {ranks}; give one of them")
    parcel, others = _pickle(obj), _suffixed(name, "t")
    headers = _allgather(parcel.header, _suffixed(name, "sz"), process_set).reshape(-1, 3).tolist()
    splits = tuple(parcel.data.size if rank == root_rank else 0 for rank in ranks)
    data = run(Operation.ALLTOALL, gathered, parcel.data, others, process_set, splits=splits)
    if basics.rank() == root_rank:
        return _unpacked(headers, np.split(data, np.cumsum([size for size, _, _ in headers[:-1]])))
    for _, failed, rank in headers:
        if failed:
            raise InvalidRequestError(f"rank {rank} cannot pickle its object; rank {root_rank} says why")
    return None


def _unpacked(headers: Sequence[Sequence[int]], pieces: Sequence[npt.NDArray[np.uint8]]) -> list[Any]:
    """The objects of all members: ``headers`` and ``pieces`` are those of their messages."""
    for (_, failed, rank), piece in zip(headers, pieces, strict=True):
        if failed:
            raise _not_pickled(rank, piece)
    return [_unpickle(piece, rank) for (_, _, rank), piece in zip(headers, pieces, strict=True)]


def _allgather(array: npt.NDArray[Any], name: str | None, process_set: ProcessSet) -> npt.NDArray[Any]:
    result: npt.NDArray[Any] = run(Operation.ALLGATHER, gathered, array, name, process_set)
    return result
