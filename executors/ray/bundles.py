"""Pure: the bundles of a placement group -> how many workers of a job each of its nodes may have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from executors.counted import counted
from executors.ray.capacity import Resources, Share, count_slots, fits
from executors.ray.shortage import show

__all__ = ["Bundle", "bundle_for", "room", "slots_in", "too_small", "used_by", "within"]


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle of a placement group on ``node``: its resources, without those of the task that drives the job.

    ``free`` are those that nobody uses now.
    """

    index: int
    node: str
    total: Resources = field(default_factory=dict)
    free: Resources = field(default_factory=dict)


def within(index: int, group: str, resources: Resources) -> dict[str, float]:
    """The part of ``resources`` that belongs to bundle ``index`` of ``group``: Ray calls its CPUs CPU_group_0_<id>."""
    end = f"_group_{index}_{group}"
    return {name.removesuffix(end): amount for name, amount in resources.items() if name.endswith(end)}


def used_by(spec: Resources, own: Resources) -> dict[str, float]:
    """The rest of a bundle of ``spec`` beside ``own``."""
    return {name: amount - own.get(name, 0.0) for name, amount in spec.items()}


def room(bundles: Sequence[Bundle], need: Resources) -> int:
    """How many workers with ``need`` each the bundles can hold when nobody else uses them."""
    return sum(fits(need, bundle.total) for bundle in bundles)


def slots_in(
    bundles: Sequence[Bundle], need: Resources, shares: Mapping[str, Share], before: Mapping[str, int]
) -> dict[str, int]:
    """The workers that each node may have in the group, as :func:`executors.ray.capacity.slots`."""
    nodes = dict.fromkeys(bundle.node for bundle in bundles)
    free = {node: sum(fits(need, each.free) for each in bundles if each.node == node) for node in nodes}
    total = {node: room([each for each in bundles if each.node == node], need) for node in nodes}
    return count_slots(free, total, shares, before)


def bundle_for(bundles: Sequence[Bundle], need: Resources, node: str, taken: Sequence[int]) -> int:
    """The index of the bundle on ``node`` for one more worker, while the job has workers in those ``taken``.

    It is the one with the most room: Ray counts late what was taken. -1, any bundle, if the group has none there.
    """
    own = Counter(taken)
    best = max(
        (bundle for bundle in bundles if bundle.node == node),
        key=lambda bundle: (fits(need, bundle.free) > 0, fits(need, bundle.total) - own[bundle.index]),
        default=None,
    )
    return -1 if best is None else best.index


def too_small(wanted: str, count: int, need: Resources, bundles: Sequence[Bundle]) -> str:
    """Why ``count`` workers, which the argument ``wanted`` asks for, are too many for the group, and the remedy."""
    has = room(bundles, need)
    shown = "; ".join(show(bundle.total) for bundle in bundles) or "none"
    lower = f"lower {wanted} to {has}, " if has else ""
    return (
        f"{wanted} is {count}, but the current placement group has room for {counted(has, 'worker')} with {show(need)} "
        f"each beside this task; its bundles have room for: {shown}. Do one of these: {lower}make the group larger, or "
        "set use_current_placement_group=False"
    )
