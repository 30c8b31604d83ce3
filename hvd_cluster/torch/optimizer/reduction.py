"""The gradients of a bucket on their way: from the parameters to the engine and back, and where ranks differ."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence, Set
from contextlib import suppress
from hashlib import blake2b
from itertools import count
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch

from collectives import (
    CALL_MISMATCH,
    DuplicateNameError,
    HorovodInternalError,
    InvalidRequestError,
    MismatchError,
    Operation,
    RefusedCallError,
)
from hvd_cluster.core import basics
from hvd_cluster.gradients.duplicate_names import Claim, Proposal, choose
from hvd_cluster.gradients.layout import Rows, as_rows, common_sparse, differences, fingerprint, from_rows, has_news
from hvd_cluster.ops.arrays import gathered
from hvd_cluster.ops.refused_calls import refuse
from hvd_cluster.ops.submission import Handle, HandleGroup, start, start_group
from hvd_cluster.torch.operations.allgather import sparse_allreduce_async
from hvd_cluster.torch.operations.calls import synchronize
from hvd_cluster.torch.optimizer.rows import Portions
from hvd_cluster.torch.optimizer.transfers import (
    Bucket,
    Gradients,
    Originals,
    Setup,
    Transfer,
    advance,
    is_same_list,
    transfers,
)
from hvd_cluster.torch.tensors import of_other_shape

InFlight: TypeAlias = Handle | HandleGroup
Course: TypeAlias = Generator[InFlight, Sequence[Any], None]
"""Yields a handle, receives its results, and ends when nothing is left to start."""
Failure: TypeAlias = MismatchError | InvalidRequestError
"""Why a bucket did not travel: the ranks differ, or a rank refused the call; on that rank an InvalidRequestError."""
PAUSE = HandleGroup((), tuple)
"""A handle that is done, and has no results."""
LONGEST_PAUSE = 1000
"""Steps without gradients ahead, where earlier ones were in vain time and again."""
SETTLED = 1 << 16


class EarlyGradients:
    """Whether the gradients count that a rank has sent ahead of its step.

    Gradients travel during backward in the hope that nobody changes them before ``step()``. A script may do that: it
    clips them, or ``zero_grad()`` throws them away. Then the rank gives up this attempt, and sends all gradients again,
    under other names. The lead bucket travels in the step only, with a tag that says whether the rank has given up:
    where the ranks differ they see a mismatch, exchange that, and all of them send again.

    This is the present attempt of one optimizer: the first one, or after :meth:`give_up` the second.
    ``sent``: the buckets that this rank sent in the first attempt, if it gave that up. ``must_repeat``: other ranks
    gave it up, so that this rank has to. ``must_complete``: some rank may wait for a bucket that this rank did not
    send. ``is_shared``: some rank may have sent gradients ahead in this step.
    """

    def __init__(self) -> None:
        self.sent: Set[str] | None = None
        self.must_repeat = self.must_complete = self.is_shared = False
        self._is_eager = self._is_settled = False
        self._pause = self._left = 0

    def allows_ahead(self) -> bool:
        """Whether this rank may send gradients before the step."""
        return self._is_eager and self.sent is None and not self._left

    def begin_step(self, is_eager: bool) -> None:
        """``is_eager``: gradients of the next step may travel during backward.

        The ranks switch at the same batch. So none sends ahead unless each of them was eager in this step or the last.
        """
        self.is_shared = is_eager or self._is_eager
        self._is_eager = is_eager

    def end_step(self) -> None:
        """The step has ended. After an attempt in vain the next steps send nothing ahead, for longer each time."""
        if self.sent is not None and not self.must_repeat:
            self._left = self._pause = min(2 * self._pause + 1, LONGEST_PAUSE)
        elif self._left:
            self._left -= 1
        else:
            self._pause = max(0, self._pause - 1)
        self.sent = None
        self.must_repeat = self.must_complete = self._is_settled = False

    def give_up(self, sent: Collection[str]) -> None:
        """The gradients in ``sent`` buckets do not count."""
        self.sent = frozenset(sent)

    @property
    def suffix(self) -> str:
        """The end of names in the present attempt."""
        return "" if self.sent is None else ".again"

    @property
    def value(self) -> int:
        """The number by which the ranks compare their attempts: 0 for a first attempt."""
        if self._is_settled:
            return SETTLED
        if self.sent is None:
            return 0
        return int.from_bytes(blake2b(repr(sorted(self.sent)).encode(), digest_size=5).digest(), "big") + 1 << 17

    def settle(self, values: Collection[int]) -> bool:
        """Take in the ``value`` of each rank; whether they differ. Then all make a second attempt."""
        if len(set(values)) == 1:
            return False
        self.must_repeat = self.sent is None
        self.must_complete = not self.must_repeat
        self._is_settled = True
        return True


def full_name(bucket: Bucket, setup: Setup) -> str:
    """The name in flight of a bucket that does not lead, in a first attempt."""
    return setup.claim.prefix + bucket.label


class BucketReduction:
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

    Where ranks differ, all ranks see a mismatch. They then exchange their numbers and the kinds of their gradients, see
    :class:`Agreement`, and agree, or raise an error that names the difference. So they do where a rank refuses the
    first round, because its compressor fails or its gradient cannot travel. Sparse gradients are gathered once the
    first round has passed, because then all ranks gather the same ones.

    With ``portions`` a gradient that travels alone is reduce-scattered: each rank gets its portion, and the rest of the
    gradient stays as it was.
    """

    def __init__(
        self,
        bucket: Bucket,
        members: Sequence[torch.Tensor],
        setup: Setup,
        attempt: EarlyGradients,
        leads: bool,
        originals: Originals | None = None,
        portions: Portions | None = None,
    ) -> None:
        self.leads = leads
        self.has_passed = False
        self.originals = originals
        self._bucket = bucket
        self._setup = setup
        self._portions = portions
        self._operation = Operation.ALLREDUCE if portions is None else Operation.REDUCESCATTER
        self._claim = setup.claim if leads else None
        self._attempt = attempt if leads else None
        self._label = f"optimizer.{bucket.label}" if leads else full_name(bucket, setup) + attempt.suffix
        self._gradients = Gradients(bucket, members, setup.options.sparse_as_dense)
        self._sparse: dict[torch.Tensor, Callable[[], torch.Tensor]] = {}
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
                parameter.grad = finish()
            self._gradients.restore()
        return self._handle is None

    def _after(self, handle: InFlight) -> InFlight | None:
        try:
            combined = synchronize(handle)
        except MismatchError as error:
            return self._course.throw(error)
        try:
            return self._course.send(combined if isinstance(combined, tuple) else (combined,))
        except StopIteration:
            return None

    def is_outdated(self, members: Sequence[torch.Tensor]) -> bool:
        """Whether a gradient has changed since, or others than those of ``members`` travel."""
        is_changed = self.originals is not None and self.originals.have_changed()
        return is_changed or not is_same_list(self._gradients.members, members)

    def abandon(self) -> None:
        """Wait until nothing is in flight, so that the names are free; the contents of gradients are then undefined."""
        if self._handle is not None:
            with suppress(HorovodInternalError):
                synchronize(self._handle)
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
                if error.property == CALL_MISMATCH:
                    basics.engine().abort(error)  # other tensors of this step would wait for ever
                    raise
                failure = error.with_traceback(None)  # the frames of a traceback would keep the optimizer alive
            except InvalidRequestError as error:
                if error is not self._refused:
                    raise
                failure = error.with_traceback(None)
            agreement = Agreement(self._bucket, self._gradients, self._setup, self._claim, self._attempt, self._label)
            yield from agreement.reach(failure)

    def _try(self) -> Generator[InFlight, Sequence[torch.Tensor], bool]:
        """Whether gradients are complete; False where this rank must agree first.

        MismatchError where ranks differ, or another rank refuses; InvalidRequestError where this rank does.
        """
        active = list(transfers(self._bucket, self._gradients, self._setup, self.originals))
        if self._gradients.has_unknown():
            marker = torch.zeros(1, dtype=torch.uint8, device="cpu")  # it matches no tensor of another rank
            markers = [marker.clone() for _ in active]
            yield self._start(markers, self._label)
            return False
        yield from self._rounds(active)
        return True

    def _rounds(self, active: list[Transfer]) -> Course:
        combined: Sequence[torch.Tensor | None] = [None] * len(active)
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
        refuse(error, self._operation, name, self._setup.options.process_set, length)

    def _start_round(self, tensors: Sequence[torch.Tensor], number: int) -> InFlight:
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
        agreed = self._gradients.agreed
        for parameter in self._gradients.members if agreed else ():
            if parameter in agreed:
                self._sparse[parameter] = self._start_sparse(parameter)

    def _tag(self) -> int:
        claim, number = self._claim, self._attempt.value if self._attempt else 0
        if claim is not None:
            number += (claim.number or 0) + (0 if claim.is_agreed else claim.place.number << 60)
        agreed = self._gradients.agreed
        if not (number or agreed):
            return 0
        places = {place: agreed.get(each) for place, each in enumerate(self._bucket.parameters)}
        return fingerprint(number, {place: known for place, known in places.items() if known is not None})

    def _start(self, tensors: Sequence[torch.Tensor], name: str, tag: int = 0) -> InFlight:
        options, describe = self._setup.options, self._setup.spares.operand
        operation, where, how = self._operation, options.process_set, options.reduction
        try:
            if self._portions is not None:
                return self._start_portions(self._portions, tensors[0], name, tag)
            if self._is_group(len(tensors)):
                return start_group(operation, describe, tensors, tuple, name, where, how, tag=tag)
            return start(operation, describe, tensors[0], name, where, how, tag=tag)
        except DuplicateNameError:  # the others meet the tensor that has the name here
            raise
        except InvalidRequestError as error:
            self._refuse(error, name, len(tensors))
            raise

    def _start_portions(self, portions: Portions, tensor: torch.Tensor, name: str, tag: int) -> InFlight:
        """A tensor that stands for a gradient travels by the same operation, so that ranks that differ meet."""
        options, fits = self._setup.options, portions.fit(tensor)
        describe, splits = (portions.operand, portions.counts) if fits else (of_other_shape, ())
        where, how = options.process_set, options.reduction
        return start(self._operation, describe, tensor, name, where, how, tag=tag, splits=splits)

    def _is_group(self, count_of_tensors: int) -> bool:
        return self._bucket.is_group or count_of_tensors > 1

    def _start_sparse(self, parameter: torch.Tensor) -> Callable[[], torch.Tensor]:
        options, factor = self._setup.options, self._setup.options.gradient_predivide_factor
        name = f"{self._setup.claim.prefix}gradient.{self._setup.names[parameter]}"
        gradient, is_scaled = self._gradients.of(parameter), factor != 1.0
        given = gradient / factor if is_scaled else gradient
        finish = sparse_allreduce_async(given, name, options.op, options.process_set)

        def combined() -> torch.Tensor:
            return (finish() * factor if is_scaled else finish()).coalesce()

        return combined


class Agreement:
    """How ranks that differ about a bucket agree: they exchange the numbers of the optimizer and the layouts.

    ``claim`` and ``attempt`` are those of the optimizer if this is its lead bucket.
    """

    def __init__(
        self,
        bucket: Bucket,
        gradients: Gradients,
        setup: Setup,
        claim: Claim | None,
        attempt: EarlyGradients | None,
        label: str,
    ) -> None:
        self._bucket = bucket
        self._gradients = gradients
        self._setup = setup
        self._claim = claim
        self._attempt = attempt
        self._label = label

    def reach(self, failure: Failure | None) -> Course:
        """Exchange numbers and layouts. All ranks do that, also one that refused the call.

        Raises MismatchError where ranks cannot agree; the ``failure`` where they agree, but did so before.
        """
        name = f"layout.{self._label}"
        rows = np.array(self._rows(), np.int64)
        (found,) = yield start(Operation.ALLGATHER, gathered, rows, name, self._setup.options.process_set)
        layouts, proposals, attempts = from_rows(found.tolist())
        is_repeated = self._attempt is not None and self._attempt.settle(attempts)
        is_new = self._take_number(proposals) or is_repeated
        difference = differences(self._names(), layouts)
        if difference or not (is_new or has_news(layouts)):
            self._fail(difference, failure)
        parameters = self._bucket.parameters
        self._gradients.agree({parameters[index]: known for index, known in common_sparse(layouts).items()})

    def _rows(self) -> Rows:
        proposal = self._claim.propose() if self._claim else Proposal(0, True, 0)
        entries = [self._gradients.entry(parameter) for parameter in self._bucket.parameters]
        return as_rows(basics.rank(), entries, proposal, self._attempt.value if self._attempt else 0)

    def _take_number(self, proposals: Sequence[Proposal]) -> bool:
        """Adopt the number on which the ranks agree; whether they had different ones, or different places."""
        if self._claim is None:
            return False
        number = choose(proposals)
        if number is None:
            self._abort(proposals)
        self._claim.adopt(number)
        return len({(proposal.number, proposal.place) for proposal in proposals}) > 1

    def _abort(self, proposals: Sequence[Proposal]) -> NoReturn:
        """The ranks step different optimizers: other tensors of these would wait for ever, so the engine ends."""
        numbers = sorted({proposal.number for proposal in proposals})
        if len(numbers) == 1:  # of optimizers that no rank has stepped before
            numbers = sorted({proposal.place.number for proposal in proposals})
        error = MismatchError(
            f"the ranks step different DistributedOptimizers with the same parameter names, those with the numbers "
            f"{numbers}; let all ranks make their optimizers, and call step(), in the same order, or give the "
            f"parameters of each optimizer other names. {self._listed()}"
        )
        basics.engine().abort(error)
        raise error

    def _fail(self, difference: str | None, failure: Failure | None) -> NoReturn:
        if difference is None and isinstance(failure, RefusedCallError | InvalidRequestError):
            raise failure
        raise MismatchError(f"{difference or failure}. {self._listed()}") from failure

    def _listed(self) -> str:
        return f"The parameters in {self._label!r}: {', '.join(self._names())}"

    def _names(self) -> list[str]:
        return [self._setup.names[parameter] for parameter in self._bucket.parameters]
