"""Gradients on their way: the compressors, and what DistributedOptimizer and DistributedTrainer have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mxnet as mx
import numpy as np

from collectives import Operation, ReduceOp, override
from hvd_cluster.comparison.meeting import Comparison, can_overlap
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.gradients.buckets import chunks
from hvd_cluster.gradients.compression import CastCompressor, Compressor, NoneCompressor, compressed, require_compressor
from hvd_cluster.gradients.options import Options, as_groups, check
from hvd_cluster.graphs.calls import CallBatch
from hvd_cluster.mxnet.arrays import Array, combined, is_sparse
from hvd_cluster.mxnet.nodes import NodeCall, calling
from hvd_cluster.ops.shared_arena import SharedArena, can_share, combine_in_place

__all__ = ["Compression", "Compressor", "FP16Compressor", "GradientExchange", "NoneCompressor"]


class FP16Compressor(CastCompressor):
    """Sends floating-point arrays as float16: 11 bits of precision, numbers up to 65504."""

    dtype = "float16"

    @staticmethod
    @override
    def float_type(tensor: mx.nd.NDArray) -> str | None:
        dtype = np.dtype(tensor.dtype)
        return dtype.name if dtype.kind == "f" else None

    @staticmethod
    @override
    def cast(tensor: mx.nd.NDArray, dtype: str) -> mx.nd.NDArray:
        return tensor.astype(dtype, copy=False)


class Compression:
    """The compressors that come with the package."""

    none = NoneCompressor
    fp16 = FP16Compressor


class SharedGradient:
    """Makes the gradient of ``parameter`` in ``arena``, also for another ``grad_req``; ``former`` gets what it had.

    Executors remember where a gradient was when they first wrote it, so it does not move after that.
    """

    def __init__(self, parameter: Any, arena: SharedArena, former: list[Array]) -> None:
        self._parameter, self.arena, self._former = parameter, arena, former
        self._kept: Array = None
        self._move()

    def __call__(self) -> None:
        type(self._parameter)._init_grad(self._parameter)
        self._move()

    def _move(self) -> None:
        for data, gradient in zip(self._parameter._data or (), self._parameter._grad or (), strict=False):
            if is_sparse(gradient) or gradient.ctx != mx.cpu(0):
                continue
            if self._kept is None or (self._kept.shape, self._kept.dtype) != (gradient.shape, gradient.dtype):
                memory = self.arena.take(gradient.shape, gradient.dtype)
                self._kept = memory if memory is None else mx.nd.from_dlpack(memory.__dlpack__())
            if self._kept is not None:
                moved = gradient.copyto(self._kept.detach())
                gradient.handle, moved.handle = moved.handle, gradient.handle  # whoever has the array keeps it
                mx.autograd.mark_variables([data], [gradient], self._parameter.grad_req)
                self._former.append(moved)


class GradientExchange:
    """Averages gradients over the ranks, in place, without a wait: the update waits for them, as for backward.

    They travel in ``num_groups`` groups, or each on its own, the first one with the highest priority: so they overlap
    with backward. Where no rank has a core left for that, those of a trainer without a prefix are one group.
    """

    def __init__(
        self, compression: Any, predivide_factor: float, num_groups: int, process_set: ProcessSet, prefix: str = ""
    ) -> None:
        """InvalidRequestError, a ValueError, for arguments that do not go together; NotInitializedError before init."""
        require_compressor(compression)
        as_groups(num_groups or None, 0, object)
        self._groups, self._overlaps = num_groups, True
        self._options = Options(compression, ReduceOp.AVERAGE, predivide_factor, None, False, process_set)
        check(self._options)
        self._prefix = f"gradient.{prefix}"
        self._comparison = None if prefix else Comparison(process_set)
        self._arena: SharedArena | None = None
        # Until the second step: once malloc has a large piece back, it mixes the next ones, which slows updates down.
        self._former: list[Array] = []

    def share(self, parameters: Sequence[Any]) -> None:
        """Let the gradients lie in memory of all ranks, before a trainer of ``parameters`` is made."""
        if self._comparison is not None and can_share(self._options.process_set):
            places = [vars(each)["_init_grad"] for each in parameters if "_init_grad" in vars(each)]
            self._arena = places[0].arena if places else SharedArena()
        if self._arena is not None and self._options.compression is NoneCompressor:
            for each in parameters:
                if not (each._trainer or any(data._fresh_grad for data in each._data or ())):
                    each._init_grad = SharedGradient(each, self._arena, self._former)

    def compare(self, parameters: Sequence[Any]) -> None:
        """The ranks compare ``parameters``, once in a world; not with a prefix: such trainers step in any order."""
        if self._comparison is not None and not self._comparison.is_over:
            with calling(Operation.ALLGATHER, "models", self._options.process_set):
                self._comparison.run([(each.name, each) for each in parameters])
                self._overlaps = can_overlap(self._options.process_set)
                combine_in_place(self._arena, "models.memory", self._options.process_set)
        else:
            self._former.clear()

    def combine(self, gradients: Sequence[tuple[Any, Array]]) -> None:
        """Overwrite gradients, each with the index of its parameter, by their averages."""
        process_set = self._options.process_set
        if not process_set.included() or process_set.size() == 1:
            return
        dense = [pair for pair in gradients if not is_sparse(pair[1])]
        groups = chunks(dense, self._groups or (max(1, len(dense)) if self._overlaps else 1))
        with CallBatch() as batch:
            for place, pairs in enumerate(groups):
                self._send(pairs, -place, batch if basics.engine().patient else None)
        for index, gradient in [pair for pair in gradients if is_sparse(pair[1])]:
            with calling(Operation.ALLREDUCE, f"{self._prefix}{index}", process_set) as label:
                combined(gradient, label, process_set, self._options.reduction).copyto(gradient)

    def _send(self, pairs: Sequence[tuple[Any, Array]], priority: int, batch: CallBatch | None) -> None:
        indices, gradients = [index for index, _ in pairs], [gradient for _, gradient in pairs]
        is_alone, options = self._overlaps and not self._groups, self._options
        name = self._prefix + (f"{indices[0]}" if is_alone else f"{indices[0]}:{indices[-1]}")
        with calling(Operation.ALLREDUCE, name, options.process_set, None if is_alone else gradients) as label:
            small = [compressed(options.compression, gradient) for gradient in gradients]
            arrays, how = [array for array, _ in small], (options.process_set, options.reduction, is_alone)
            NodeCall(Operation.ALLREDUCE, arrays, label, *how, batch=batch).push(priority)
            for gradient, (array, context) in zip(gradients, small, strict=True):
                if array is not gradient:
                    gradient[:] = options.compression.decompress(array, context)
