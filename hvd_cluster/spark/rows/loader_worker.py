"""The rules between a shard and torch's ``DataLoader``; this module never imports torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
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
    return list(map(sys.modules["torch.utils.data"].default_convert, arrays))
