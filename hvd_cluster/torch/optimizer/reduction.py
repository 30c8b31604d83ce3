"""The gradients of a bucket on their way: from ``.grad`` to the engine and back."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TypeAlias

import torch

from collectives.api import EngineError, HorovodInternalError
from hvd_cluster.torch.gradient_compression import GradientCompressor
from hvd_cluster.torch.mpi_ops import (
    Handle,
    HandleGroup,
    allreduce_async_,
    grouped_allreduce_async_,
    sparse_allreduce_async,
    synchronize,
)
from hvd_cluster.torch.optimizer.arguments import Names, Options
from hvd_cluster.torch.optimizer.buckets import Bucket, is_small, parts

__all__ = ["Compressors", "Reduction"]

Compressors: TypeAlias = Mapping[torch.Tensor, GradientCompressor]
Journey: TypeAlias = Generator[torch.Tensor, torch.Tensor | None, None]
"""Yields what is to be combined over all ranks, is sent the result, and ends when gradients are complete."""


class Reduction:
    """Combines the gradients of ``names`` over all ranks as one group, in as many rounds as their compressors need.

    All must be there, and be members of ``bucket``. Small ones travel packed into one tensor, where the compressor
    allows it; large ones in place, because the backend packs in pieces that stay in the cache. Sparse ones are
    gathered, uncompressed, each on its own.
    """

    def __init__(self, bucket: Bucket, names: Names, compressors: Compressors, options: Options) -> None:
        self._options = options
        first, *others = names.values()
        self._name = f"gradients.{first}+{len(others)}" if others else f"gradient.{first}"
        self._round = 0
        self._handle: Handle | HandleGroup | None = None
        self._from_sparse = _densify(names) if options.sparse_as_dense else {}
        sparse = [parameter for parameter in names if _gradient(parameter).is_sparse]
        self._sparse = {each: self._start_sparse(f"gradient.{names[each]}", _gradient(each)) for each in sparse}
        self._journeys = list(_journeys(bucket, [each for each in names if each not in self._sparse], compressors))
        self._continue([None] * len(self._journeys))

    def advance(self) -> bool:
        """Wait for the round in flight and start the next; whether there was none left, so that all is complete.

        Raises what the engine raises.
        """
        if self._handle is not None:
            combined = synchronize(self._handle)
            self._continue(combined if isinstance(combined, tuple) else [combined])
        if self._handle is None:
            while self._sparse:
                parameter, finish = self._sparse.popitem()
                parameter.grad = finish().coalesce()
            for parameter, dimensions in self._from_sparse.items():
                parameter.grad = _gradient(parameter).to_sparse(dimensions)
        return self._handle is None

    def abandon(self) -> None:
        """Wait until nothing is in flight, so that the names are free; gradients are left as they happen to be."""
        if self._handle is not None:
            with suppress(HorovodInternalError):
                synchronize(self._handle)
        for finish in self._sparse.values():
            with suppress(HorovodInternalError):
                finish()

    def _continue(self, combined: Sequence[torch.Tensor | None]) -> None:
        going, tensors = [], []
        for journey, tensor in zip(self._journeys, combined, strict=True):
            try:
                tensors.append(journey.send(tensor))
                going.append(journey)
            except StopIteration:
                pass
        self._journeys = going
        self._handle = self._start(tensors) if tensors else None

    def _start(self, tensors: Sequence[torch.Tensor]) -> Handle | HandleGroup:
        options, name = self._options, f"{self._name}:{self._round}" if self._round else self._name
        factor = options.gradient_predivide_factor
        fields = (None, name, options.op, 1 / factor, factor, options.process_set)
        self._round += 1
        return (
            allreduce_async_(tensors[0], *fields) if len(tensors) == 1 else grouped_allreduce_async_(tensors, *fields)
        )

    def _start_sparse(self, name: str, gradient: torch.Tensor) -> Callable[[], torch.Tensor]:
        options, factor = self._options, self._options.gradient_predivide_factor
        if factor == 1.0:
            return sparse_allreduce_async(gradient, name, options.op, options.process_set)
        finish = sparse_allreduce_async(gradient / factor, name, options.op, options.process_set)
        return lambda: finish() * factor


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        raise EngineError("a gradient vanished while it was to be combined")
    return parameter.grad


def _densify(names: Names) -> dict[torch.Tensor, int]:
    """Make sparse gradients dense; how many dimensions of each were sparse."""
    dimensions = {each: _gradient(each).sparse_dim() for each in names if _gradient(each).is_sparse}
    for parameter in dimensions:
        parameter.grad = _gradient(parameter).to_dense()
    return dimensions


def _journeys(bucket: Bucket, parameters: Sequence[torch.Tensor], compressors: Compressors) -> Iterator[Journey]:
    packs: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter in parameters:
        gradient = _gradient(parameter)
        if is_small(gradient) and compressors[parameter].elementwise:
            packs.setdefault((gradient.dtype, gradient.device), []).append(parameter)
        else:
            yield _alone(parameter, compressors[parameter])
    for members in packs.values():
        compressor = compressors[members[0]]
        yield _packed(bucket, members, compressor) if len(members) > 1 else _alone(members[0], compressor)


def _alone(parameter: torch.Tensor, compressor: GradientCompressor) -> Journey:
    if _is_shared(_gradient(parameter)):
        parameter.grad = _gradient(parameter).clone()
    gradient = _gradient(parameter)
    _replace(gradient, (yield from compressor.rounds(gradient)))


def _packed(bucket: Bucket, parameters: Sequence[torch.Tensor], compressor: GradientCompressor) -> Journey:
    gradients = [_gradient(parameter) for parameter in parameters]
    combined = yield from compressor.rounds(bucket.pack(gradients))
    torch._foreach_copy_(gradients, parts(combined, gradients))


def _replace(gradient: torch.Tensor, combined: torch.Tensor) -> None:
    """Give ``gradient``, which the user may hold, the contents of ``combined``: its very memory where that fits."""
    if combined.data_ptr() == gradient.data_ptr():
        return
    if gradient.is_contiguous() and combined.is_contiguous() and combined.dtype is gradient.dtype:
        gradient.data = combined.view(gradient.shape)
    else:
        gradient.copy_(combined.reshape(gradient.shape))


def _sharers(tensor: torch.Tensor) -> int:
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


_ALONE = _sharers(torch.empty(1))


def _is_shared(gradient: torch.Tensor) -> bool:
    """Whether others use the memory: autograd hands a gradient over as it is, even to two parameters."""
    return _sharers(gradient) > _ALONE
