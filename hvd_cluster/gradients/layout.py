"""Pure: the gradients that each rank has of a bucket, as numbers that travel, and how the ranks differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple, TypeAlias

from collectives import with_ranks
from hvd_cluster.comparison.twins import ModelPlace
from hvd_cluster.gradients.duplicate_names import Proposal

FROZEN, ABSENT, DENSE = -3, -2, -1
"""Kinds of gradients: of a parameter that is not trained, of one that backward did not reach, and of any other. The
kind of a sparse gradient is the number of its sparse dimensions."""

Entry: TypeAlias = tuple[int, int, int]
"""Kind, number of elements, 1 where the rank knew it to be sparse."""
Layouts: TypeAlias = Sequence[tuple[int, Sequence[Entry]]]
"""(Rank, entries of each parameter of the bucket)."""
Rows: TypeAlias = list[tuple[int, int, int]]

_DESCRIPTIONS = {FROZEN: "frozen", ABSENT: "absent", DENSE: "dense"}
_SAME_TRAINED = "let all ranks train the same parameters, see requires_grad"
_SAME_KIND = "give DistributedOptimizer sparse_as_dense=True, or let all ranks compute it in the same way"
_SAME_SIZE = "give all ranks the same model"


class Statements(NamedTuple):
    """What each rank says of a bucket: its layout, its proposal for the number of the optimizer, and its attempt."""

    layouts: Layouts
    proposals: Sequence[Proposal]
    attempts: Sequence[int]


def as_rows(rank: int, entries: Sequence[Entry], proposal: Proposal, attempt: int) -> Rows:
    """The statement of one rank: its rank, number of parameters and attempt; the proposal, in two rows; the entries."""
    number, is_agreed, busy, place = proposal
    return [(rank, len(entries), attempt), (number, int(is_agreed), busy), (*place, 0), *entries]


def from_rows(rows: Iterable[Sequence[int]]) -> Statements:
    """The statements of all ranks, from the rows of each, one after the other."""
    layouts, proposals, attempts, remaining = [], [], [], iter(rows)
    for rank, count_of_rank, attempt in remaining:
        attempts.append(attempt)
        number, is_agreed, busy = next(remaining)
        place = ModelPlace(*next(remaining)[:2])
        proposals.append(Proposal(number, bool(is_agreed), busy, place))
        entries = [next(remaining) for _ in range(count_of_rank)]
        layouts.append((rank, [(kind, count, known) for kind, count, known in entries]))
    return Statements(layouts, proposals, attempts)


def common_sparse(layouts: Layouts) -> dict[int, int]:
    """Index of a parameter -> number of sparse dimensions, of gradients that are sparse on all ranks that have one."""
    kinds = [set(column) - {ABSENT} for column in _columns(layouts, 0)]
    return {index: max(found) for index, found in enumerate(kinds) if len(found) == 1 and max(found) >= 0}


def has_news(layouts: Layouts) -> bool:
    """Whether ``layouts`` shows a sparse gradient that some rank did not know to be sparse."""
    known = list(_columns(layouts, 2))
    return any(not all(known[index]) for index in common_sparse(layouts))


def differences(names: Sequence[str], layouts: Layouts) -> str | None:
    """The text of the error, the same on all ranks, for the first parameter that they cannot combine; or None."""
    ranks = [rank for rank, _ in layouts]
    if len({len(entries) for _, entries in layouts}) > 1:
        lengths = [f"{len(entries)} parameters" for _, entries in layouts]
        return f"the bucket has {with_ranks(dict(zip(ranks, lengths, strict=True)))}; {_SAME_SIZE}"
    for name, kinds, counts in zip(names, _columns(layouts, 0), _columns(layouts, 1), strict=True):
        if len(set(counts)) > 1:
            said, remedy = [f"of {count} elements" for count in counts], _SAME_SIZE
        elif FROZEN in kinds and len(set(kinds)) > 1:
            said, remedy = [_described(kind) for kind in kinds], _SAME_TRAINED
        elif len(set(kinds) - {ABSENT}) > 1:
            said, remedy = [_described(kind) for kind in kinds], _SAME_KIND
        else:
            continue
        return f"the gradient of {name!r} is {with_ranks(dict(zip(ranks, said, strict=True)))}; {remedy}"
    return None


def fingerprint(number: int, sparse: Mapping[int, int]) -> int:
    """A tag that differs where ranks know different sparse gradients of a bucket, or a different ``number``.

    ``sparse``: index of a parameter -> number of sparse dimensions.
    """
    if not (number or sparse):
        return 0
    return int.from_bytes(blake2b(f"{number} {sorted(sparse.items())}".encode(), digest_size=7).digest(), "big")


def _columns(layouts: Layouts, aspect: int) -> Iterator[tuple[int, ...]]:
    return zip(*([entry[aspect] for entry in entries] for _, entries in layouts), strict=True)


def _described(kind: int) -> str:
    return _DESCRIPTIONS.get(kind, f"sparse in {kind} dimension{'s' * (kind != 1)}")
