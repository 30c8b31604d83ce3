"""Pure: from the reports of all ranks to the one state with which they go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from collectives import InvalidRequestError, name_ranks, with_ranks
from hvd_cluster.ops.rank_copies import CopyId, RowId

Layout = Sequence[tuple[str, str]]
"""The name of each entry of a state, and its description, such as the shape and the dtype of a parameter."""


@dataclass(frozen=True)
class StateReport:
    """A rank's part in the agreement.

    ``commit``: the number of its last commit; None for a newcomer, whose state was never that of the job. ``exact``:
    whether its present state is exactly that commit. ``copy``: the commit of which it has a full copy. ``partial``:
    that of a copy of which it has only some rows. ``settled``: nothing happened since the last sync that would make
    ranks differ, so the user wants the state of the first rank. ``gives``: whether this rank can send its state.
    ``layout``: a digest of its :data:`Layout`. ``version``: that of the library.
    """

    rank: int
    commit: int | None
    exact: bool
    copy: int | None
    partial: int | None
    settled: bool
    gives: bool
    layout: str
    version: str

    @property
    def offer(self) -> int | None:
        """The latest commit whose state this rank can show; None if there is none."""
        return self.commit if self.exact or self.commit is None else self.copy


@dataclass(frozen=True)
class Recovery:
    """The state with which all ranks go on is that of ``commit``; ``source`` sends it to the ``receivers``.

    The ranks of ``returning`` go back to their full copy first. ``lost``: the number of later commits, which no rank
    can show any more. ``present``: the state of the source as it is now becomes the commit, whatever the last one was.
    """

    source: int
    commit: int
    receivers: frozenset[int]
    returning: frozenset[int] = frozenset()
    lost: int = 0
    present: bool = False


def check_versions(versions: Mapping[int, str]) -> None:
    """InvalidRequestError, the same on all ranks, unless all ranks (rank -> version) have one version."""
    if len(set(versions.values())) > 1:
        raise InvalidRequestError(
            f"the ranks run different versions: {with_ranks(versions)}; install one version of hvd-cluster on all hosts"
        )


def have_one_layout(reports: Sequence[StateReport]) -> bool:
    """Whether the states of all ranks have the same entries."""
    return len({report.layout for report in reports}) == 1


def difference(layouts: Mapping[int, Layout]) -> str | None:
    """The text of the error, the same on all ranks, for the first entry that differs (rank -> layout); or None."""
    ranks = sorted(layouts)
    for entries in zip_longest(*(layouts[rank] for rank in ranks)):
        if len(set(entries)) > 1:
            texts = ["nothing more" if entry is None else _described(entry) for entry in entries]
            found = dict(zip(ranks, texts, strict=True))
            return f"the states of the ranks differ, first in {with_ranks(found)}; make the same state on all ranks"
    return None


def _described(entry: tuple[str, str]) -> str:
    name, description = entry
    return f"{name}: {description}"


def need_rows(reports: Sequence[StateReport]) -> bool:
    """Whether ranks must give each other rows of their copies before :func:`decide` can see them."""
    return any(each.partial is not None for each in reports) and not all(each.settled for each in reports)


@dataclass(frozen=True)
class RowReport:
    """A rank tells of its rows. ``copies``: the copies of its own ``commit`` that are not whole, by part of the state.
    ``held``: the rows that it can give, by part.
    """

    commit: int
    copies: Mapping[str, CopyId]
    held: Mapping[str, frozenset[RowId]]


def senders_of_rows(told: Sequence[RowReport]) -> tuple[int, Mapping[tuple[str, RowId], int]] | None:
    """The latest commit whose copies the ranks, in their order, can make whole together: and the rank for each row.

    None if they cannot make any. The first rank that has a row sends it.
    """
    holders = {
        (part, row): rank
        for rank, each in reversed(list(enumerate(told)))
        for part, rows in each.held.items()
        for row in rows
    }
    for commit in sorted({each.commit for each in told if each.copies}, reverse=True):
        copies = {copy for each in told if each.commit == commit for copy in each.copies.items()}
        wanted = [(part, RowId(copy, position)) for part, copy in copies for position in range(copy.size)]
        if all(row in holders for row in wanted):
            return commit, {row: holders[row] for row in wanted}
    return None


def decide(reports: Sequence[StateReport]) -> Recovery:
    """The same on all ranks, from the reports of all ranks in their order.

    Where no rank has the state of the job yet, or nothing happened since the last sync, that of the first rank counts,
    as it is. Otherwise the latest commit that some rank can show counts: no later one is known to be whole on any rank.
    Raises InvalidRequestError if no rank can send a state.
    """
    veterans = [report for report in reports if report.commit is not None]
    if not veterans or all(report.settled and report.commit is not None for report in reports):
        return _from_first(reports)
    offers = {report.rank: report.offer for report in veterans}
    commit = max((offer for report in veterans if report.gives and (offer := report.offer) is not None), default=None)
    if commit is None:
        raise InvalidRequestError(_no_source(veterans, len(reports)))
    holders = [report for report in veterans if offers[report.rank] == commit]
    source = min((not report.exact, report.rank) for report in holders if report.gives)[1]
    return Recovery(
        source,
        commit,
        frozenset(report.rank for report in reports) - {report.rank for report in holders},
        frozenset(report.rank for report in holders if not report.exact),
        max(report.commit or 0 for report in veterans) - commit,
    )


def _no_source(veterans: Sequence[StateReport], size: int) -> str:
    ranks = name_ranks([report.rank for report in veterans])
    partial = max((each.partial for each in veterans if each.partial is not None), default=None)
    if partial is not None:
        return (
            f"the state of commit {partial} is lost: {ranks} of {size} have parts of it, and all hosts with a copy of "
            "the others are gone; go on from a checkpoint, and give the sharded optimizer a larger redundancy"
        )
    return (
        f"no rank can send a state: {ranks} of {size} have one, without a commit to which they can go back, or with a "
        "handler that sends from rank 0 only; call commit()"
    )


def _from_first(reports: Sequence[StateReport]) -> Recovery:
    source = reports[0].rank
    known = [report.commit + 1 for report in reports if report.commit is not None]
    return Recovery(
        source, max(known, default=0), frozenset(report.rank for report in reports) - {source}, present=True
    )
