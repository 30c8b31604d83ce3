"""Pure: calls of one name and of different kinds, each of which waits for ranks that have made another of them.

The kind is a part of a name in the engine, so an allreduce and a broadcast of one name may be in flight together, and
ranks may submit them in different orders. Where each rank has submitted one and can submit nothing more, they
wait for each other for ever.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from collectives.api import Request
from collectives.controller.agreement import Disagreement, describe_kinds
from collectives.controller.waits import Key, RankStatus, Waiting

_UNNAMED = re.compile(r"\.noname\.\d+$")


class Subject(NamedTuple):
    """The calls that may cross: those of one process set and one name of the user, empty for calls without one."""

    process_set: int
    name: str


class CallKind(NamedTuple):
    """The kind of a call, for messages, and its name in the engine."""

    text: str
    label: str


class KindMismatch(NamedTuple):
    """The tensors ``keys`` wait for each other. ``submitted`` has those of each rank; ``why`` tells of the kinds."""

    keys: tuple[Key, ...]
    submitted: Mapping[int, frozenset[Key]]
    why: Disagreement


def subject(request: Request) -> tuple[Subject, CallKind]:
    """The name of the call of ``request`` as the user knows it, and its kind."""
    label, operation = request.group or request.name, request.operation.label
    name = "" if _UNNAMED.search(label) else label.removeprefix(f"{operation}.")
    return Subject(request.process_set, name), CallKind(f"grouped {operation}" if request.group else operation, label)


def differ(kinds: Iterable[CallKind]) -> bool:
    """Whether calls of ``kinds`` may cross; each call without a name is one of its own."""
    return len({kind.text for kind in kinds}) > 1


def kind_mismatches(calls: Iterable[tuple[Subject, Mapping[CallKind, Mapping[Key, Waiting]]]]) -> list[KindMismatch]:
    """Those of ``calls`` that cross: each rank has submitted one of them, and each lacks ranks."""
    found = (_mismatch(subject.name, kinds) for subject, kinds in calls)
    return [mismatch for mismatch in found if mismatch is not None]


def _mismatch(name: str, kinds: Mapping[CallKind, Mapping[Key, Waiting]]) -> KindMismatch | None:
    tensors = {key: waiting for by_key in kinds.values() for key, waiting in by_key.items()}
    by_rank: dict[int, list[CallKind]] = {}
    for kind, by_key in kinds.items():
        for rank in {rank for waiting in by_key.values() for rank in waiting.submitted}:
            by_rank.setdefault(rank, []).append(kind)
    missing = {rank for waiting in tensors.values() for rank in waiting.missing}
    texts = {chosen[0].text for chosen in by_rank.values()}
    if len(texts) < 2 or any(len(chosen) > 1 for chosen in by_rank.values()) or not missing <= by_rank.keys():
        return None
    submitted = {rank: frozenset(kinds[chosen]) for rank, (chosen,) in sorted(by_rank.items())}
    why = describe_kinds(name, {rank: by_rank[rank][0].text for rank in submitted})
    return KindMismatch(tuple(sorted(tensors)), submitted, why)


def is_certain(mismatch: KindMismatch, answers: Sequence[RankStatus]) -> bool:
    """Whether all ranks wait for the tensors of ``mismatch`` alone, on every thread that calls collectives.

    ``answers`` are those given since the last tensor was submitted.
    """
    waits = {each.rank: {(call.process_set, call.name) for call in each.waits} for each in answers if each.is_held}
    return all(waits.get(rank, set()) & keys and waits[rank] <= keys for rank, keys in mismatch.submitted.items())
