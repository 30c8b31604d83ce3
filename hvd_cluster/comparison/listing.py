"""The comparison before a call that sends several tensors, such as the broadcast of a model's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np

from collectives.api import MismatchError, Operation
from hvd_cluster import basics
from hvd_cluster.comparison.models import Model, Names, difference, entry_of
from hvd_cluster.objects import allgather_object
from hvd_cluster.operations.arrays import gathered
from hvd_cluster.operations.operands import run
from hvd_cluster.operations.refusals import refusing
from hvd_cluster.process_sets import ProcessSet

__all__ = ["matched", "refusing_list", "require_same"]

T = TypeVar("T")


def require_same(model: Model, call: str, process_set: ProcessSet) -> Names:
    """The names of the tensors of ``model`` for all ranks, which are those of the first rank.

    MismatchError on all ranks where their models differ; it names the first difference. ``call`` is the name of the
    function.
    """
    row = np.array([[basics.rank(), model.digest]], np.int64)
    rows = run(Operation.ALLGATHER, gathered, row, call, process_set)
    if len(set(rows[:, 1].tolist())) == 1:
        return model.names
    models = dict(allgather_object((basics.rank(), model), f"{call}.lists", process_set))
    error = difference(models)
    if error is not None:
        raise MismatchError(f"{call}: the tensors of the ranks differ: {error}")
    return models[min(models)].names


def refusing_list(call: str, process_set: ProcessSet) -> AbstractContextManager[None]:
    """Around what comes before :func:`require_same`: if this rank refuses ``call``, it also fails on the others."""
    return refusing(Operation.ALLGATHER, call, process_set)


def matched(tensors: Sequence[tuple[Any, T]], call: str, process_set: ProcessSet) -> list[tuple[str, T]]:
    """``tensors`` in the order in which all ranks give them, with the names for all ranks; raises as above.

    They come with their names, by which they are matched, or with numbers, their positions.
    """
    is_named = all(isinstance(name, str) for name, _ in tensors)
    ordered = sorted(tensors, key=itemgetter(0)) if is_named else tensors
    model = Model(tuple(entry_of(str(name), tensor) for name, tensor in ordered))
    names = require_same(model, call, process_set)
    return [(name, tensor) for name, (_, tensor) in zip(names, ordered, strict=True)]
