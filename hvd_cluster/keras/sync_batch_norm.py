"""Batch normalization over the joined batch of all ranks."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from collectives import InvalidRequestError, override
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.gradients.targets import positional
from hvd_cluster.keras.backends import backend

Tensor = Any


@keras.saving.register_keras_serializable(package="hvd_cluster")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """Batch normalization with mean and variance of the batches of all members of ``process_set`` together.

    Replaces ``keras.layers.BatchNormalization``, whose arguments it takes: input of any shape of floats, output of the
    same shape. The number of examples may differ between ranks, or be 0; masked steps do not count. As in Keras, the
    moving variance follows the biased variance.

    The gradient of the input is that of the sum of all ranks' losses. Those of gamma and beta are this rank's share:
    ``DistributedOptimizer`` combines them like all others.

    Training passes are collectives: all members run the layers in the same order. The ranks know a layer by its place
    in the model that is called, so they may have built different numbers of models.

    The configuration has the ranks of ``process_set``. A layer that is loaded takes the set that is registered for
    them, or a new one, which ``add_process_set`` registers. Raises InvalidRequestError for ``fused=True``, and where
    this rank is no member.
    """

    def __init__(
        self, *args: Any, fused: bool = False, process_set: ProcessSet = global_process_set, **kwargs: Any
    ) -> None:
        if fused is not False:
            raise InvalidRequestError(f"SyncBatchNormalization does not support fused={fused}; leave it out")
        super().__init__(*args, **kwargs)
        self.process_set = process_set
        self.supports_jit = keras.backend.backend() == "jax"

    def _moments(self, inputs: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean and biased variance of each channel."""
        if self._is_alone():
            moments: tuple[Tensor, Tensor] = super()._moments(inputs, mask)
            return moments
        counted = None if mask is None else ops.expand_dims(ops.cast(mask, "bool"), -1)
        own = ops.expand_dims(ops.cast(_count(inputs, self.axis, counted), inputs.dtype), 0)
        sums = self._total(ops.concatenate([own, self._sum(inputs, counted)]), "sums")
        count = ops.maximum(sums[0], 1)
        mean = sums[1:] / count
        # From the distances and not from the squares: that is exact for a mean far from 0.
        squares = ops.square(inputs - ops.reshape(mean, self._per_channel(inputs)))
        return mean, self._total(self._sum(squares, counted), "squares") / count

    def _is_alone(self) -> bool:
        """Whether that is so, and stays so: in an elastic job, a step that is compiled now may have company later."""
        process_set = self.process_set
        return basics.worlds() is None and process_set.size() == 1 and bool(process_set.included())

    @override
    def get_config(self) -> dict[str, Any]:
        ranks = None if self.process_set is global_process_set else self.process_set.ranks
        return {**super().get_config(), "process_set": ranks}

    @classmethod
    @override
    def from_config(cls, config: dict[str, Any]) -> SyncBatchNormalization:
        layer: SyncBatchNormalization = super().from_config({**config, "process_set": _set_of(config["process_set"])})
        return layer

    def _sum(self, values: Tensor, counted: Tensor | None) -> Tensor:
        return ops.sum(values if counted is None else ops.where(counted, values, 0), self._reduction_axes)

    def _per_channel(self, inputs: Tensor) -> list[int]:
        shape = [1] * len(inputs.shape)
        shape[self.axis] = inputs.shape[self.axis]
        return shape

    def _total(self, tensor: Tensor, what: str) -> Tensor:
        return backend().total(tensor, f"{self._place()}.{what}", self.process_set)

    def _place(self) -> str:
        """The name of this layer among those of the model that is called, the same on all ranks."""
        model = self._get_call_context().entry_layer
        layers = [each for each in model._flatten_layers() if isinstance(each, SyncBatchNormalization)]
        position = next((number for number, each in enumerate(layers) if each is self), 0)
        return f"{positional(model.name, position)}.{positional(self.name, position)}"


def _set_of(ranks: list[int] | None) -> ProcessSet:
    if ranks is None:
        return global_process_set
    known = (each for each in basics.wanted_sets() if each.ranks == ranks)
    return next(known, None) or ProcessSet(ranks)


def _count(inputs: Tensor, axis: int, counted: Tensor | None) -> Tensor:
    """The number of values of a channel on this rank."""
    if counted is not None:
        return ops.sum(ops.cast(counted, "int32"))
    sizes = list(ops.shape(inputs))
    del sizes[axis]
    return ops.prod(ops.convert_to_tensor(sizes, "int32"))
