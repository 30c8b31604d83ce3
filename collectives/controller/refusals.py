"""Tensors that do not run: each ends with one error on all ranks that submitted it, and a group as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from collectives.api import Request
from collectives.controller.agreement import Disagreement, explain_rejections
from collectives.controller.groups import GroupMember, Groups
from collectives.controller.messages import Refuse
from collectives.controller.releases import Outbox, Releases, refusal
from collectives.controller.submissions import Pending, Rejections

Key = tuple[int, str]


class Refusals:
    """Takes tensors out of ``pending``, of ``groups``, of ``rejections`` and of ``releases``, and refuses them.

    ``urgent`` has the tensors that a caller waits for.
    """

    def __init__(
        self,
        outbox: Outbox,
        pending: dict[Key, Pending],
        groups: Groups,
        rejections: Rejections,
        releases: Releases,
        urgent: set[Key],
    ) -> None:
        self._outbox = outbox
        self._pending = pending
        self._groups = groups
        self._rejections = rejections
        self._releases = releases
        self._urgent = urgent

    def refuse(self, key: Key, ranks: Iterable[int], why: Disagreement) -> None:
        """End the tensor ``key`` on ``ranks``."""
        self._urgent.discard(key)
        self._outbox.refuse(key, ranks, why)

    def is_refused(self, rank: int, request: Request) -> bool:
        """Whether the group of ``request``, which ``rank`` submits now, has failed: then the tensor fails, too."""
        why = self._groups.refusal((request.process_set, request.group), rank)
        if why is not None:
            self.refuse(request.key, (rank,), why)
        return why is not None

    def fail(self, key: Key, pending: Pending, why: Disagreement) -> None:
        """The ranks disagree about ``key``: it fails, with its group, on all ranks that submitted it."""
        requests = pending.all_requests()
        self._end(key, pending, why)
        groups = {request.group for request in requests.values() if request.group}
        if groups:
            self._fail_groups(key[0], groups, requests, why)

    def _end(self, key: Key, pending: Pending, why: Disagreement) -> None:
        self._releases.forget(key)
        self.refuse(key, pending.answered(), why)

    def _fail_groups(
        self, process_set: int, groups: set[str], requests: Mapping[int, Request], why: Disagreement
    ) -> None:
        outstanding = {group: Counter[int]() for group in groups}
        for rank, request in requests.items():
            if request.group:
                outstanding[request.group][rank] = request.group_size - 1
        for group in groups:
            for member in self._groups.take((process_set, group)):
                outstanding[group].subtract(member.ranks)
                self.discard(member, why)
        for submitted in self._fail_pending(process_set, groups, why):
            for rank, request in submitted.items():
                outstanding.get(request.group, Counter[int]())[rank] -= 1
        for group, ranks in outstanding.items():
            self._groups.refuse((process_set, group), why, ranks)
        for key in self._rejections.of_groups(process_set, groups):
            self.dismiss(key)

    def _fail_pending(
        self, process_set: int, groups: Collection[str], why: Disagreement
    ) -> Sequence[Mapping[int, Request]]:
        """End the pending tensors of the groups; returns the requests of each."""
        failed = []
        for key, pending in list(self._pending.items()):
            requests = pending.all_requests() if key[0] == process_set else {}
            if any(request.group in groups for request in requests.values()):
                del self._pending[key]
                self._end(key, pending, why)
                failed.append(requests)
        return failed

    def discard(self, member: GroupMember, why: Disagreement) -> None:
        """An agreed tensor does not run, because others of its group cannot."""
        self._releases.discard(member.response)
        self.refuse(member.response.request.key, member.ranks, why)

    def dismiss_call(self, key: Key) -> None:
        """As :meth:`dismiss`, for all tensors of a group: these ranks have rejected groups of different lengths."""
        groups = self._rejections.groups(key)
        self.dismiss(key)
        for other in self._rejections.of_groups(key[0], groups):
            self.dismiss(other)

    def dismiss(self, key: Key) -> None:
        """No rank can submit the tensor any more, and all that made the call have rejected it."""
        self.refuse(key, self._rejections.take(key), Disagreement("every rank has refused the call"))

    def announced(self) -> tuple[Refuse, ...]:
        """The refusals of the tensors that some ranks have rejected, and that others may still submit."""
        rejected = {key: pending.rejected for key, pending in self._pending.items()} | self._rejections.all()
        explained = ((key, explain_rejections(by_rank)) for key, by_rank in rejected.items())
        return tuple(refusal(key, why) for key, why in explained if why is not None)

    def remove_set(self, process_set: int) -> None:
        """The process set is removed: its tensors in flight fail."""
        why = Disagreement(f"process set {process_set} was removed while the tensor was in flight")
        for key in [key for key in self._pending if key[0] == process_set]:
            self.refuse(key, self._pending.pop(key).submitted(), why)
        for member in self._groups.take_set(process_set):
            self.discard(member, why)
        self._rejections.remove_set(process_set)
