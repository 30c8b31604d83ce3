"""The comparison before a call that sends several tensors, such as the broadcast of a model's parameters."""

from __future__ import annotations

import numpy as np

from collectives.api import InvalidRequestError, MismatchError, Operation
from hvd_cluster import basics
from hvd_cluster.comparison.models import Model, Names, difference
from hvd_cluster.objects import allgather_object
from hvd_cluster.operations.arrays import gathered
from hvd_cluster.operations.operands import run
from hvd_cluster.operations.refusals import refuse
from hvd_cluster.process_sets import ProcessSet

__all__ = ["refuse_list", "require_same"]


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


def refuse_list(error: InvalidRequestError, call: str, process_set: ProcessSet) -> None:
    """This rank has refused ``call`` before :func:`require_same`: it ends with an error on the other ranks, too."""
    if basics.is_initialized():
        refuse(error, Operation.ALLGATHER, call, process_set, None)
