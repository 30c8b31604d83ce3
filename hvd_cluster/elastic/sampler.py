"""The samples of an epoch that a rank sees, also when the number of ranks changes in the middle of it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence, Sized
from itertools import cycle, islice
from typing import Any

from hvd_cluster import basics

__all__ = ["ElasticPartition"]


class ElasticPartition:
    """Partitions the indices of ``dataset`` among all ranks, and remembers which of them have been processed.

    Call :meth:`set_epoch` at the end of each epoch, and :meth:`record_batch` after each batch. When the number of ranks
    has changed, :meth:`reset` or :meth:`load_state_dict` partitions the rest of the epoch among the current ranks: each
    of these samples is seen once, except for samples that are repeated to give every rank equally many. The
    order depends on ``seed`` and the epoch alone; ``shuffle=False`` keeps that of the dataset. Make it after
    ``init()``, or NotInitializedError is raised.

    Attributes: ``epoch``; ``processed_num``, how many samples all ranks together have processed of it. As of the last
    reset: ``num_replicas`` and ``rank``; ``remaining_indices``, the samples that were left; ``num_samples``, how many
    each rank gets of them; ``total_size``, how many all get.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self._kept: tuple[tuple[int, bool, int, int], list[int]] | None = None
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Start ``epoch``, with another order and nothing processed."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Every rank has processed a batch of ``batch_size`` samples; ``batch_idx`` is not needed."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """How far the epoch is; the same on all ranks."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was called, perhaps with another number of ranks."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Partition the rest of the epoch among the current ranks."""
        self.num_replicas = basics.size()
        self.rank = basics.rank()
        self.remaining_indices = self._order()[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    @property
    def processed_indices(self) -> set[int]:
        """The samples that have been processed of this epoch."""
        return set(self._order()[: self.processed_num])

    def __iter__(self) -> Iterator[int]:
        return iter(_share(self.remaining_indices, self.rank, self.num_replicas))

    def __len__(self) -> int:
        return self.num_samples

    def _order(self) -> list[int]:
        """That of the last call is kept: shuffling takes long, and a change of ranks should not."""
        key = (len(self.dataset), self.shuffle, self.seed, self.epoch)
        if self._kept is None or self._kept[0] != key:
            self._kept = key, _shuffled(*key)
        return self._kept[1]


def _shuffled(length: int, shuffle: bool, seed: int, epoch: int) -> list[int]:
    indices = list(range(length))
    if shuffle:
        random.Random(seed + epoch).shuffle(indices)
    return indices


def _share(indices: Sequence[int], rank: int, size: int) -> list[int]:
    """Every ``size``-th index from ``rank`` on, of the indices and as many repeated ones as make the shares equal."""
    total = math.ceil(len(indices) / size) * size
    return list(islice(cycle(indices), total))[rank::size]
