"""The gradients of a bucket on their way: from the parameters to the engine and back."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Generic, TypeAlias, TypeVar

from collectives.api import DuplicateNameError, HorovodInternalError, InvalidRequestError, MismatchError, Operation
from collectives.stalls.deadlocks import PROPERTY as STANDSTILL
from hvd_cluster.core import basics
from hvd_cluster.gradients.agreement import Agreement, Failure
from hvd_cluster.gradients.attempt import EarlyGradients
from hvd_cluster.gradients.binding import InFlight
from hvd_cluster.gradients.bucket import Bucket, Setup
from hvd_cluster.gradients.buckets import label
from hvd_cluster.gradients.gradients import Gradients
from hvd_cluster.gradients.layout import fingerprint
from hvd_cluster.gradients.transfers import Originals, Transfer, advance, transfers
from hvd_cluster.ops.handles import HandleGroup
from hvd_cluster.ops.refusals import refuse

P = TypeVar("P")
Tensor: TypeAlias = Any
"""A gradient, or another tensor of the framework."""
Course: TypeAlias = Generator[InFlight, Sequence[Tensor], None]
"""Yields a handle, receives its results, and ends when nothing is left to start."""
PAUSE = HandleGroup((), tuple)
"""A handle that is done, and has no results."""


def full_name(bucket: Bucket[P], setup: Setup[P]) -> str:
    """The name in flight of a bucket that does not lead, in a first attempt."""
    return setup.claim.prefix + label(bucket.parameters, setup.names)


class BucketReduction(Generic[P]):
    """Combines the gradients of ``members`` of ``bucket`` over all ranks, in one or more rounds.

    Parameters without a gradient get one of zeros. Small gradients travel packed into one tensor, if the compressor
    allows it. Large ones travel in place, because the backend packs in pieces that stay in the cache. Sparse ones are
    gathered, uncompressed, each on its own.

    The names in flight have the number of the optimizer as a prefix. Only those of its *lead* bucket do not, so that
    ranks with different numbers meet there: the number is a part of the tag, which all ranks must give alike. So is
    the attempt. With ``originals`` gradients do not change until the first round of the lead bucket has passed.

    A bucket remembers which gradients the ranks agreed to be sparse. Ranks may remember differently: a rank that had
    joined, or that has a new optimizer, missed the agreement. Therefore the first round has the same names on all
    ranks, regardless of their memory: an empty tensor stands for gradients that are gathered. The memory is a part of
    the tag, and a rank that finds another sparse gradient sends tensors that match no others.

    Where ranks differ, all ranks see a mismatch. They then exchange their numbers and the kinds of their gradients
    (``agreement``), and agree, or raise an error that names the difference. So they do where a rank refuses the first
    round, because its compressor fails or its gradient cannot travel. Sparse gradients are gathered once the first
    round has passed, because then all ranks gather the same ones.
    """

    def __init__(
        self,
        bucket: Bucket[P],
        members: Sequence[P],
        setup: Setup[P],
        attempt: EarlyGradients,
        leads: bool,
        originals: Originals[P] | None = None,
    ) -> None:
        self.leads = leads
        self.has_passed = False
        self.originals = originals
        self._bucket = bucket
        self._setup = setup
        self._binding = setup.binding
        self._claim = setup.claim if leads else None
        self._attempt = attempt if leads else None
        self._label = (
            f"optimizer.{label(bucket.parameters, setup.names)}" if leads else full_name(bucket, setup) + attempt.suffix
        )
        self._gradients = Gradients(bucket, members, setup.binding, setup.options.sparse_as_dense)
        self._agreement = Agreement(bucket, self._gradients, setup, self._claim, self._attempt, self._label)
        self._sparse: dict[P, Callable[[], Tensor]] = {}
        self._refused: InvalidRequestError | None = None
        self._course = self._travel()
        self._handle: InFlight | None = next(self._course, None)

    def advance(self) -> bool:
        """Wait for the round in flight and start the next. Returns True if no round was left, so that all is complete.

        A lead bucket also returns when its first round has passed: the ranks have agreed on the number and on the
        attempt, and its gradients have not changed.
        Raises the engine's errors, and InvalidRequestError if a compressor failed or a gradient cannot travel.
        """
        if self._handle is not None:
            self._handle = self._after(self._handle)
        if self._handle is None:
            while self._sparse:
                parameter, finish = self._sparse.popitem()
                self._binding.set_gradient(parameter, finish())
            self._gradients.restore()
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

    def is_outdated(self, members: Sequence[P]) -> bool:
        """Whether a gradient has changed since, or others than those of ``members`` travel."""
        is_changed = self.originals is not None and self.originals.have_changed()
        return is_changed or self._gradients.members.keys() != set(members)

    def abandon(self) -> None:
        """Wait until nothing is in flight, so that the names are free; the contents of gradients are then undefined."""
        if self._handle is not None:
            with suppress(HorovodInternalError):
                self._binding.wait(self._handle)
        for finish in self._sparse.values():
            with suppress(HorovodInternalError):
                finish()

    def _travel(self) -> Course:
        failure: Failure | None = None
        while True:
            try:
                if (yield from self._try()):
                    return
            except MismatchError as error:
                if error.property == STANDSTILL:
                    basics.engine().abort(error)  # other tensors of this step would wait for ever
                    raise
                failure = error.with_traceback(None)  # the frames of a traceback would keep the optimizer alive
            except InvalidRequestError as error:
                if error is not self._refused:
                    raise
                failure = error.with_traceback(None)
            yield from self._agreement.reach(failure)

    def _try(self) -> Generator[InFlight, Sequence[Tensor], bool]:
        """Whether gradients are complete; False where this rank must agree first.

        MismatchError where ranks differ, or another rank refuses; InvalidRequestError where this rank does.
        """
        active = list(transfers(self._bucket, self._gradients, self._setup, self.originals))
        if self._gradients.has_unknown():
            yield self._start([self._binding.marker() for _ in active], self._label)
            return False
        yield from self._rounds(active)
        return True

    def _rounds(self, active: list[Transfer]) -> Course:
        combined: Sequence[Tensor | None] = [None] * len(active)
        for number in count():
            try:
                unfinished, tensors = advance(active, combined)
            except InvalidRequestError as error:
                self._report(error, number, len(active))
                raise
            if not tensors:
                return
            active, combined = unfinished, (yield self._start_round(tensors, number))
            if number == 0:
                yield from self._pass_first()

    def _report(self, error: InvalidRequestError, number: int, count_of_tensors: int) -> None:
        """A compressor failed. In a later round the others may wait or not, and are a step ahead: the engine ends."""
        if number == 0:
            self._refuse(error, self._label, count_of_tensors)
        elif any(self._setup.compressors[each].has_later_rounds for each in self._bucket.parameters):
            basics.engine().abort(HorovodInternalError(f"rank {basics.rank()}: {error}"))

    def _refuse(self, error: InvalidRequestError, name: str, count_of_tensors: int) -> None:
        self._refused = error
        length = count_of_tensors if self._is_group(count_of_tensors) else None
        refuse(error, Operation.ALLREDUCE, name, self._setup.options.process_set, length)

    def _start_round(self, tensors: Sequence[Tensor], number: int) -> InFlight:
        if number:
            return self._start(tensors, f"{self._label}:{number}")
        return self._start(tensors, self._label, self._tag())

    def _pass_first(self) -> Course:
        """The ranks agree. Other buckets are sent before gradients change, because gradients may share memory."""
        self.has_passed = True
        if self._claim is not None:
            self._claim.is_agreed = True
            yield PAUSE
        if self.originals is not None:
            self.originals.release()
        for parameter in self._gradients.members:
            if parameter in self._gradients.agreed:
                self._sparse[parameter] = self._start_sparse(parameter)

    def _tag(self) -> int:
        number = (self._claim.number or 0) + (self._claim.place.number << 60) if self._claim else 0
        number += self._attempt.value if self._attempt else 0
        agreed = self._gradients.agreed
        if not (number or agreed):
            return 0
        places = {place: agreed.get(each) for place, each in enumerate(self._bucket.parameters)}
        return fingerprint(number, {place: known for place, known in places.items() if known is not None})

    def _start(self, tensors: Sequence[Tensor], name: str, tag: int = 0) -> InFlight:
        fields = self._setup.options.fields | {"tag": tag} if tag else self._setup.options.fields
        process_set = self._setup.options.process_set
        try:
            if self._is_group(len(tensors)):
                return self._binding.start_group(tensors, name, process_set, fields)
            return self._binding.start(tensors[0], name, process_set, fields)
        except DuplicateNameError:  # the others meet the tensor that has the name here
            raise
        except InvalidRequestError as error:
            self._refuse(error, name, len(tensors))
            raise

    def _is_group(self, count_of_tensors: int) -> bool:
        return self._bucket.is_group or count_of_tensors > 1

    def _start_sparse(self, parameter: P) -> Callable[[], Tensor]:
        options, factor = self._setup.options, self._setup.options.gradient_predivide_factor
        name = f"{self._setup.claim.prefix}gradient.{self._setup.names[parameter]}"
        gradient = self._gradients.of(parameter)
        return self._binding.start_sparse(gradient, name, factor, options.op, options.process_set)
