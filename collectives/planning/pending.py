"""A name that some members have submitted and others have not."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from collectives.api import Operation, Request
from collectives.planning.messages import Rejection, Response
from collectives.planning.response_cache import Known, ResponseCache
from collectives.planning.waiting import Waiting

__all__ = ["Pending"]


@dataclass(slots=True)
class Pending:
    """``by_id`` has the ranks that sent only the id of ``known``, ``requests`` the whole requests of the others.

    ``rejected`` has the ranks on which the call failed.

    Ranks whose ids come in one message stay together: a host costs one step, for any number of ranks.
    """

    members: tuple[int, ...]
    operation: Operation
    since: float
    known: Known | None = None
    by_id: list[tuple[int, ...]] = field(default_factory=list)
    requests: dict[int, Request] = field(default_factory=dict)
    rejected: dict[int, Rejection] = field(default_factory=dict)
    count: int = 0

    def add_known(self, ranks: tuple[int, ...], known: Known) -> None:
        """``ranks`` submitted the same requests as the last time."""
        self.known = known
        self.by_id.append(ranks)
        self.count += len(ranks)

    def add(self, rank: int, request: Request) -> None:
        """``rank`` submitted ``request``."""
        self.requests[rank] = request
        self.count += 1

    def reject(self, rank: int, rejection: Rejection) -> None:
        """The call failed on ``rank``."""
        self.rejected[rank] = rejection
        self.count += 1

    def withdraw(self, rank: int) -> bool:
        """Forget the rejection of ``rank``; whether there was one."""
        found = self.rejected.pop(rank, None) is not None
        self.count -= found
        return found

    def abandon(self, rank: int) -> bool:
        """Forget that ``rank`` has submitted it; whether it had."""
        found = self.requests.pop(rank, None) is not None
        if not found:
            before = self.by_id
            self.by_id = [rest for ranks in before if (rest := tuple(each for each in ranks if each != rank))]
            found = sum(map(len, self.by_id)) < sum(map(len, before))
        self.count -= found
        return found

    @property
    def first(self) -> Request | None:
        """One of the requests; None where there is none."""
        known = None if self.known is None else self.known.response.request
        return next(iter(self.requests.values()), known)

    @property
    def group(self) -> str:
        """The group of the first request; empty where there is none."""
        first = self.first
        return first.group if first else ""

    def lacks_only(self, joined: Collection[int]) -> bool:
        """Whether all members have submitted, but for some of ``joined``."""
        if self.count + len(joined) < len(self.members):
            return False  # called once per rank: a look at all ranks each time would cost the square of their number
        submitted = self.answered()
        return all(rank in submitted or rank in joined for rank in self.members)

    @property
    def last(self) -> int:
        """The rank that submitted last, among those that sent the whole request."""
        return next(reversed(self.requests))

    def submitted(self) -> set[int]:
        """The ranks that have submitted."""
        return {*self.requests, *(rank for ranks in self.by_id for rank in ranks)}

    def answered(self) -> set[int]:
        """The ranks that have submitted or rejected it."""
        return {*self.submitted(), *self.rejected}

    def unchanged(self, cache: ResponseCache) -> Response | None:
        """The response of the last time, if it still holds: the same ranks sent the id, and it is still known."""
        known = self.known
        if (
            known is None
            or self.requests
            or self.rejected
            or len(known.requests) != self.count
            or known.response.id not in cache
        ):
            return None
        return known.response

    def all_requests(self) -> dict[int, Request]:
        """The request of each rank, by rank."""
        requests = dict(self.requests)
        if self.known is not None:
            known = self.known.requests
            requests.update((rank, known[rank]) for ranks in self.by_id for rank in ranks)
        return dict(sorted(requests.items()))

    def waiting(self, joined: Collection[int]) -> Waiting:
        """The ranks that have submitted, and those of the others that have not joined."""
        answered = self.answered()
        missing = tuple(rank for rank in self.members if rank not in answered and rank not in joined)
        return Waiting(self.since, missing, tuple(sorted(self.submitted())))
