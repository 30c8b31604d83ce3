"""The groups that a rank has in flight, and how much of each the coordinator has heard of."""

from __future__ import annotations

from collections import Counter

from collectives.api import Request

__all__ = ["Calls"]

Label = tuple[int, str]


class Calls:
    """Counts the tensors of each group: those in flight, and the unsent ones among them.

    A label is a process set and a name. So one tensor costs a step, however large its group is.
    """

    def __init__(self) -> None:
        self._in_flight: Counter[Label] = Counter()
        self._unsent: Counter[Label] = Counter()

    def submitted(self, request: Request) -> None:
        """A tensor of a group is in flight, and not sent yet."""
        self._in_flight[_label(request)] += 1
        self.returned(request)

    def returned(self, request: Request) -> None:
        """The coordinator has forgotten the tensor, so it will be sent again."""
        self._unsent[_label(request)] += 1

    def all_sent(self) -> None:
        """The coordinator hears of everything that was unsent."""
        self._unsent.clear()

    def ended(self, request: Request, is_unsent: bool) -> None:
        """The tensor is not in flight any more."""
        _decrease(self._in_flight, _label(request))
        if is_unsent:
            _decrease(self._unsent, _label(request))

    def is_unsent(self, request: Request) -> bool:
        """Whether the coordinator has heard of no tensor of the group that is in flight."""
        label = _label(request)
        return self._unsent[label] == self._in_flight[label]


def _label(request: Request) -> Label:
    return request.process_set, request.group


def _decrease(counter: Counter[Label], label: Label) -> None:
    counter[label] -= 1
    if not counter[label]:
        del counter[label]
