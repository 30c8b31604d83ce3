"""The gradients of a bucket on their way: from the parameters to the engine and back."""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from collectives.api import EngineError, HorovodInternalError, MismatchError, Operation
from hvd_cluster import basics
from hvd_cluster.compression import GradientCompressor
from hvd_cluster.operations.arrays import gathered
from hvd_cluster.operations.handles import HandleGroup
from hvd_cluster.operations.operands import start
from hvd_cluster.optimizer.binding import Binding, InFlight, Pack
from hvd_cluster.optimizer.buckets import SMALL_BYTES, label
from hvd_cluster.optimizer.layout import ABSENT, DENSE, FROZEN, common_sparse, differences, fingerprint, has_news
from hvd_cluster.optimizer.options import Options
from hvd_cluster.optimizer.rivals import Claim, Proposal, choose

__all__ = ["Bucket", "Reduction", "Setup"]

P = TypeVar("P")
Tensor: TypeAlias = Any
"""A gradient, or another tensor of the framework."""
Journey: TypeAlias = Generator[Tensor, Tensor | None, None]
"""Yields a tensor to combine over all ranks, receives the result, and ends when gradients are complete."""
Course: TypeAlias = Generator[InFlight, Sequence[Tensor], None]
"""Yields a handle, receives its results, and ends when nothing is left to start."""
PAUSE = HandleGroup((), tuple)
"""A handle that is done, and has no results."""


class Bucket(Generic[P]):
    """Parameters with gradients that are sent together, when all of them are ready.

    ``sparse``: the parameters with gradients that are sparse on all ranks -> the number of sparse dimensions.
    ``packs``: memory for small gradients of each kind; each step reuses it, because fresh pages are slow.
    """

    __slots__ = ("packs", "parameters", "sparse")

    def __init__(self, parameters: Sequence[P]) -> None:
        self.parameters = tuple(parameters)
        self.sparse: dict[P, int] = {}
        self.packs: dict[Any, Pack] = {}


@dataclass(frozen=True)
class Setup(Generic[P]):
    """The values that all reductions of one optimizer share."""

    binding: Binding[P]
    names: Mapping[P, str]
    compressors: Mapping[P, GradientCompressor]
    options: Options
    claim: Claim

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The fields of each request."""
        factor = self.options.gradient_predivide_factor
        return {"op": self.options.op, "prescale_factor": 1 / factor, "postscale_factor": float(factor)}


class Reduction(Generic[P]):
    """Combines the gradients of ``members`` of ``bucket`` over all ranks as one group, in one or more rounds.

    Parameters without a gradient get one of zeros. Small gradients travel packed into one tensor, if the compressor
    allows it. Large ones travel in place, because the backend packs in pieces that stay in the cache. Sparse ones are
    gathered, uncompressed, each on its own.

    The names in flight have the number of the optimizer as a prefix. Only those of its *lead* bucket do not, so that
    ranks with different numbers meet there: the number is a part of the tag, which all ranks must give alike.

    A bucket remembers which gradients the ranks agreed to be sparse. Ranks may remember differently: a rank that had
    joined, or that has a new optimizer, missed the agreement. Therefore the first round has the same names on all
    ranks, regardless of their memory: an empty tensor stands for gradients that are gathered. The memory is a part of
    the tag, and a rank that finds another sparse gradient sends tensors that match no others.

    Where ranks differ, all ranks see a mismatch. They then exchange their numbers and the kinds of their gradients
    (``layout``), and agree, or raise an error that names the difference. Sparse gradients are gathered once the first
    round has passed, because then all ranks gather the same ones.
    """

    def __init__(self, bucket: Bucket[P], members: Sequence[P], setup: Setup[P], leads: bool) -> None:
        self.leads = leads
        self._bucket = bucket
        self._members = dict.fromkeys(members)
        self._setup = setup
        self._binding = setup.binding
        self._claim = setup.claim if leads else None
        own = label(bucket.parameters, setup.names)
        self._label = f"optimizer.{own}" if leads else setup.claim.prefix + own
        as_dense = setup.options.sparse_as_dense
        self._absent = self._complete()
        self._from_sparse = self._densify() if as_dense else {}
        self._agreed: dict[P, int] = {} if as_dense else bucket.sparse
        self._sparse: dict[P, Callable[[], Tensor]] = {}
        self._course = self._travel()
        self._handle: InFlight | None = next(self._course, None)

    def advance(self) -> bool:
        """Wait for the round in flight and start the next. Returns True if no round was left, so that all is complete.

        A lead bucket also returns when the ranks have agreed on the number; its gradients have not changed then.
        Raises the engine's errors.
        """
        if self._handle is not None:
            self._handle = self._after(self._handle)
        if self._handle is None:
            while self._sparse:
                parameter, finish = self._sparse.popitem()
                self._binding.set_gradient(parameter, finish())
            for parameter, dimensions in self._from_sparse.items():
                self._sparsify(parameter, dimensions)
        return self._handle is None

    def _after(self, handle: InFlight) -> InFlight | None:
        try:
            combined = self._binding.wait(handle)
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
                self._binding.wait(self._handle)
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

    def _attempt(self) -> Generator[InFlight, Sequence[Tensor], bool]:
        """Whether gradients are complete; False where this rank must agree first. MismatchError where ranks differ."""
        journeys = list(_journeys(self._bucket, self._members, self._setup, self._agreed))
        if self._has_unknown():
            yield self._start([self._binding.marker() for _ in journeys], self._label)
            return False
        yield from self._rounds(journeys)
        return True

    def _has_unknown(self) -> bool:
        dimensions, agreed = self._binding.sparse_dimensions, self._agreed
        return any(dimensions(self._gradient(each)) is not None for each in self._members if each not in agreed)

    def _rounds(self, journeys: list[Journey]) -> Course:
        combined: Sequence[Tensor | None] = [None] * len(journeys)
        for number in count():
            going, tensors = [], []
            for journey, tensor in zip(journeys, combined, strict=True):
                with suppress(StopIteration):
                    tensors.append(journey.send(tensor))
                    going.append(journey)
            if not tensors:
                return
            journeys, combined = going, (yield self._start_round(tensors, number))
            if number == 0:
                yield from self._pass_first()

    def _start_round(self, tensors: Sequence[Tensor], number: int) -> InFlight:
        if number:
            return self._start(tensors, f"{self._label}:{number}")
        return self._start(tensors, self._label, self._tag())

    def _pass_first(self) -> Course:
        """The ranks agree. Other buckets are sent before gradients change, because gradients may share memory."""
        if self._claim is not None and not self._claim.is_agreed:
            self._claim.is_agreed = True
            yield PAUSE
        self._sparse = {each: self._start_sparse(each) for each in self._members if each in self._agreed}

    def _tag(self) -> int:
        number = (self._claim.number or 0) if self._claim else 0
        if not (number or self._agreed):
            return 0
        sparse = {place: self._agreed.get(each) for place, each in enumerate(self._bucket.parameters)}
        return fingerprint(number, {place: known for place, known in sparse.items() if known is not None})

    def _agree(self, error: MismatchError | None) -> Course:
        """Exchange numbers and layouts; MismatchError where ranks cannot agree, or agree but had an ``error``."""
        own, name = self._rows(), f"layout.{self._label}"
        handle = start(Operation.ALLGATHER, gathered, own, name, self._setup.options.process_set)
        (rows,) = yield handle
        layouts, proposals = _read(rows)
        is_new = self._take_number(proposals)
        difference = differences(self._names_of_bucket(), layouts)
        if difference or not (is_new or has_news(layouts)):
            raise self._explained(difference or error) from error
        parameters = self._bucket.parameters
        common = {parameters[index]: dimensions for index, dimensions in common_sparse(layouts).items()}
        self._agreed.update(common)
        for parameter in self._absent & common.keys():
            self._sparsify(parameter, common[parameter])

    def _rows(self) -> npt.NDArray[np.int64]:
        """Rank and number of parameters; the proposal; the entry of each parameter."""
        proposal = self._claim.propose() if self._claim else Proposal(0, True, 0)
        entries = [self._entry(parameter) for parameter in self._bucket.parameters]
        return np.array([(basics.rank(), len(entries), 0), proposal, *entries], np.int64)

    def _take_number(self, proposals: Sequence[Proposal]) -> bool:
        """Adopt the number on which the ranks agree; whether they had different ones."""
        if self._claim is None:
            return False
        number = choose(proposals)
        if number is None:
            self._abort(proposals)
        self._claim.adopt(number)
        return len({proposal.number for proposal in proposals}) > 1

    def _abort(self, proposals: Sequence[Proposal]) -> NoReturn:
        """The ranks step different optimizers: other tensors of these would wait for ever, so the engine ends."""
        numbers = sorted({proposal.number for proposal in proposals})
        error = MismatchError(
            f"the ranks step different DistributedOptimizers with the same parameter names, those with the numbers "
            f"{numbers}; let all ranks make their optimizers, and call step(), in the same order, or give the "
            f"parameters of each optimizer other names. The parameters in {self._label!r}: "
            f"{', '.join(self._names_of_bucket())}"
        )
        basics.engine().abort(error)
        raise error

    def _explained(self, problem: object) -> MismatchError:
        return MismatchError(f"{problem}. The parameters in {self._label!r}: {', '.join(self._names_of_bucket())}")

    def _names_of_bucket(self) -> list[str]:
        return [self._setup.names[parameter] for parameter in self._bucket.parameters]

    def _entry(self, parameter: P) -> tuple[int, int, int]:
        """See :data:`hvd_cluster.optimizer.layout.Layouts`."""
        if parameter not in self._members:
            kind = FROZEN
        elif parameter in self._absent:
            kind = ABSENT
        else:
            dimensions = self._binding.sparse_dimensions(self._gradient(parameter))
            kind = DENSE if dimensions is None else dimensions
        return kind, self._binding.count(parameter), int(parameter in self._agreed)

    def _start(self, tensors: Sequence[Tensor], name: str, tag: int = 0) -> InFlight:
        fields = self._setup.fields | {"tag": tag} if tag else self._setup.fields
        return self._binding.start(tensors, name, self._setup.options.process_set, fields)

    def _start_sparse(self, parameter: P) -> Callable[[], Tensor]:
        options, factor = self._setup.options, self._setup.options.gradient_predivide_factor
        name = f"{self._setup.claim.prefix}gradient.{self._setup.names[parameter]}"
        return self._binding.start_sparse(self._gradient(parameter), name, factor, options.op, options.process_set)

    # Gradients.

    def _gradient(self, parameter: P) -> Tensor:
        return _gradient(self._binding, parameter)

    def _complete(self) -> set[P]:
        """Make gradients sparse where the ranks agreed on that; returns the parameters that get a gradient of zeros."""
        gradient = self._binding.gradient
        absent = {parameter for parameter in self._members if gradient(parameter) is None}
        for parameter in absent:
            self._binding.set_zeros(parameter)
        for parameter, dimensions in self._bucket.sparse.items():
            if parameter in self._members:
                self._sparsify(parameter, dimensions)
        return absent

    def _densify(self) -> dict[P, int]:
        """Make sparse gradients dense; returns the number of sparse dimensions of each."""
        found = {each: self._binding.sparse_dimensions(self._gradient(each)) for each in self._members}
        sparse = {each: dimensions for each, dimensions in found.items() if dimensions is not None}
        self._bucket.sparse.update(sparse)
        for parameter in sparse:
            self._binding.set_gradient(parameter, self._binding.to_dense(self._gradient(parameter)))
        return sparse

    def _sparsify(self, parameter: P, dimensions: int) -> None:
        gradient = self._gradient(parameter)
        if self._binding.sparse_dimensions(gradient) is None:
            self._binding.set_gradient(parameter, self._binding.to_sparse(gradient, dimensions))


def _read(rows: npt.NDArray[np.int64]) -> tuple[list[tuple[int, list[tuple[int, int, int]]]], list[Proposal]]:
    """The layouts of all ranks, and their proposals, from the gathered rows of each."""
    layouts, proposals, entries = [], [], iter([tuple(row) for row in rows.tolist()])
    for rank, count_of_rank, _ in entries:
        number, is_agreed, busy = next(entries)
        proposals.append(Proposal(number, bool(is_agreed), busy))
        layouts.append((rank, [next(entries) for _ in range(count_of_rank)]))
    return layouts, proposals


def _gradient(binding: Binding[P], parameter: P) -> Tensor:
    gradient = binding.gradient(parameter)
    if gradient is None:
        raise EngineError("a gradient was removed while it was in flight; keep .grad until step() has returned")
    return gradient


def _journeys(bucket: Bucket[P], parameters: Iterable[P], setup: Setup[P], sparse: Container[P]) -> Iterator[Journey]:
    """The same number of journeys in the same order, for any ``sparse``."""
    binding, compressors = setup.binding, setup.compressors
    packs: dict[Any, list[P]] = {}
    for parameter in parameters:
        size, compressor = binding.size(_gradient(binding, parameter)), compressors[parameter]
        if size.bytes <= SMALL_BYTES and compressor.elementwise:
            packs.setdefault(size.kind, []).append(parameter)
        else:
            is_gathered = parameter in sparse
            yield (
                _placeholder(binding, parameter) if is_gathered else _alone(binding, parameter, compressors[parameter])
            )
    for kind, members in packs.items():
        dense = [parameter for parameter in members if parameter not in sparse]
        if not dense:
            yield _placeholder(binding, members[0])
        elif len(dense) == 1:
            yield _alone(binding, dense[0], compressors[dense[0]])
        else:
            yield _packed(binding, bucket, kind, dense, compressors[dense[0]])


def _placeholder(binding: Binding[P], parameter: P) -> Journey:
    yield binding.placeholder(parameter)


def _alone(binding: Binding[P], parameter: P, compressor: GradientCompressor) -> Journey:
    gradient = _gradient(binding, parameter)
    binding.incoming(gradient, (yield from compressor.rounds(binding.outgoing(gradient))))


def _packed(
    binding: Binding[P], bucket: Bucket[P], kind: Any, parameters: Sequence[P], compressor: GradientCompressor
) -> Journey:
    gradients = [_gradient(binding, parameter) for parameter in parameters]
    pack = bucket.packs[kind] = binding.pack(gradients, bucket.packs.get(kind))
    pack.spread((yield from compressor.rounds(pack.tensor)), gradients)
