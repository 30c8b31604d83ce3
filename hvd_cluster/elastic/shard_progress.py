"""The place in an epoch of data in shards, one for each rank; a shard may go from one rank to another."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from collectives import InvalidRequestError
from hvd_cluster.core import basics
from hvd_cluster.ops.objects import allgather_object

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DataShard:
    """A part of the data: its number, how many samples it has, and a digest of them in their order."""

    number: int
    samples: int
    digest: int

    def batches(self, size: int) -> int:
        """How many batches of ``size`` samples it has; the last one may have fewer."""
        return -(-self.samples // size)


def shares(shards: Sequence[DataShard]) -> list[DataShard]:
    """The shard that each rank trains: its own, but of ranks with the same one only the first trains it."""
    numbers = [shard.number for shard in shards]
    return [
        shard if numbers.index(shard.number) == rank else replace(shard, samples=0) for rank, shard in enumerate(shards)
    ]


class ShardProgress:
    """How many batches of each shard have been trained in the present epoch. All ranks have the same.

    Each step takes one batch of every shard that a rank has. An epoch ends when no rank has a batch left. The rest of
    a shard without a rank is not trained in this epoch, unless a rank with it comes before the end.

    Attributes: ``epoch``, and ``step``, the number of the next step in it.
    """

    def __init__(self, own: DataShard, batch_size: int) -> None:
        self.epoch = 0
        self.step = 0
        self._own = own
        self._batch_size = batch_size
        self._shares: list[DataShard] = []
        self._trained: dict[int, tuple[int, int]] = {}  # by the number of a shard: its digest, and the batches

    def meet(self) -> int:
        """Tell the other ranks which shard this one has; the number of steps that are left in the epoch.

        All ranks call it, when they have one state. A shard whose samples are others than before, or in another
        order, begins anew. Raises ValueError if no rank has a sample.
        """
        self._shares = shares([DataShard(**each) for each in allgather_object(asdict(self._own), "portions")])
        if not any(share.samples for share in self._shares):
            raise ValueError(
                f"the {len(self._shares)} ranks that are there have no rows to train with; let there be fewer ranks "
                "at most, so that each has some"
            )
        for share in self._shares:
            if share.samples:
                self._check(share)
        left = max(self.left)
        if left == 0:  # the ranks with the rest of this epoch have gone
            self.end_epoch()
        return left

    def _check(self, share: DataShard) -> None:
        digest, batches = self._trained.get(share.number, (share.digest, 0))
        if digest != share.digest:
            if batches and share.number == self._own.number:
                logger.warning(
                    "the rows of partition %d are others, or in another order, than before its task was lost; the %d "
                    "batches of them that were trained in epoch %d are trained again",
                    share.number,
                    batches,
                    self.epoch,
                )
            self._trained[share.number] = share.digest, 0

    def _left(self, share: DataShard) -> int:
        return share.batches(self._batch_size) - self._first(share) if share.samples else 0

    def _first(self, share: DataShard) -> int:
        return self._trained.get(share.number, (0, 0))[1]

    @property
    def left(self) -> list[int]:
        """How many batches of its own each rank has in the rest of the epoch."""
        return list(map(self._left, self._shares))

    @property
    def own(self) -> tuple[int, int]:
        """The number of the first batch of this rank in the rest of the epoch, and how many are left to it."""
        share = self._shares[basics.rank()]
        return self._first(share), self._left(share)

    def _count(self, share: DataShard) -> int:
        """How many samples of ``share`` the present step takes."""
        return max(0, min(self._batch_size, share.samples - self._first(share) * self._batch_size))

    @property
    def weight(self) -> float:
        """The weight of the loss of this rank in the present step: 1 where all ranks have equally many samples."""
        counts = list(map(self._count, self._shares))
        return counts[basics.rank()] * len(counts) / sum(counts)

    def weigh(self, loss: T) -> T:
        """``loss``, a mean over the rows of this rank in the present step, scaled by its weight among the ranks.

        So the average of the ranks' gradients is the gradient of the mean over all rows of the step.
        """
        mean: Any = loss
        scaled: T = mean * self.weight
        return scaled

    def advance(self) -> None:
        """The present step is done; after the last one of an epoch comes the first of the next.

        Raises InvalidRequestError before the first step.
        """
        if not self._shares:
            raise InvalidRequestError("advance() was called before a loop over the shard gave a batch")
        for share in self._shares:
            if self._left(share):
                self._trained[share.number] = share.digest, self._first(share) + 1
        self.step += 1
        if not any(map(self._left, self._shares)):
            self.end_epoch()

    def end_epoch(self) -> None:
        """The next step is the first one of the next epoch, also where batches are left. All ranks call it."""
        self.epoch, self.step, self._trained = self.epoch + 1, 0, {}

    def state_dict(self) -> dict[str, Any]:
        """How far the training is; the same on all ranks."""
        trained = [[number, *place] for number, place in self._trained.items()]
        return {"epoch": self.epoch, "step": self.step, "trained": trained}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was called, perhaps with other ranks and shards."""
        self.epoch, self.step = state_dict["epoch"], state_dict["step"]
        self._trained = {number: (digest, batches) for number, digest, batches in state_dict["trained"]}
