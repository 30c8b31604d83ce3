"""Batch normalization over the joined batch of all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from collectives import InvalidRequestError, ReduceOp
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.torch.mpi_ops import allgather, allreduce, cuda_built


class SyncBatchNorm(_BatchNorm):
    """Batch normalization with mean and variance of the batches of all members of ``process_set`` together.

    Replaces ``torch.nn.BatchNorm1d`` to ``3d``, and of ``torch.nn.SyncBatchNorm``, on CPU and CUDA: input
    (N, C) or (N, C, ...) of floats, of any memory format; output of the same shape and dtype. N may differ between
    ranks, or be 0. Statistics are computed in float32 for 16-bit input; running statistics use the unbiased variance of
    the joined batch. With one member, and after ``eval()``, it is plain batch normalization.

    The gradient of the input is that of the sum of all ranks' losses. Those of weight and bias are this rank's share,
    as in torch and Horovod: ``DistributedOptimizer`` combines them like all others. Their average then equals the
    gradient of one process for the joined batch and the average of the ranks' losses.

    Training passes are collectives: all members that have not joined run the layers in the same order, forward and
    backward. Raises InvalidRequestError for input of wrong shape, for a joined batch of one value per channel, and
    where this rank is no member.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """``module``, with this class in place of all its batch normalization layers; the parameters stay the same.

        The layers are replaced in ``module`` itself; a ``module`` that is itself such a layer is not changed: use the
        result. Raises InvalidRequestError, and changes nothing, for a lazy layer that has not seen a batch.
        """
        twins: dict[torch.nn.Module, torch.nn.Module]
        twins = {layer: cls._like(layer, process_set) for layer in module.modules() if isinstance(layer, _BatchNorm)}
        for parent in list(module.modules()):
            for name, child in parent._modules.items():  # named_children() leaves out repetitions
                if child in twins:
                    parent._modules[name] = twins[child]
        return twins.get(module, module)

    @classmethod
    def _like(cls, layer: _BatchNorm, process_set: ProcessSet) -> SyncBatchNorm:
        if isinstance(layer, LazyModuleMixin):
            raise InvalidRequestError(
                f"{layer} does not know its number of features before its first batch; run the model once on some "
                "input, and convert it then"
            )
        twin = cls(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats, process_set)
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            setattr(twin, name, getattr(layer, name))
        return twin.train(layer.training)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise InvalidRequestError(
                f"SyncBatchNorm({self.num_features}) needs input of shape (N, {self.num_features}, ...), not "
                f"{tuple(input.shape)}"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The normalized ``input``."""
        if not self.training or (self.process_set.size() == 1 and self.process_set.included()):
            return super().forward(input)
        # torch.compile would look for tensors to trace all the way down into the engine.
        if torch.compiler.is_compiling():
            return torch.compiler.disable(self._normalize)(input)  # type: ignore[no-any-return,no-untyped-call]
        return self._normalize(input)

    def _normalize(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        joined = _joined(_own_statistics(input.detach()), self.process_set)
        if self.track_running_stats:
            self._track(joined)
        output: torch.Tensor = _Normalization.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, joined, self.eps, self.process_set
        )
        return output

    def _track(self, joined: _Statistics) -> None:
        share = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            share = 1 / int(self.num_batches_tracked) if share is None else share
        if joined.count > 0:
            unbiased = joined.squares / (joined.count - 1)
            for running, value in ((self.running_mean, joined.mean), (self.running_var, unbiased)):
                if running is not None and share is not None:
                    running.mul_(1 - share).add_(value.to(running), alpha=share)


@dataclass(frozen=True)
class _Statistics:
    """``count`` values per channel, their mean, and the sum of squared distances from it, in float64."""

    count: int
    mean: torch.Tensor
    squares: torch.Tensor


def _own_statistics(input: torch.Tensor) -> _Statistics:
    count = input.shape[0] * prod(input.shape[2:])
    wide, dimensions = input.to(_wide(input)), _all_but_channels(input)
    mean = wide.sum(dimensions) / max(count, 1)
    # Two passes are as exact as torch.var_mean, which on a CPU takes several times as long.
    squares = (wide - mean.view(_per_channel(input))).square_().sum(dimensions)
    return _Statistics(count, *_portable(torch.stack([mean, squares]).double()))


def _portable(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, on the CPU unless it can travel from where it is."""
    return tensor if tensor.is_cpu or (tensor.is_cuda and cuda_built()) else tensor.cpu()


def _joined(own: _Statistics, process_set: ProcessSet) -> _Statistics:
    """The statistics of the values of all ranks.

    Chan, Golub, LeVeque: Updating formulae and a pairwise algorithm for computing sample variances (1979), for any
    number of parts. Unlike sums of squares it is exact for a mean far from 0.
    """
    packed = torch.stack([torch.full_like(own.mean, own.count), own.mean, own.squares])
    counts, means, squares = allgather(packed[None], process_set=process_set).unbind(1)
    count = _total(own.count, process_set) if packed.is_cuda else int(counts[:, 0].sum())
    if count == 1:
        raise InvalidRequestError(
            "batch normalization needs more than one value for each channel over all ranks; give larger batches"
        )
    mean = (counts * means).sum(0) / max(count, 1)
    return _Statistics(count, mean, (squares + counts * (means - mean).square()).sum(0))


def _total(count: int, process_set: ProcessSet) -> int:
    """The sum over the ranks, by the CPU: to read a number on a GPU would wait for the GPU."""
    return int(allreduce(torch.tensor(count, device="cpu"), op=ReduceOp.SUM, process_set=process_set))


class _Normalization(torch.autograd.Function):
    """(input, weight, bias, statistics, eps, process_set) -> output."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        joined: _Statistics,
        eps: float,
        process_set: ProcessSet,
    ) -> torch.Tensor:
        """The normalized input, in its dtype; the rest in its widened dtype."""
        dtype, device = _wide(input), input.device
        mean = joined.mean.to(device, dtype)
        variance = (joined.squares / max(joined.count, 1)).to(device, dtype)
        weight, bias = (None if each is None else each.to(dtype) for each in (weight, bias))
        ctx.save_for_backward(input, weight, mean, (variance + eps).rsqrt())
        ctx.count, ctx.process_set = joined.count, process_set
        return functional.batch_norm(input, mean, variance, weight, bias, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """With x the input less its mean: s w (g - mean(g) - s^2 x mean(g x)), and the sums of s g x and of g."""
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        input, weight, mean, scale = ctx.saved_tensors
        dimensions, shape = _all_but_channels(input), _per_channel(input)
        wide, centred = gradient.to(mean.dtype), input.to(mean.dtype) - mean.view(shape)
        sums = torch.stack([wide.sum(dimensions), (wide * centred).sum(dimensions)])
        if needs_input:
            means = allreduce(_portable(sums), op=ReduceOp.SUM, process_set=ctx.process_set).to(sums) / ctx.count
            outer = scale if weight is None else scale * weight
            inner, slope = means[0] * outer, means[1] * outer * scale.square()
            centred.mul_(-slope.view(shape)).sub_(inner.view(shape)).addcmul_(wide, outer.view(shape))
        return (
            centred.to(input.dtype) if needs_input else None,
            sums[1] * scale if needs_weight else None,
            sums[0] if needs_bias else None,
            None,
            None,
            None,
        )


def _wide(input: torch.Tensor) -> torch.dtype:
    return torch.promote_types(input.dtype, torch.float32)


def _all_but_channels(input: torch.Tensor) -> list[int]:
    return [0, *range(2, input.dim())]


def _per_channel(input: torch.Tensor) -> list[int]:
    """The shape of a vector of channels that is to be combined with ``input``."""
    return [1, -1] + [1] * (input.dim() - 2)
