"""The gradients of a bucket on their way: from ``.grad`` to the engine and back."""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import TypeAlias

import torch

from collectives.api import EngineError, HorovodInternalError, MismatchError
from hvd_cluster.basics import rank
from hvd_cluster.compression import GradientCompressor
from hvd_cluster.optimizer.buckets import label
from hvd_cluster.optimizer.layout import ABSENT, DENSE, FROZEN, common_sparse, differences, has_news
from hvd_cluster.optimizer.options import Options
from hvd_cluster.torch.mpi_ops import (
    Handle,
    HandleGroup,
    allgather_async,
    allreduce_async_,
    grouped_allreduce_async_,
    sparse_allreduce_async,
    synchronize,
)
from hvd_cluster.torch.optimizer.buckets import Bucket, is_small
from hvd_cluster.torch.optimizer.parameters import Names

__all__ = ["Compressors", "Reduction"]

Compressors: TypeAlias = Mapping[torch.Tensor, GradientCompressor]
Journey: TypeAlias = Generator[torch.Tensor, torch.Tensor | None, None]
"""Yields a tensor to combine over all ranks, receives the result, and ends when gradients are complete."""
Course: TypeAlias = Generator[Handle | HandleGroup, tuple[torch.Tensor, ...], None]
"""Yields a handle, receives its results, and ends when nothing is left to start."""


class Reduction:
    """Combines the gradients of ``members`` of ``bucket`` over all ranks as one group, in one or more rounds.

    Gradients that are None become zeros. Small gradients travel packed into one tensor, if the compressor allows it.
    Large ones travel in place, because the backend packs in pieces that stay in the cache. Sparse ones are gathered,
    uncompressed, each on its own. Names in flight begin with ``prefix``.

    A bucket remembers which gradients the ranks agreed to be sparse. Ranks may remember differently: a rank that had
    joined, or that has a new optimizer, missed the agreement. Therefore the first round has the same names on all
    ranks, regardless of their memory: an empty tensor stands for gradients that are gathered, and a rank that finds
    another sparse gradient sends tensors that match no others. Where ranks differ, all ranks see a mismatch. They then
    exchange the kinds of their gradients (``layout``), and agree, or raise an error that names the difference. Sparse
    gradients are gathered once the first round has passed, because then all ranks gather the same ones.
    """

    def __init__(
        self,
        bucket: Bucket,
        members: Sequence[torch.Tensor],
        names: Names,
        prefix: str,
        compressors: Compressors,
        options: Options,
    ) -> None:
        self._bucket = bucket
        self._members = dict.fromkeys(members)
        self._names = names
        self._compressors = compressors
        self._options = options
        self._prefix = prefix
        self._label = prefix + label(bucket.parameters, names)
        self._absent = _complete(bucket, members)
        self._from_sparse = _densify(bucket, members) if options.sparse_as_dense else {}
        self._agreed = {} if options.sparse_as_dense else bucket.sparse
        self._sparse: dict[torch.Tensor, Callable[[], torch.Tensor]] = {}
        self._course = self._travel()
        self._handle: Handle | HandleGroup | None = next(self._course, None)

    def advance(self) -> bool:
        """Wait for the round in flight and start the next. Returns True if no round was left, so that all is complete.

        Raises the engine's errors.
        """
        if self._handle is not None:
            self._handle = self._after(self._handle)
        if self._handle is None:
            while self._sparse:
                parameter, finish = self._sparse.popitem()
                parameter.grad = finish().coalesce()
            for parameter, dimensions in self._from_sparse.items():
                parameter.grad = _gradient(parameter).to_sparse(dimensions)
        return self._handle is None

    def _after(self, handle: Handle | HandleGroup) -> Handle | HandleGroup | None:
        try:
            combined = synchronize(handle)
        except MismatchError as error:
            return self._course.throw(error)
        try:
            return self._course.send(combined if isinstance(combined, tuple) else (combined,))
        except StopIteration:
            return None

    def abandon(self) -> None:
        """Wait until nothing is in flight, so that the names are free; the contents of gradients are then undefined."""
        if self._handle is not None:
            with suppress(HorovodInternalError):
                synchronize(self._handle)
        for finish in self._sparse.values():
            with suppress(HorovodInternalError):
                finish()

    def _travel(self) -> Course:
        error = None
        while True:
            try:
                if (yield from self._attempt()):
                    return
            except MismatchError as mismatch:
                error = mismatch.with_traceback(None)  # the frames of a traceback would keep the optimizer alive
            yield from self._agree(error)

    def _attempt(self) -> Generator[Handle | HandleGroup, tuple[torch.Tensor, ...], bool]:
        """Whether gradients are complete; False where this rank must agree first. MismatchError where ranks differ."""
        journeys = list(_journeys(self._bucket, self._members, self._compressors, self._agreed))
        if any(_gradient(each).is_sparse for each in self._members if each not in self._agreed):
            yield self._start([torch.zeros((), dtype=torch.uint8) for _ in journeys], self._label)
            return False
        yield from self._rounds(journeys)
        return True

    def _rounds(self, journeys: list[Journey]) -> Course:
        combined: Sequence[torch.Tensor | None] = [None] * len(journeys)
        for number in count():
            going, tensors = [], []
            for journey, tensor in zip(journeys, combined, strict=True):
                with suppress(StopIteration):
                    tensors.append(journey.send(tensor))
                    going.append(journey)
            if not tensors:
                return
            label = f"{self._label}:{number}" if number else self._label
            journeys, combined = going, (yield self._start(tensors, label))
            if number == 0:
                self._sparse = {each: self._start_sparse(each) for each in self._members if each in self._agreed}

    def _agree(self, error: MismatchError | None) -> Course:
        """Exchange layouts; MismatchError if the ranks differ, or if they agree already and yet had an ``error``."""
        own = torch.tensor([(rank(), 0, 0), *map(self._entry, self._bucket.parameters)]).unsqueeze(0)
        try:
            (gathered,) = yield allgather_async(own, f"layout.{self._label}", self._options.process_set)
        except MismatchError as other:  # different numbers of parameters
            raise self._explained(error or other) from error
        layouts = [(first[0], entries) for first, *entries in gathered.tolist()]
        difference = differences(self._names_of_bucket(), layouts)
        parameters = self._bucket.parameters
        common = {parameters[index]: dimensions for index, dimensions in common_sparse(layouts).items()}
        if difference or not has_news(layouts):
            raise self._explained(difference or error) from error
        self._agreed.update(common)
        for parameter in self._absent & common.keys():
            if not _gradient(parameter).is_sparse:
                parameter.grad = _gradient(parameter).to_sparse(common[parameter])

    def _explained(self, problem: object) -> MismatchError:
        return MismatchError(f"{problem}. The parameters in {self._label!r}: {', '.join(self._names_of_bucket())}")

    def _names_of_bucket(self) -> list[str]:
        return [self._names[parameter] for parameter in self._bucket.parameters]

    def _entry(self, parameter: torch.Tensor) -> tuple[int, int, int]:
        """See :data:`Layouts`."""
        if parameter not in self._members:
            kind = FROZEN
        elif parameter in self._absent:
            kind = ABSENT
        else:
            kind = _gradient(parameter).sparse_dim() if _gradient(parameter).is_sparse else DENSE
        return kind, parameter.numel(), int(parameter in self._agreed)

    def _start(self, tensors: Sequence[torch.Tensor], name: str) -> Handle | HandleGroup:
        options, factor = self._options, self._options.gradient_predivide_factor
        fields = (None, name, options.op, 1 / factor, factor, options.process_set)
        return (
            allreduce_async_(tensors[0], *fields) if len(tensors) == 1 else grouped_allreduce_async_(tensors, *fields)
        )

    def _start_sparse(self, parameter: torch.Tensor) -> Callable[[], torch.Tensor]:
        options, factor = self._options, self._options.gradient_predivide_factor
        gradient, name = _gradient(parameter), f"{self._prefix}gradient.{self._names[parameter]}"
        if factor == 1.0:
            return sparse_allreduce_async(gradient, name, options.op, options.process_set)
        finish = sparse_allreduce_async(gradient / factor, name, options.op, options.process_set)
        return lambda: finish() * factor


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        raise EngineError("a gradient vanished while it was to be combined")
    return parameter.grad


def _complete(bucket: Bucket, parameters: Sequence[torch.Tensor]) -> set[torch.Tensor]:
    """The parameters that had no gradient and now have zeros; makes gradients sparse where the ranks agreed on it."""
    absent = {parameter for parameter in parameters if parameter.grad is None}
    for parameter in absent:
        parameter.grad = torch.zeros_like(parameter)
    for parameter in parameters:
        if parameter in bucket.sparse and not _gradient(parameter).is_sparse:
            parameter.grad = _gradient(parameter).to_sparse(bucket.sparse[parameter])
    return absent


def _densify(bucket: Bucket, parameters: Sequence[torch.Tensor]) -> dict[torch.Tensor, int]:
    """Make sparse gradients dense; returns the number of sparse dimensions of each."""
    dimensions = {each: _gradient(each).sparse_dim() for each in parameters if _gradient(each).is_sparse}
    bucket.sparse.update(dimensions)
    for parameter in dimensions:
        parameter.grad = _gradient(parameter).to_dense()
    return dimensions


def _journeys(
    bucket: Bucket, parameters: Iterable[torch.Tensor], compressors: Compressors, sparse: Container[torch.Tensor]
) -> Iterator[Journey]:
    """The same number of journeys in the same order, for any ``sparse``."""
    packs: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter in parameters:
        gradient = _gradient(parameter)
        if is_small(gradient) and compressors[parameter].elementwise:
            packs.setdefault((gradient.dtype, gradient.device), []).append(parameter)
        else:
            yield _placeholder(parameter) if parameter in sparse else _alone(parameter, compressors[parameter])
    for members in packs.values():
        dense = [parameter for parameter in members if parameter not in sparse]
        if not dense:
            yield _placeholder(members[0])
        elif len(dense) == 1:
            yield _alone(dense[0], compressors[dense[0]])
        else:
            yield _packed(bucket, dense, compressors[dense[0]])


def _placeholder(parameter: torch.Tensor) -> Journey:
    """An empty tensor of a shape that no gradient of ``parameter`` has, and no pack."""
    yield parameter.new_empty((0,) * (parameter.dim() + 1))


def _alone(parameter: torch.Tensor, compressor: GradientCompressor) -> Journey:
    gradient = _gradient(parameter)
    if _is_shared(gradient):  # perhaps by another gradient, which must not be combined twice
        gradient.copy_((yield from compressor.rounds(gradient.clone())).reshape(gradient.shape))
    else:
        _replace(gradient, (yield from compressor.rounds(gradient)))


def _packed(bucket: Bucket, parameters: Sequence[torch.Tensor], compressor: GradientCompressor) -> Journey:
    gradients = [_gradient(parameter) for parameter in parameters]
    pack = bucket.pack(gradients)
    pack.spread((yield from compressor.rounds(pack.tensor)), gradients)


def _replace(gradient: torch.Tensor, combined: torch.Tensor) -> None:
    """Give ``gradient``, which the user may hold, the contents of ``combined``: the same memory where that fits."""
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
    """Whether other tensors use the memory: a user's flat buffer, or autograd's, which two parameters may share."""
    return _sharers(gradient) > _ALONE
