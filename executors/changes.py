"""Pure: the line that says how the workers of a job changed."""

from __future__ import annotations

from collections.abc import Mapping

from executors.api import Slot
from executors.counted import counted
from executors.worlds import Published

__all__ = ["describe", "losses", "summary"]


def describe(before: Published, after: Published, lost: Mapping[str, str], done: Mapping[str, str]) -> str:
    """How the workers changed from ``before`` to ``after``, such as "rank 2 on host b lost (killed by signal 9)".

    ``lost`` has the reason for each worker that was lost, and ``done`` says how each one ended that had its success.
    """
    former, present = before.slots(), after.slots()
    gone = [worker for worker in former if worker not in present]
    come = [worker for worker in present if worker not in former]
    parts = [f"{_place(former[worker])} lost ({lost[worker]})" for worker in losses(before, after, lost)]
    parts += [f"{_place(former[worker])} {done.get(worker, 'left')}" for worker in gone if worker not in lost]
    parts += [f"{_place(present[worker])} joined" for worker in come]
    return ", ".join(parts) or "the same ranks again"


def losses(before: Published, after: Published, lost: Mapping[str, str]) -> list[str]:
    """The workers of ``before`` that were lost on the way to ``after``."""
    present = after.slots()
    return [worker for worker in before.slots() if worker not in present and worker in lost]


def summary(world: Published, pause: float, steps: int) -> str:
    """The line about the change to ``world``, once it has formed."""
    ranks = counted(len(world.workers), "rank")
    return f"world {world.round}: {ranks}, {world.text}, resumed after {pause:.2f} s, {counted(steps, 'step')} lost"


def _place(slot: Slot) -> str:
    return f"rank {slot.rank} on host {slot.host}"
