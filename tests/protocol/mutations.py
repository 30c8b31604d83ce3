"""Faults that are put into the driver or into the ranks on purpose: a search that sees them may be believed."""

import contextlib
from unittest import mock

from executors.driver.driver import Driver
from executors.membership import Membership
from executors.membership.deaths import Losses
from tests.protocol.cases import hosts, notice
from tests.protocol.ranks import Rules
from tests.protocol.search import Case

TWO = Case({"a": 1, "b": 1}, steps=1, trains=True)
NEWCOMER = Case({"a": 1}, changes=(hosts(a=1, b=1),), most=2, steps=1)
HOST_LEAVES = Case({"a": 1, "b": 1}, changes=(hosts(c=1),), steps=1, trains=True)
NOTICE = Case({"a": 1, "b": 1, "c": 1}, changes=(notice(2),), most=3, trains=True)

STUCK = "nothing can happen any more"
STALE = "begins with commit"
LOST = "success, though the end of a rank is lost"


def nothing(self, *_):
    """In the place of a method that does something."""


def _given(value):
    return lambda self, *_: value


def _has_workers(self):
    return self.published.round < 0 or bool(self._workers)


def _show_first(self, world, show=Driver._show):
    if world.round == 0:
        show(self, world)


FAULTS = {
    "all losses count as repaired": (Losses, "unrepaired", _given(()), TWO, LOST),
    "each lost worker counts as one that has left": (Membership, "has_left", _given(True), TWO, LOST),
    "a world needs no worker with the state": (
        Membership,
        "_with_state",
        lambda self, workers: workers,
        HOST_LEAVES,
        STALE,
    ),
    "newcomers go on alone": (Membership, "_is_anybody_left", _has_workers, NEWCOMER, STALE),
    "the driver does not hear of success": (Driver, "done", nothing, TWO, STUCK),
    "the driver does not hear of kills": (Driver, "failed", nothing, TWO, STUCK),
    "the reason of a loss never comes": (Losses, "is_open", property(_given(True)), TWO, STUCK),
    "ranks do not hear of later worlds": (Driver, "_show", _show_first, TWO, STUCK),
}
RULES = {
    "only some ranks skip the sync": (Rules(agree_on_skips=False), NOTICE, "some ranks skip the sync"),
    "a world has formed before all have the state": (Rules(meet=False), NEWCOMER, STALE),
}
MUTATIONS = [*FAULTS, *RULES]


@contextlib.contextmanager
def mutation(name):
    """With that fault: the case and the rules that show it, and the violation."""
    if name in RULES:
        rules, case, shown = RULES[name]
        yield case, rules, shown
        return
    owner, attribute, replacement, case, shown = FAULTS[name]
    with mock.patch.object(owner, attribute, replacement):
        yield case, None, shown
