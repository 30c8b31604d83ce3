"""Rows in the workers of torch's ``DataLoader``: the rules between a shard and a loader, and the number of an epoch."""

from __future__ import annotations

import fcntl
import os
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import context, reduction
from typing import Any


class RowBatch(tuple[Any, ...]):
    """Features, labels and perhaps weights, of a type that a ``DataLoader`` can recognize."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class LoaderWorker:
    """The process that iterates: worker ``number`` of ``count`` of a ``DataLoader``, or the only one.

    Workers of one ``DataLoader`` have the same ``key`` in an epoch; every other iterating process has its own key.
    """

    number: int
    count: int
    key: int


def current_worker() -> LoaderWorker:
    """This process."""
    data = sys.modules.get("torch.utils.data")
    info = data.get_worker_info() if data else None
    if info is None:
        return LoaderWorker(0, 1, int.from_bytes(os.urandom(8), "little"))
    return LoaderWorker(info.id, info.num_workers, (info.seed - info.id) % 2**64)


def introduce(shard_type: type) -> None:
    """If torch is imported: make ``shard_type`` an ``IterableDataset``, and let batches pass a ``DataLoader`` whole."""
    data = sys.modules.get("torch.utils.data")
    if data is None or issubclass(shard_type, data.IterableDataset):
        return
    data.IterableDataset.register(shard_type)
    sys.modules["torch.utils.data._utils.collate"].default_collate_fn_map[RowBatch] = _collate


def _collate(batches: list[RowBatch], *, collate_fn_map: Any = None) -> Any:
    """The result of ``default_collate`` for ``batches``, which must be a single batch."""
    if len(batches) != 1:
        raise ValueError(
            f"DataLoader was asked for batches of {len(batches)} elements, but a shard already gives batches: give "
            "batch_size to run_on_dataframe, and leave it out of DataLoader, or make it None"
        )
    return RowBatch(_converted(batches[0]))


def _converted(arrays: Iterable[Any]) -> list[Any]:
    return [_as_torch(array) for array in arrays]


def _as_torch(value: Any) -> Any:
    """Tensors for an array, or for a tuple of arrays; lists for strings, which may be lists already."""
    if isinstance(value, list):
        return value
    if isinstance(value, tuple):
        return [_as_torch(each) for each in value]
    if getattr(getattr(value, "dtype", None), "hasobject", False):
        return value.tolist()
    return sys.modules["torch.utils.data"].default_convert(value)


def sent(descriptors: Sequence[int]) -> list[Any]:
    """Objects to pickle instead of ``descriptors``; the started process passes them to :func:`received`.

    Raises TypeError if no process is being started.
    """
    if context.get_spawning_popen() is None:
        raise TypeError(
            "a shard cannot be pickled: its rows are in open files of this process; only processes that this one "
            "starts can share them, such as those of DataLoader(shard, num_workers=2)"
        )
    return [reduction.DupFd(descriptor) for descriptor in descriptors]


def received(descriptors: Sequence[Any]) -> list[int]:
    """The descriptors in this process, where they stay open until it ends."""
    return [descriptor.detach() for descriptor in descriptors]


RECORD = struct.Struct("=Qq")
Record = tuple[int, int]


class EpochLog:
    """Counts epochs in a file that the processes share: each iterator appends a record, and counts those before it.

    The workers of a ``DataLoader`` have the same key in an epoch, and so find the same number. An append is atomic, so
    there is no lock that a process could still hold when it is killed or forked.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (sent([self._descriptor]),)

    def begin(self, worker: LoaderWorker) -> int:
        """The number of the epoch, from 0, of an iterator that begins now in ``worker``."""
        os.write(self._descriptor, RECORD.pack(worker.key, worker.number))
        data = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)
        return epoch_of_last(list(RECORD.iter_unpack(data)), (worker.key, worker.number))


def epoch_of_last(records: Sequence[Record], own: Record) -> int:
    """The epoch of the last of the ``records`` that is equal to ``own``.

    A record is the key of a loader and the number of one of its workers. Workers that live for several epochs repeat
    their records: the first of each worker are one epoch, the second another.
    """
    epochs: dict[Record, int] = {}
    times: dict[Record, int] = {}
    for record in records:
        times[record] = times.get(record, 0) + 1
        epochs.setdefault((record[0], times[record]), len(epochs))
    return epochs[own[0], times[own]]


@contextmanager
def open_epoch_log() -> Iterator[EpochLog]:
    """A log without epochs, in memory that forked and started processes share."""
    descriptor = os.memfd_create("hvd-epochs")
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
        yield EpochLog(descriptor)
    finally:
        os.close(descriptor)


def _received(descriptors: Sequence[Any]) -> EpochLog:
    return EpochLog(*received(descriptors))
