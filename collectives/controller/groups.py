"""Grouped tensors: all tensors of a group run, or none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from collectives.controller.agreement import Disagreement
from collectives.controller.messages import Response

Label = tuple[int, str]


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A tensor that is ready, and the ranks that submitted it."""

    response: Response
    ranks: tuple[int, ...]


@dataclass(slots=True)
class _Refused:
    """A group that failed, and how many of its tensors, which will be refused, each rank has still to submit."""

    why: Disagreement
    outstanding: dict[int, int]


class Groups:
    """Holds the ready tensors of each group until the group is complete. A label is a process set and a name."""

    def __init__(self) -> None:
        self._ready: dict[Label, list[GroupMember]] = {}
        self._keys: set[tuple[int, str]] = set()
        self._refused: dict[Label, _Refused] = {}

    def add(self, member: GroupMember) -> list[GroupMember]:
        """The whole group, if ``member`` completes it."""
        request = member.response.request
        label = (request.process_set, request.group)
        group = self._ready.setdefault(label, [])
        group.append(member)
        self._keys.add(request.key)
        return self.take(label) if len(group) == request.group_size else []

    def holds(self, key: tuple[int, str]) -> bool:
        """Whether the tensor ``key`` is ready and waits for others of its group."""
        return key in self._keys

    def has_begun(self, label: Label) -> bool:
        """Whether some tensors of the group are ready, so that all members have submitted the group."""
        return label in self._ready

    def take(self, label: Label) -> list[GroupMember]:
        """Remove and return the ready tensors of a group."""
        group = self._ready.pop(label, [])
        self._keys.difference_update(member.response.request.key for member in group)
        return group

    def take_set(self, process_set: int) -> list[GroupMember]:
        """The ready tensors of all groups of a process set that is removed, whose id the next one may get."""
        self._refused = {label: refused for label, refused in self._refused.items() if label[0] != process_set}
        labels = [label for label in self._ready if label[0] == process_set]
        return [member for label in labels for member in self.take(label)]

    def refuse(self, label: Label, why: Disagreement, outstanding: Mapping[int, int]) -> None:
        """The group has failed: refuse its tensors that arrive later. ``outstanding`` has their number by rank.

        A rank submits a group at once, but a relay may pass on its tensors one by one.
        """
        awaited = {rank: count for rank, count in outstanding.items() if count > 0}
        if awaited:
            self._refused[label] = _Refused(why, awaited)

    def refusal(self, label: Label, rank: int) -> Disagreement | None:
        """Why a tensor of the group that ``rank`` submits now must fail; None if it need not."""
        refused = self._refused.get(label)
        if refused is None or rank not in refused.outstanding:
            return None
        refused.outstanding[rank] -= 1
        if not refused.outstanding[rank]:
            del refused.outstanding[rank]
        if not refused.outstanding:
            del self._refused[label]
        return refused.why
