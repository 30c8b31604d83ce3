"""The same start on every rank: the variables of a model and its optimizer from one rank to all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from collectives import InvalidRequestError, ReduceOp
from hvd_cluster.comparison.meeting import require_same
from hvd_cluster.comparison.twins import model_of
from hvd_cluster.core.process_sets import global_process_set
from hvd_cluster.gradients.targets import is_complete
from hvd_cluster.keras.values import allreduce
from hvd_cluster.keras.variables import (
    broadcast,
    build_optimizer,
    require_variable,
    require_variables,
    settle,
)


def broadcast_model(model: keras.Model, root_rank: int, local_variables: Sequence[Any] = ()) -> None:
    """Give ``model`` and its optimizer, if it has one, the variables of the global rank ``root_rank``.

    All ranks call it when both are built. ``local_variables`` stay as they are, and so do the variables of metrics, and
    the seeds of layers such as Dropout: ranks drop other units.
    Variables are matched by position. MismatchError on all ranks, before anything is sent, where the ranks' variables
    differ in shape or dtype: it names the first one. HorovodInternalError when a rank is lost. InvalidRequestError
    for a model whose variables Keras makes later.
    """
    require_variables(model)
    settle(model)
    left_out = {id(variable) for variable in local_variables}
    optimizer = getattr(model, "optimizer", None)
    found = [*model.weights, *(() if optimizer is None else optimizer.variables)]
    shared = [each for each in found if id(each) not in left_out]
    require_same(model_of(shared), "broadcast_model", global_process_set)
    broadcast(shared, root_rank, "keras.variables")


def broadcast_global_variables(root_rank: int, model: keras.Model | None = None) -> None:
    """As :func:`broadcast_model`. Keras 3 has no list of all variables, so it needs the ``model``: InvalidRequestError
    without it.
    """
    if model is None:
        raise InvalidRequestError(
            "Keras 3 keeps no list of global variables; give the model: broadcast_global_variables(0, model), or use "
            "BroadcastGlobalVariablesCallback"
        )
    broadcast_model(model, root_rank)


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Gives all ranks the model and the optimizer of ``root_rank``, once: before the first batch, or after it if
    some variables of a rank are made there only.

    ``local_variables`` keep their values, and those that are registered. ``device`` is accepted for compatibility.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Sequence[Any] | None = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        self._local_variables: list[Any] = []
        for variable in local_variables or ():
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Let ``var`` keep its value. InvalidRequestError if it is no variable of Keras."""
        self._local_variables.append(require_variable(var))

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast, if all variables are there on all ranks."""
        if not self.broadcast_done and _is_on_all_ranks(is_complete(self.model)):
            build_optimizer(self.model)
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast, if that has not been done."""
        self._broadcast()

    def _broadcast(self) -> None:
        if not self.broadcast_done:
            broadcast_model(self.model, self.root_rank, self._local_variables)
            self.broadcast_done = True


def _is_on_all_ranks(flag: bool) -> bool:
    """A rank may have loaded a model that others build in their first batch."""
    return bool(allreduce(int(flag), name="keras.variables.complete", op=ReduceOp.MIN))
