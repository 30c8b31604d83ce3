"""Pure: what each rank has of a bucket's gradients, in numbers that travel, and what the ranks' differences mean."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from collectives.planning.agreement import name_ranks

__all__ = ["ABSENT", "DENSE", "FROZEN", "Layouts", "common_sparse", "differences"]

FROZEN, ABSENT, DENSE = -3, -2, -1
"""Kinds of gradients: of a parameter that is not trained, that backward did not reach, and neither. The kind of a
sparse one is the number of its sparse dimensions."""

Layouts = Sequence[tuple[int, Sequence[tuple[int, int]]]]
"""(Rank, (kind, number of elements) of each parameter of the bucket)."""

_WORDS = {FROZEN: "frozen", ABSENT: "absent", DENSE: "dense"}
_SAME_TRAINED = "let all ranks train the same parameters, see requires_grad"
_SAME_KIND = "give DistributedOptimizer sparse_as_dense=True, or let all ranks compute it in the same way"
_SAME_SIZE = "give all ranks the same model"


def common_sparse(layouts: Layouts) -> dict[int, int]:
    """Index of a parameter -> number of sparse dimensions, of gradients that are sparse wherever there is one."""
    kinds = [set(column) - {ABSENT} for column in _columns(layouts, 0)]
    return {index: max(found) for index, found in enumerate(kinds) if len(found) == 1 and max(found) >= 0}


def differences(names: Sequence[str], layouts: Layouts) -> str | None:
    """What the ranks have to be told, all the same, about the first parameter where they cannot go on; or None."""
    for name, kinds, counts in zip(names, _columns(layouts, 0), _columns(layouts, 1), strict=True):
        if len(set(counts)) > 1:
            said, remedy = [f"of {count} elements" for count in counts], _SAME_SIZE
        elif FROZEN in kinds and len(set(kinds)) > 1:
            said, remedy = [_word(kind) for kind in kinds], _SAME_TRAINED
        elif len(set(kinds) - {ABSENT}) > 1:
            said, remedy = [_word(kind) for kind in kinds], _SAME_KIND
        else:
            continue
        return f"the gradient of {name!r} is {_listed(said, [rank for rank, _ in layouts])}; {remedy}"
    return None


def _columns(layouts: Layouts, aspect: int) -> Iterator[tuple[int, ...]]:
    return zip(*([entry[aspect] for entry in entries] for _, entries in layouts), strict=True)


def _word(kind: int) -> str:
    return _WORDS.get(kind, f"sparse in {kind} dimension{'s' * (kind != 1)}")


def _listed(said: Iterable[str], ranks: Iterable[int]) -> str:
    groups: dict[str, list[int]] = {}
    for word, rank in zip(said, ranks, strict=True):
        groups.setdefault(word, []).append(rank)
    return ", ".join(f"{word} on {name_ranks(members)}" for word, members in groups.items())
