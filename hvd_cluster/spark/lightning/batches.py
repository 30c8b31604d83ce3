"""Rows of a shard -> the batches of a LightningModule: dictionaries of tensors by the names of columns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from collectives import override
from hvd_cluster.ops.objects import allgather_object
from hvd_cluster.spark.estimators.columns import key_of
from hvd_cluster.spark.estimators.history import require_rows, with_all_ranks
from hvd_cluster.spark.torch.batches import BatchLayout
from hvd_cluster.spark.torch.training import any_batch

Batch: TypeAlias = "dict[Any, torch.Tensor]"
Form: TypeAlias = "dict[Any, tuple[torch.dtype, tuple[int, ...]]]"
"""The dtype and the shape of a row of each tensor of a batch."""


class NamedLayout(BatchLayout):
    """The tensors of a batch by name: that of a column, or a tuple of names where several columns make a tensor."""

    def batch(self, rows: Sequence[Any], dtype: torch.dtype) -> Batch:
        """All tensors of the rows, also those that the transformation has added.

        Features are floats of ``dtype``, of shape (rows, elements) or as ``input_shapes`` says. Labels that are floats
        have ``dtype``, and integers are int64. A label of one column with one number in a row has the shape (rows,),
        and so have weights. Raises ValueError as :meth:`tensors`.
        """
        inputs, labels, named = self.shaped(rows, dtype)
        found = dict(named)
        found |= zip(map(key_of, self.features), inputs, strict=True)
        found |= zip(map(key_of, self.labels), (self._label(each, dtype) for each in labels), strict=True)
        if self.label_shapes is None:
            for name in self.labels:
                label = found[key_of(name)]
                if isinstance(name, str) and label.dim() == 2 and label.shape[1] == 1:
                    found[name] = label.reshape(-1)
        return found | {self.weight: named[self.weight].to(dtype).reshape(-1)} if self.weight else found

    @staticmethod
    def _label(label: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if label.is_floating_point():
            return label.to(dtype)
        return label if label.dtype is torch.bool else label.long()


class NamedBatches:
    """Each iteration is an epoch of ``shard``, of at most ``limit`` batches. All ranks begin an epoch together.

    A rank without rows has one batch in an epoch, so that it goes the same way through the loops of Lightning as the
    others: zeros that look like their batches. With ``together``, all ranks have as many batches as the rank with the
    most. Then :attr:`is_filler` is true. Raises ValueError, on all ranks, where none has rows.
    """

    def __init__(
        self, shard: Any, layout: NamedLayout, dtype: torch.dtype, limit: int | None, together: bool = False
    ) -> None:
        self._shard = shard
        self._layout = layout
        self._dtype = dtype
        self._limit = limit
        self._most: int | None = None
        self.together = together
        self.own = 0
        self.is_filler = False
        self.ranks_with_rows: list[int] = []

    @property
    def weight(self) -> float:
        """How much the loss of the present batch counts among the ranks."""
        return 1.0

    def most(self) -> int:
        """The number of batches in an epoch of the rank with the most. All ranks make the first call together.

        It waits until the last row has arrived.
        """
        if self._most is None:
            own = -(-self._shard.rows // self._shard.batch_size)
            self._most = max(allgather_object(min(own, self._limit or own), "lightning.batches"))
        return self._most

    def begin(self, batch_idx: int) -> None:
        """Training begins with the batch of this number; Lightning has fetched the next one already."""
        self.is_filler = batch_idx >= self.own

    def end(self) -> None:
        """The batch is done: what comes until the next one, such as a validation, has rows."""
        self.is_filler = False

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the next epoch; :attr:`own` counts those with rows of this rank."""
        batches = self._batches()
        first, forms = with_all_ranks(
            lambda: next(batches, None),
            lambda batch: None if batch is None else form_of(batch),
            "lightning.first_batch",
        )
        known = {rank: form for rank, form in enumerate(forms) if form is not None}
        self.ranks_with_rows = list(known)
        require_rows(bool(known))
        self.own = 0
        form = known[self.ranks_with_rows[0]]
        yield self._counted(first, form)
        batch = next(batches, None)
        while any_batch(batch) if self.together else batch is not None:
            yield self._counted(batch, form)
            batch = next(batches, None)

    def _counted(self, batch: Batch | None, form: Form) -> Batch:
        self.own += batch is not None
        return filler(form) if batch is None else batch

    def _batches(self) -> Iterator[Batch]:
        return (self._layout.batch(rows, self._dtype) for rows in itertools.islice(self._shard.torch(), self._limit))


class ElasticBatches(NamedBatches):
    """The batches that are left of an epoch of an :class:`ElasticShard`; none unless :attr:`is_open`.

    All ranks have equally many. After its own batches, a rank has some whose :attr:`weight` is 0. Training says when it
    begins an epoch anew: :attr:`own` counts the batches with rows since then.
    """

    def __init__(self, shard: Any, layout: NamedLayout, dtype: torch.dtype) -> None:
        super().__init__(shard, layout, dtype, None, together=True)
        self.is_open = False

    @override
    def most(self) -> int:
        """Raises ValueError: ranks bring rows and take them away."""
        raise ValueError(
            "trainer.estimated_stepping_batches is asked for, but the number of steps is not known where workers come "
            "and go; use a schedule without an end, or one of epochs, or leave min_num_proc and max_num_proc out"
        )

    @property
    @override
    def weight(self) -> float:
        weight: float = self._shard.weight
        return weight

    @override
    def begin(self, batch_idx: int) -> None:
        self.is_filler = self.weight == 0

    @override
    def end(self) -> None:
        self.own += not self.is_filler
        super().end()

    @override
    def __iter__(self) -> Iterator[Batch]:
        return self._batches() if self.is_open else iter(())


class ValidationBatches(NamedBatches):
    """The same for rows that are kept apart: a rank without such rows has no batch."""

    def __iter__(self) -> Iterator[Batch]:
        """The batches, in their order."""
        return self._batches()


def form_of(batch: Mapping[Any, Any]) -> Form:
    """The dtypes and shapes of each batch, as of the one that is given."""
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    return {name: (tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in tensors.items()}


def filler(form: Form) -> Batch:
    """A row of zeros."""
    return {name: torch.zeros(1, *shape, dtype=dtype) for name, (dtype, shape) in form.items()}


def checked_rows(batch: Any) -> int:
    """:func:`rows_in`. Raises ValueError where ``batch`` has no tensor that says how many rows there are."""
    rows = rows_in(batch)
    if rows == 0:
        raise ValueError(
            f"a batch is a {type(batch).__name__} in which no tensor has rows; let hooks such as "
            "on_after_batch_transfer return a dictionary, a list or a tensor"
        )
    return rows


def rows_in(batch: Any) -> int:
    """The number of rows: that of the first tensor in ``batch``, which hooks of the module may have changed."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 0
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next(filter(None, map(rows_in, parts)), 0)
