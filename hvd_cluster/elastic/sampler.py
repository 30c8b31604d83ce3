"""The samples of an epoch that a rank sees, also when the number of ranks changes in the middle of it."""

from __future__ import annotations

import logging
import math
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from itertools import cycle, islice
from typing import Any, TypeAlias

from hvd_cluster.core import basics

logger = logging.getLogger(__name__)

Numbers: TypeAlias = tuple[int, int]
"""The rank of a process, and the number of ranks."""


class Samplers:
    """The samplers of this process that divide samples among the ranks, as long as they live."""

    def __init__(self) -> None:
        self._known: tuple[tuple[weakref.ref[Any], Callable[[Any, Numbers], None]], ...] = ()
        self._lock = threading.Lock()  # Owner: the thread that adds a sampler, for a few instructions.

    def add(self, sampler: Any, adapt: Callable[[Any, Numbers], None]) -> None:
        """Call ``adapt(sampler, before)`` in each new world; ``before`` are the numbers of the last one."""
        with self._lock:
            alive = [pair for pair in self._known if pair[0]() is not None]
            self._known = (*alive, (weakref.ref(sampler), adapt))

    def begin_world(self, before: Numbers) -> None:
        """This process is in another world than that in which it had the numbers ``before``."""
        for reference, adapt in self._known:
            sampler = reference()
            if sampler is not None:
                adapt(sampler, before)


samplers = Samplers()
"""Those of this process: ranks whose samplers count other ranks would make different numbers of steps."""


class ElasticPartition:
    """Partitions the indices of ``dataset`` among all ranks, and remembers which of them have been processed.

    Give it to the state, so that all ranks know how far the epoch is. Without that, it begins the epoch anew when the
    ranks change. Call :meth:`set_epoch` at the end of each epoch, and :meth:`record_batch` after each batch. When the
    number of ranks has changed, :meth:`reset` or :meth:`load_state_dict` partitions the rest of the epoch among the
    current ranks: each of these samples is seen once, except for samples that are repeated to give every rank equally
    many. The order depends on ``seed`` and the epoch alone; ``shuffle=False`` keeps that of the dataset. Make it after
    ``init()``, or NotInitializedError is raised.

    Attributes: ``epoch``; ``processed_num``, how many samples all ranks together have processed of it. As of the last
    reset: ``num_replicas`` and ``rank``; ``remaining_indices``, the samples that were left; ``num_samples``, how many
    each rank gets of them; ``total_size``, how many all get. ``is_in_state``: whether a state keeps it.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.is_in_state = False
        self._kept: tuple[tuple[int, bool, int, int], list[int]] | None = None
        self.reset()
        samplers.add(self, ElasticPartition._begin_world)

    def _begin_world(self, before: Numbers) -> None:
        """Where no state has this sampler: newcomers know nothing of it, and survivors of a loss may differ."""
        if self.is_in_state:
            return
        if self.processed_num:
            logger.warning(
                "the ranks have changed, and an ElasticSampler that is in no state forgets the %d samples that it has "
                "recorded in epoch %d, on all ranks; give it to the state, as in TorchState(model, optimizer, "
                "sampler=sampler)",
                self.processed_num,
                self.epoch,
            )
        self.processed_num = 0
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
