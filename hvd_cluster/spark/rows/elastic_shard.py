"""The rows of one rank of a job whose ranks come and go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hvd_cluster.elastic.shard_progress import DataShard, ShardProgress
from hvd_cluster.ops.objects import allgather_object, broadcast_object
from hvd_cluster.spark.rows.batches import Shard


class ElasticShard(ShardProgress):
    """The rows of the task of this rank, in batches ``(features, labels)``, and the place in the epoch of all ranks.

    ::

        state = hvd.elastic.TorchState(model, optimizer, shard=shard)
        ...
        while shard.epoch < 10:
            for features, labels in shard.torch():
                loss = cross_entropy(model(features), labels)
                shard.weigh(loss).backward()
                optimizer.step()
                optimizer.zero_grad()
                shard.advance()
                state.commit()

    A loop gives the batches that are left of :attr:`epoch`, from :attr:`step` on, and is for the ranks of that moment:
    the function that ``hvd.elastic.run`` decorates begins another one when they have changed. All ranks begin it
    together, and get equally many batches. A rank that has no rows left gets its first rows, or zeros, which count
    nothing: :meth:`weigh` scales the loss, so that each row of a step counts the same on all ranks. The loss of zeros
    must be finite; strings beside them are those of a row of another rank. Batches are those of :class:`Shard`, but
    for the order: it is random in the same way in each epoch, and depends on ``seed``, epoch and partition, so that a
    successor goes on in it. Keep it in a ``TorchState``, also in one without a model; another state can have
    :meth:`state_dict`.

    A new worker waits for all of its rows before the function begins. Raises ExecutorError if Spark fails; ValueError
    if arrays have other sizes than on other ranks, or if there are no rows on any.
    """

    def __init__(self, shard: Shard, number: int) -> None:
        super().__init__(DataShard(number, shard.rows, shard.digest()), shard.batch_size)
        self._shard = shard

    @property
    def rows(self) -> int:
        """The number of rows of this rank's partition, for training."""
        return self._shard.rows

    @property
    def batch_size(self) -> int:
        """The rows of a batch."""
        return self._shard.batch_size

    @property
    def validation(self) -> Shard | None:
        """The rows of this rank's partition that are kept apart, see :attr:`Shard.validation`."""
        return self._shard.validation

    def feature_widths(self) -> tuple[int, ...]:
        """The number of elements of a row in each array of features; nothing if there are no rows."""
        return self._shard.feature_widths()

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """The batches of this rank for each step that is left in the epoch."""
        return self._steps(self._shard)

    def torch(self) -> TensorBatches:
        """The same batches as tensors of torch."""
        return TensorBatches(self, self._shard.torch())

    def tensorflow(self) -> TensorBatches:
        """The same batches as tensors of TensorFlow."""
        return TensorBatches(self, self._shard.tensorflow())

    def _steps(self, shard: Shard) -> Iterator[tuple[Any, ...]]:
        by_rank = allgather_object(shard.widths(), "portions.widths")
        widths, strings = agreed(by_rank), _strings_of_others(shard, by_rank)
        steps = self.meet()
        if steps:
            first, count = self.own
            yield from shard.rest(self.epoch, first) if count else ()
            for _ in range(steps - count):
                yield shard.filler(widths, strings)


class TensorBatches:
    """The batches of an :class:`ElasticShard`, as tensors."""

    def __init__(self, place: ElasticShard, shard: Shard) -> None:
        self._place = place
        self._shard = shard

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return self._place._steps(self._shard)


def _strings_of_others(shard: Shard, widths: list[tuple[int, ...]]) -> Sequence[Any]:
    """The strings of one row, where a rank has no rows: a function that decodes them could not read empty ones."""
    has_rows = list(map(any, widths))
    if not shard.has_strings or all(has_rows) or not any(has_rows):
        return ()
    return broadcast_object(shard.first_strings() if shard.rows else (), has_rows.index(True), "portions.strings")


def agreed(widths: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The numbers of elements of a row in each array, by rank; zeros on a rank without rows. Raises ValueError."""
    first = next((rank for rank, each in enumerate(widths) if any(each)), 0)
    for rank, each in enumerate(widths):
        if any(each) and each != widths[first]:
            raise ValueError(
                f"the arrays of a batch have {widths[first]} elements a row on rank {first}, but {each} on rank "
                f"{rank}; all rows must have the same number: cut the arrays, fill them up, or drop those of another "
                "size first"
            )
    return widths[first]
