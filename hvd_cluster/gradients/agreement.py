"""How ranks that differ about a bucket agree: they exchange the numbers of the optimizer and the kinds of gradients."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from collectives.api import InvalidRequestError, MismatchError, Operation, RefusedCallError
from hvd_cluster.comparison.twins import ModelPlace
from hvd_cluster.core import basics
from hvd_cluster.gradients.attempt import EarlyGradients
from hvd_cluster.gradients.binding import InFlight
from hvd_cluster.gradients.bucket import Bucket, Setup
from hvd_cluster.gradients.duplicate_names import Claim, Proposal, choose
from hvd_cluster.gradients.gradients import Gradients
from hvd_cluster.gradients.layout import common_sparse, differences, has_news
from hvd_cluster.ops.arrays import gathered
from hvd_cluster.ops.operands import start

P = TypeVar("P")
Failure: TypeAlias = MismatchError | InvalidRequestError
"""Why a bucket did not travel: the ranks differ, or a rank refused the call; on that rank an InvalidRequestError."""
Rows: TypeAlias = npt.NDArray[np.int64]


class Agreement(Generic[P]):
    """For one bucket on its way; ``claim`` and ``attempt`` are those of the optimizer if this is its lead bucket."""

    def __init__(
        self,
        bucket: Bucket[P],
        gradients: Gradients[P],
        setup: Setup[P],
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

    def reach(self, failure: Failure | None) -> Generator[InFlight, Sequence[Any], None]:
        """Exchange numbers and layouts. All ranks do that, also one that refused the call.

        Raises MismatchError where ranks cannot agree; the ``failure`` where they agree, but did so before.
        """
        name = f"layout.{self._label}"
        (rows,) = yield start(Operation.ALLGATHER, gathered, self._rows(), name, self._setup.options.process_set)
        layouts, proposals, attempts = _read(rows)
        is_repeated = self._attempt is not None and self._attempt.settle(attempts)
        is_new = self._take_number(proposals) or is_repeated
        difference = differences(self._names(), layouts)
        if difference or not (is_new or has_news(layouts)):
            self._fail(difference, failure)
        parameters = self._bucket.parameters
        self._gradients.agree({parameters[index]: known for index, known in common_sparse(layouts).items()})

    def _rows(self) -> Rows:
        """Rank, number of parameters, and attempt; the proposal, in two rows; the entry of each parameter."""
        proposal = self._claim.propose() if self._claim else Proposal(0, True, 0)
        entries = [self._gradients.entry(parameter) for parameter in self._bucket.parameters]
        attempt = self._attempt.value if self._attempt else 0
        *first, place = proposal
        return np.array([(basics.rank(), len(entries), attempt), first, (*place, 0), *entries], np.int64)

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


def _read(rows: Rows) -> tuple[list[tuple[int, list[tuple[int, int, int]]]], list[Proposal], list[int]]:
    """The layouts of all ranks, their proposals and their attempts, from the gathered rows of each."""
    layouts, proposals, attempts, entries = [], [], [], iter([tuple(row) for row in rows.tolist()])
    for rank, count_of_rank, attempt in entries:
        attempts.append(attempt)
        number, is_agreed, busy = next(entries)
        place = ModelPlace(*next(entries)[:2])
        proposals.append(Proposal(number, bool(is_agreed), busy, place))
        layouts.append((rank, [next(entries) for _ in range(count_of_rank)]))
    return layouts, proposals, attempts
