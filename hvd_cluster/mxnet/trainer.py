"""DistributedTrainer, for Gluon."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import mxnet as mx

from collectives import InvalidRequestError, override
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.mxnet.functions import PARAMETERS
from hvd_cluster.mxnet.gradients import Compression, GradientExchange
from hvd_cluster.mxnet.optimizer import DistributedOptimizer


class DistributedTrainer(mx.gluon.Trainer):  # type: ignore[misc]
    """A ``gluon.Trainer`` that averages gradients over the ranks, in place, before each update.

    ``step(batch_size)`` gets the batch size of one rank. Between ``allreduce_grads()`` and ``update()`` the gradients
    are averages. One device a process. ``prefix`` tells the names of several trainers apart. The other arguments are
    as for DistributedOptimizer; there is no kvstore. InvalidRequestError, a ValueError, for a wrong argument.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: Mapping[str, Any] | None = None,
        compression: Any = Compression.none,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
        **others: Any,
    ) -> None:
        if others:
            raise TypeError(
                f"DistributedTrainer has no argument {', '.join(others)}: gradients travel through hvd-cluster, not "
                "through a KVStore, and every rank updates its own parameters; leave it out"
            )
        exchange = GradientExchange(compression, gradient_predivide_factor, num_groups, process_set, prefix or "")
        ordered = _in_order(params)
        exchange.share([each for each in ordered if isinstance(each, mx.gluon.Parameter)])
        super().__init__(ordered, _unwrapped(optimizer), optimizer_params, kvstore=None)
        self._exchange = exchange

    @override
    def _allreduce_grads(self) -> None:
        trained = [(place, each) for place, each in enumerate(self._params) if each.grad_req != "null"]
        self._exchange.compare([each for _, each in trained])
        self._exchange.combine([(place, each.list_grad()[0]) for place, each in trained])


def _in_order(params: Any) -> Any:
    """All ranks need one order: by name, or as given in a list."""
    if isinstance(params, PARAMETERS):
        return [params[name] for name in sorted(params.keys())]
    if isinstance(params, list | tuple):
        return list(params)
    raise InvalidRequestError(f"params is a {type(params).__name__}; give net.collect_params() or a list of Parameters")


def _unwrapped(optimizer: Any) -> Any:
    if isinstance(optimizer, DistributedOptimizer):
        warnings.warn("DistributedTrainer averages gradients itself; give the plain optimizer", stacklevel=3)
        return optimizer._optimizer
    if not isinstance(optimizer, str | mx.optimizer.Optimizer):
        raise InvalidRequestError(
            f"optimizer is a {type(optimizer).__name__}; give an Optimizer or its name, such as 'sgd', and the net's "
            "parameters: DistributedTrainer takes the place of gluon.Trainer"
        )
    return optimizer
