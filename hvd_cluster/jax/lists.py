"""JAX's gradients, as the optimizer core sees them: arrays, or what stands for them while a function is traced."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from itertools import accumulate

import jax
from jax import numpy as jnp

from collectives import InvalidRequestError, override
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.gradients.lists import ListBinding, Shipment, by_shipment
from hvd_cluster.gradients.targets import Target
from hvd_cluster.jax.calls import allreduce, size
from hvd_cluster.ops.arguments import PLAIN_SUM, Reduction
from hvd_cluster.ops.backward import name_of_backward


def _require_cpu() -> None:
    """InvalidRequestError where JAX computes on another device than the CPU."""
    if jax.default_backend() != "cpu":
        raise InvalidRequestError(
            f"JAX computes on {jax.default_backend()!r}; hvd-cluster combines its gradients on a CPU only: set "
            "JAX_PLATFORMS=cpu, or use Keras on TensorFlow or torch"
        )


class JaxLists(ListBinding):
    """All tensors of a step travel in one call, which XLA runs when the last gradient is there."""

    @staticmethod
    @override
    def is_deferred() -> bool:
        """XLA runs all calls, also those outside of compiled functions."""
        return True

    @staticmethod
    @override
    def kind(gradient: jax.Array) -> Hashable:
        return gradient.dtype

    @staticmethod
    @override
    def zeros(target: Target, like: jax.Array | None) -> jax.Array:
        return jnp.zeros(target.shape or (), str(target.dtype))

    @staticmethod
    @override
    def concatenate(tensors: Sequence[jax.Array]) -> jax.Array:
        return jnp.concatenate(tensors)

    @staticmethod
    @override
    def split(packed: jax.Array, sizes: Sequence[int]) -> Sequence[jax.Array]:
        return jnp.split(packed, [*accumulate(sizes)][:-1])

    @staticmethod
    @override
    def allreduce(
        shipments: Sequence[Shipment], process_set: ProcessSet, how: Reduction
    ) -> Sequence[Sequence[jax.Array]]:
        """InvalidRequestError where JAX computes on another device than the CPU."""
        _require_cpu()
        return by_shipment(allreduce(shipments, process_set, how) if shipments else (), shipments)

    @staticmethod
    @override
    def share(gradient: jax.Array, process_set: ProcessSet) -> jax.Array:
        """Divided when a compiled function runs, because the number of ranks may change."""
        _require_cpu()
        count: jax.Array = size(process_set).astype(gradient.dtype)
        return gradient / count


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def total(tensor: jax.Array, name: str, process_set: ProcessSet) -> jax.Array:
    """The sum of ``tensor`` over the ranks, whose gradient is the sum of the ranks' gradients."""
    [[result]] = JaxLists.allreduce([Shipment(name, [tensor])], process_set, PLAIN_SUM)
    return result


def _forward(tensor: jax.Array, name: str, process_set: ProcessSet) -> tuple[jax.Array, None]:
    return total(tensor, name, process_set), None


def _backward(name: str, process_set: ProcessSet, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (total(gradient, name_of_backward(name) or name, process_set),)


total.defvjp(_forward, _backward)
