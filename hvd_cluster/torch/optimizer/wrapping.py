"""From a torch optimizer to a distributed one of the same class."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from collectives import InvalidRequestError, ReduceOp
from hvd_cluster.core.basics import registered_set, size
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.gradients.compression import GradientCompression
from hvd_cluster.gradients.options import Groups, Options, as_groups, check, check_passes
from hvd_cluster.ops.arguments import choose_op
from hvd_cluster.torch.compression import Compression
from hvd_cluster.torch.optimizer.gradient_optimizer import HookedOptimizer
from hvd_cluster.torch.optimizer.inventory import Names, given_names, parameter_groups
from hvd_cluster.torch.optimizer.shard import own_memory
from hvd_cluster.torch.optimizer.sharded import ShardedOptimizer


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: GradientCompression = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    sharded: bool | str = False,
    redundancy: int | None = None,
) -> torch.optim.Optimizer:
    """Wrap ``optimizer``: its ``step()`` works on gradients combined over all ranks of ``process_set``.

    The result is an instance of a subclass of the optimizer's own class, and shares groups, state and attributes with
    ``optimizer``, so that a scheduler made for one of them drives the other. It can be pickled and deep-copied like any
    optimizer; a copy needs ``init()``. Gradients are submitted when backward has finished them, under the names of
    their parameters, and travel while backward goes on; ``step()`` waits for all. If the ranks leave no core for that,
    ``step()`` submits all of them.

    ``compression`` is one of Compression, a subclass of Compressor, or a function from a parameter to a
    GradientCompressor. With ``backward_passes_per_step`` n, gradients add up over n passes before they travel. ``op``
    is Average, Sum, or Adasum: then each rank steps by its own gradients and the changes are combined. Average divides
    by the size of the process set; ``gradient_predivide_factor`` is the part of this division that comes before the
    sum, in case large gradients might overflow. ``groups`` is the number of groups of gradients, or a list of
    parameters for each group: a group travels together. Adasum ignores ``groups``. ``num_groups`` is its deprecated
    name. Sparse gradients stay sparse on their way, and are not compressed, unless ``sparse_as_dense``.

    A parameter that backward did not reach, even on all ranks, gets a gradient of zeros, so that weight decay and
    momentum still move it; a frozen parameter does not change. In a world of one nothing is sent, and the result
    behaves exactly like ``optimizer``. All ranks train the same parameters; a bucket that messages call
    ``gradients.a..b`` holds the parameters from a back to b in the order of the optimizer; HOROVOD_LOG_LEVEL=info lists
    them. Optimizers may be used side by side, each for parameters of its own; if their parameter names are equal, all
    ranks call their ``step()`` in the same order. Before its first step an optimizer sends nothing in backward.

    With ``sharded`` each rank updates its own part of the parameters and has the state of that part only. All ranks
    start with equal parameters. On one host they lie in memory that the ranks share ("host"). Elsewhere each rank has
    its own copy, and the parts are exchanged after the step ("rank"). True takes the first if it is possible. Then
    ``state_dict()`` is a collective, see :func:`full_state_dict` and docs/sharded.md. In an elastic job the commits
    copy each part to ``redundancy`` other hosts, or to all of them if it is None.

    With torch.amp.GradScaler call ``scaler.step(optimizer)`` as usual, or ``optimizer.synchronize()`` before
    ``scaler.unscale_(optimizer)``. InvalidRequestError for bad arguments, NotInitializedError before ``init()``.
    """
    _require_unwrapped(optimizer)
    given_groups = as_groups(groups, num_groups, torch.Tensor)
    check_passes(backward_passes_per_step)
    options = Options(
        compression,
        choose_op(None, op),
        gradient_predivide_factor,
        given_groups,
        sparse_as_dense,
        process_set,
        sharded,
        redundancy,
    )
    check(options)
    names = given_names(parameter_groups(optimizer), named_parameters)
    return _wrap(optimizer, names, backward_passes_per_step, options)


def _require_unwrapped(optimizer: Any) -> None:
    """InvalidRequestError for an optimizer that is already wrapped, and for an object that is no optimizer."""
    wrapper = getattr(optimizer, "_wrapper", None)
    if not isinstance(optimizer, torch.optim.Optimizer) or (wrapper is not None and wrapper() is not None):
        raise InvalidRequestError(f"cannot wrap a {type(optimizer)}; give a torch optimizer that is not wrapped yet")


def _wrap(optimizer: torch.optim.Optimizer, names: Names, passes: int, options: Options) -> torch.optim.Optimizer:
    earlier = optimizer.__dict__.get("_combiner")
    if earlier is not None:  # of a wrapper that is gone
        earlier.release()
    if optimizer.__dict__.get("_is_spread"):
        raise InvalidRequestError(
            "the optimizer was sharded, and has the state of a part of the parameters only; make a new one, and load "
            "the full_state_dict() of this one"
        )
    if not options.sharded:
        own_memory(parameter for group in optimizer.param_groups for parameter in group["params"])
    base = type(optimizer)
    members = {"__module__": base.__module__, "__reduce__": _reduce, "__copy__": _refuse_copy}
    wrapped: Any = object.__new__(type(base.__name__, (_kind(options), base), members))
    wrapped.__dict__ = optimizer.__dict__
    wrapped._wrapper = weakref.ref(wrapped)
    if "step" in wrapped.__dict__:
        wrapped.step = _followed(optimizer, wrapped)
    wrapped._distribute(names, passes, options)
    result: torch.optim.Optimizer = wrapped
    return result


def _kind(options: Options) -> type[torch.optim.Optimizer]:
    if options.sharded:
        return ShardedOptimizer
    if options.op is not ReduceOp.ADASUM:
        return HookedOptimizer
    from hvd_cluster.torch.optimizer.adasum import AdasumOptimizer

    return AdasumOptimizer


def _followed(optimizer: torch.optim.Optimizer, wrapped: Any) -> Callable[..., Any]:
    """For the wrapped optimizer: the replacement of ``step`` with which a scheduler notices that it is called.

    It holds no strong reference to either optimizer, because it is an attribute of both. An unused wrapper must go at
    once, because its hooks would combine the gradients of the next one.
    """
    original, wrapper = weakref.ref(optimizer), weakref.ref(wrapped)

    def step(*args: Any, **kwargs: Any) -> Any:
        called: Any = wrapper() or original()
        called._opt_called = True
        return type(called).step(called, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


def _reduce(wrapped: Any) -> tuple[Any, ...]:
    """For pickle and copy: torch's state of the optimizer and the arguments of the wrapper, but nothing in flight."""
    if getattr(wrapped, "_shard", None) is not None:
        raise InvalidRequestError(
            "a sharded optimizer has the state of a part of the parameters only, so a copy of it would be of no use; "
            "keep its state_dict()"
        )
    base = type(wrapped).__bases__[1]
    names = list(wrapped._given_names.items())
    process_set = wrapped._options.process_set
    ranks = None if process_set is global_process_set else process_set.ranks  # a restored one works on all ranks, too
    options = replace(wrapped._options, process_set=None)
    return _restore, (base, wrapped.__getstate__(), names, wrapped._passes, options, ranks)


def _refuse_copy(wrapped: Any) -> None:
    raise InvalidRequestError("a shallow copy would train the same parameters; use copy.deepcopy((model, optimizer))")


def _restore(
    base: type[torch.optim.Optimizer],
    state: dict[str, Any],
    names: Sequence[tuple[torch.Tensor, str]],
    passes: int,
    options: Options,
    ranks: Sequence[int] | None,
) -> torch.optim.Optimizer:
    process_set = registered_set(range(size()) if ranks is None else ranks)
    optimizer = base.__new__(base)
    optimizer.__setstate__(state)
    return _wrap(optimizer, dict(names), passes, replace(options, process_set=process_set))
