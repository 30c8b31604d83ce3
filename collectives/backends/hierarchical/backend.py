"""Collectives in stages: inside each host with one backend, between the hosts with another.

The network is slower than memory, so each byte should cross it once for each host, not once for each rank. With L the
smallest number of members on a host, the first L members of each host are its *columns*: column c of all hosts forms a
group across the network and carries a share c of the data; the others work inside their host only. The stages, for S
bytes on H hosts, and the bytes that a host sends:

=============  ==========================================================  ==========================
operation      stages                                                      bytes
=============  ==========================================================  ==========================
allreduce      reduce-scatter inside, allreduce across, allgather inside   2 S (H - 1) / H
reducescatter  reduce-scatter inside, reduce-scatter across                S (H - 1) / H
allgather      allgather inside, allgather across, allgather inside        (H - 1) times its own bytes
broadcast      inside the root's host, across, inside the other hosts      S log2 H at the root's host
barrier        inside, across, inside
anything else  that of the flat backend, which has all members             L times as many
=============  ==========================================================  ==========================

A ring of all P ranks has each host send 2 S (P - 1) / P for an allreduce, a direct exchange L times what this one does.

Up to SMALL bytes column 0 carries all: a message costs more than its bytes. A reducescatter of so few, and one where
hosts have different numbers of members, is that of the flat backend, in a large group an allreduce. A 16-bit float is
rounded twice, once on its host and once across; the flat backends round once. Prescaling happens in the first stage and
postscaling in the last reduction, so that integers come out as in a single reduction. Each element is reduced by one
member of each host and then identically on all hosts: results are bit-identical. The flat backend averages integers:
the sum may not fit their type.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import msgpack
import numpy as np

from collectives.api import CollectiveTimeoutError, DType, HorovodInternalError, Parameters, ReduceOp, override
from collectives.backends.base import (
    Backend,
    Bootstrap,
    Group,
    OffersVote,
    OnDeath,
    OnWait,
    Vote,
    ignore_waits,
    is_large,
)
from collectives.backends.hierarchical.thread import Outcome, StageThread
from collectives.backends.hierarchical.vote import HostsVote
from collectives.backends.host import Array, Bytes, HostBackend, Workspace
from collectives.backends.phases import OnPhase, phase
from collectives.kernels.reduction import ReductionKernel, reduction
from collectives.kernels.segments import Segments
from collectives.net.attempts import ConnectAttempt

LOCAL, CROSS, FLAT = "local", "cross", "flat"

Combine: TypeAlias = Callable[[Mapping[str, Backend]], Backend]
"""Makes the hierarchical backend of its parts, which it owns then."""


class HierarchicalBootstrap(Bootstrap):
    """A :class:`Bootstrap`. ``parts`` has LOCAL and FLAT, and CROSS for a member that is in a column."""

    def __init__(self, group: Group, parts: Mapping[str, Bootstrap], combine: Combine) -> None:
        super().__init__(group, msgpack.packb({name: part.offer for name, part in parts.items()}))
        self._parts = parts
        self._combine = combine

    @override
    def connect(self, offers: Sequence[bytes], attempt: ConnectAttempt) -> Backend:
        found = [msgpack.unpackb(offer) for offer in offers]
        places = {rank: position for position, rank in enumerate(self.group.ranks)}
        backends: dict[str, Backend] = {}
        try:
            for name, part in self._parts.items():
                positions = [places[rank] for rank in part.group.ranks]
                backends[name] = part.connect([found[position][name] for position in positions], attempt)
        except BaseException as error:
            for backend in backends.values():
                backend.abort(error if isinstance(error, Exception) else RuntimeError(str(error)))
                backend.close()
            raise
        return self._combine(backends)

    @override
    def close(self) -> None:
        for part in self._parts.values():
            part.close()


SMALL = 1 << 16
MOST_KEPT = 1 << 24
"""Bytes that all members reduce at once where each keeps a part only."""

Span = tuple[int, int]


class _Piece(NamedTuple):
    """A part of an allreduce: the number of elements that each member carries, and the memory for its own."""

    sources: Sequence[Array]
    destinations: Sequence[Array]
    counts: Sequence[int]
    mine: Array


class HierarchicalBackend(HostBackend, OffersVote):
    """A member of a ``group`` that has several hosts, in the order of :meth:`Group.by_host`.

    ``local`` has the members of this host and ``cross`` those of this column, both in that order (None for a member
    that is in no column); ``flat`` has all. They are owned, and closed, by this backend. The ``parameters`` say which
    operations go in stages, and in which pieces: an allreduce of 16 MB takes 142 ms at 1 Gbit/s, in one piece 154 ms.
    """

    name = "hierarchical"

    def __init__(
        self,
        group: Group,
        local: HostBackend,
        cross: HostBackend | None,
        flat: HostBackend,
        parameters: Parameters,
    ) -> None:
        super().__init__(group)
        self._hosts = hosts = self.divide(group)
        self._columns = min(map(len, hosts))
        self._host = next(index for index, members in enumerate(hosts) if group.position in members)
        self._local, self._cross, self._flat = local, cross, flat
        self._stages = [local] if cross is None else [local, cross]
        self._parts = [*self._stages, flat]
        self._has_agreed = False
        self._voting = 0.0  # seconds of waits in rounds that led to an operation, since the last waited()
        self._parameters = parameters
        self._workspaces = Workspace(), Workspace()
        self._whole = Workspace()
        self._network = StageThread("hvd-across")
        self._on_wait: OnWait = ignore_waits

    @classmethod
    def divide(cls, group: Group) -> list[list[int]]:
        """The positions on each host of ``group``."""
        return group.by_host()

    @classmethod
    def of(cls, group: Group, parts: Mapping[str, Backend], parameters: Parameters) -> HierarchicalBackend:
        """The backend of the ``parts`` of a :class:`HierarchicalBootstrap`, which are for host memory."""
        local, cross, flat = parts[LOCAL], parts.get(CROSS), parts[FLAT]
        assert isinstance(local, HostBackend)
        assert isinstance(flat, HostBackend)
        assert cross is None or isinstance(cross, HostBackend)
        return cls(group, local, cross, flat, parameters)

    @override
    def allreduce_arrays(self, sources: Sequence[Array], destinations: Sequence[Array], how: ReductionKernel) -> None:
        with self._all_or_none():
            if not self._reduces_in_stages(how):
                self._flat.allreduce_arrays(sources, destinations, how)
                return
            source = Segments(sources)
            lengths = _lengths(len(source), max(1, self._parameters.pipeline_piece // how.dtype.itemsize))
            pieces = self._pieces(source, Segments(destinations), lengths, how.dtype)
            if len(lengths) > 1:
                self._reduce_in_pipeline(pieces, how)
                return
            for piece in pieces:
                self._reduce_inside(piece, how)
                self._reduce_across(piece, how)
                self._hand_out(piece)

    @override
    def reducescatter_arrays(
        self, sources: Sequence[Array], destinations: Sequence[Array], counts: Sequence[int], how: ReductionKernel
    ) -> None:
        with self._all_or_none():
            if self._scatters_in_stages(sum(counts), how):
                self._scatter(Segments(sources), destinations, counts, how)
            elif is_large(self.size) and self._reduces_in_stages(how):
                self._reduce_and_keep(Segments(sources), Segments(destinations), counts, how)
            else:
                self._flat.reducescatter_arrays(sources, destinations, counts, how)

    @override
    def allgather_bytes(self, sources: Sequence[Bytes], destinations: Sequence[Bytes], counts: Sequence[int]) -> None:
        with self._all_or_none():
            if self._parameters.hierarchical_allgather:
                self._gather(sources, self._blocks(Segments(destinations), counts), counts)
            else:
                self._flat.allgather_bytes(sources, destinations, counts)

    @override
    def broadcast_bytes(self, source: Bytes, destination: Bytes, root: int) -> None:
        home = next(index for index, members in enumerate(self._hosts) if root in members)
        place = self._hosts[home].index(root)
        column = place if place < self._columns else 0
        with self._all_or_none():
            if self._host == home:
                self._send_inside(source, destination, place)
            if self._cross is not None and self._local.rank == column:
                self._send_across(self._cross, destination, home)
            if self._host != home:
                self._send_inside(destination, destination, column)

    @override
    def alltoall_bytes(
        self, source: Bytes, destination: Bytes, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> None:
        with self._all_or_none():
            self._flat.alltoall_bytes(source, destination, send_counts, receive_counts)

    @override
    def wait_for_all(self) -> None:
        with self._all_or_none():
            self._local.wait_for_all()
            if self._cross is not None and self._local.rank == 0:
                with self._across():
                    self._cross.wait_for_all()
            self._local.wait_for_all()

    @override
    def vote(self) -> Vote | None:
        """The members agree on each host, then the hosts, before the stages begin."""
        if not isinstance(self._flat, OffersVote):
            return None  # on all members: if one part offers votes, all do
        inside, across = _board_of(self._local), _board_of(self._cross) if self._local.rank == 0 else None
        assert inside is not None
        assert (across is None) == (self._local.rank > 0)
        return HostsVote(self._hosts, self._host, inside, across, self._run_agreed)

    @override
    def observe(self, on_phase: OnPhase | None, in_profile: bool = False) -> None:
        """The phases are the stages; operations without stages have those of ``flat``."""
        super().observe(on_phase, in_profile)
        self._flat.observe(on_phase, in_profile)

    @override
    def attend(self, on_wait: OnWait) -> None:
        self._on_wait = on_wait
        for part in self._parts:
            part.attend(on_wait)

    @override
    def waited(self) -> tuple[float, float]:
        """Where the members have agreed ahead, all are there before the first stage."""
        late, inside = self._flat.waited()
        late, self._voting = late + self._voting, 0.0
        for stage in self._stages:
            before, within = stage.waited()
            late, inside = (late, inside + before) if self._has_agreed else (late + before, inside)
            inside += within
        return late, inside

    @override
    def watch(self, on_death: OnDeath) -> None:
        """Those of the members of this host."""
        self._local.watch(on_death)

    @override
    def adopt(self, parameters: Parameters) -> None:
        self._parameters = parameters

    @override
    def close(self) -> None:
        with ExitStack() as stack:
            for part in self._parts:
                stack.callback(part.close)
            stack.callback(self._network.close)  # before the parts, which its calls use

    @override
    def abort(self, error: Exception) -> None:
        for part in self._parts:
            part.abort(error)

    def _run_agreed(self, call: Callable[[], None]) -> None:
        self._voting += sum([sum(stage.waited()) for stage in self._stages])
        self._has_agreed = True
        try:
            call()
        finally:
            self._has_agreed = False

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """A member that fails in one backend leaves the others, too, so that no member waits for it there."""
        try:
            yield
        except BaseException as error:
            self.abort(error if isinstance(error, Exception) else HorovodInternalError(f"interrupted: {error!r}"))
            raise

    @contextmanager
    def _across(self) -> Iterator[None]:
        """A timeout names all ranks of the other hosts: a late member may itself wait for any rank of its host."""
        try:
            yield
        except CollectiveTimeoutError as error:
            others = [member for members in self._hosts for member in members if members != self._hosts[self._host]]
            raise CollectiveTimeoutError(
                f"at least one of {self.group.describe(others)} did not answer in time ({error})",
                self.group.ranks_at(others),
            ) from error

    def _pieces(
        self, source: Segments, destination: Segments, lengths: Sequence[int], dtype: DType
    ) -> Iterator[_Piece]:
        for number, span in enumerate(_spans(lengths)):
            counts = self._shares(lengths[number], dtype.itemsize)
            mine = self._workspaces[number % 2].take(counts[self._local.rank], dtype)
            yield _Piece(source.parts(*span), destination.parts(*span), counts, mine)

    def _reduce_in_pipeline(self, pieces: Iterable[_Piece], how: ReductionKernel) -> None:
        """While a piece crosses the network, this host reduces the next piece and distributes the previous one.

        No piece crosses after the end of this call; an abort of ``cross`` ends a crossing.
        """
        with self._network as network, self._all_or_none():
            crossings: deque[tuple[_Piece, Outcome]] = deque()
            for piece in pieces:
                self._reduce_inside(piece, how)
                crossings.append((piece, network.submit(partial(self._reduce_across, piece, how))))
                if len(crossings) > 1:
                    self._end_crossing(*crossings.popleft())
            self._end_crossing(*crossings.popleft())

    def _end_crossing(self, piece: _Piece, crossing: Outcome) -> None:
        self._network.finish(crossing, self._on_wait)
        self._hand_out(piece)

    def _reduces_in_stages(self, how: ReductionKernel) -> bool:
        return self._parameters.hierarchical_allreduce and how.op is not ReduceOp.AVERAGE

    def _scatters_in_stages(self, count: int, how: ReductionKernel) -> bool:
        has_owners = self._columns == max(map(len, self._hosts))  # each member is in a column
        return self._reduces_in_stages(how) and has_owners and count * how.dtype.itemsize > SMALL

    def _reduce_and_keep(
        self, source: Segments, destination: Segments, counts: Sequence[int], how: ReductionKernel
    ) -> None:
        """Twice the bytes of the flat backend, but that would connect each member of a large group to all others."""
        first, last = _spans(counts)[self.rank]
        step = MOST_KEPT // how.dtype.itemsize
        for start in range(0, len(source), step):
            stop = min(start + step, len(source))
            whole = self._whole.take(stop - start, how.dtype)
            self.allreduce_arrays(source.parts(start, stop), [whole], how)
            lower, upper = max(first, start), min(last, stop)
            if lower < upper:
                destination.write(lower - first, whole[lower - start : upper - start])

    def _scatter(
        self, source: Segments, destinations: Sequence[Array], counts: Sequence[int], how: ReductionKernel
    ) -> None:
        """A column combines what its members get: on each host its member there does, and then the hosts."""
        spans = _spans(counts)
        columns = list(zip(*self._hosts, strict=True))
        totals = [sum([counts[member] for member in column]) for column in columns]
        parts = [part for column in columns for member in column for part in source.parts(*spans[member])]
        mine = self._workspaces[0].take(totals[self._local.rank], how.dtype)
        self._reduce_inside(_Piece(parts, destinations, totals, mine), how)
        self._scatter_across(mine, destinations, [counts[member] for member in columns[self._local.rank]], how)

    @phase("exchange between hosts")
    def _scatter_across(
        self, mine: Array, destinations: Sequence[Array], counts: Sequence[int], how: ReductionKernel
    ) -> None:
        if self._cross is not None and mine.size:
            with self._across():
                rest = reduction(how.dtype, how.op, 1.0, how.postscale)
                self._cross.reducescatter_arrays([mine], destinations, counts, rest)

    @phase("reduce on the host")
    def _reduce_inside(self, piece: _Piece, how: ReductionKernel) -> None:
        here = reduction(how.dtype, how.op, how.prescale)
        self._local.reducescatter_arrays(piece.sources, [piece.mine], piece.counts, here)

    @phase("exchange between hosts")
    def _reduce_across(self, piece: _Piece, how: ReductionKernel) -> None:
        if self._cross is not None and piece.mine.size:
            with self._across():
                rest = reduction(how.dtype, how.op, 1.0, how.postscale)
                self._cross.allreduce_arrays([piece.mine], [piece.mine], rest)

    @phase("hand out on the host")
    def _hand_out(self, piece: _Piece) -> None:
        counts = [count * piece.mine.itemsize for count in piece.counts]
        destinations = [destination.view(np.uint8) for destination in piece.destinations]
        self._local.allgather_bytes([piece.mine.view(np.uint8)], destinations, counts)

    @phase("broadcast on the host")
    def _send_inside(self, source: Bytes, destination: Bytes, root: int) -> None:
        self._local.broadcast_bytes(source, destination, root)

    @phase("broadcast between hosts")
    def _send_across(self, cross: HostBackend, data: Bytes, home: int) -> None:
        with self._across():
            cross.broadcast_bytes(data, data, home)

    def _blocks(self, result: Segments, counts: Sequence[int]) -> list[Segments]:
        """The places of the bytes of each host in the result."""
        ends = list(accumulate(counts))
        spans = [[(ends[member] - counts[member], ends[member]) for member in members] for members in self._hosts]
        return [Segments([part for span in _merged(host) for part in result.parts(*span)]) for host in spans]

    @phase("gather between hosts")
    def _gather(self, sources: Sequence[Bytes], blocks: Sequence[Segments], counts: Sequence[int]) -> None:
        """Each byte goes directly to its place in the result, and from there to the other members.

        A block is divided among the columns; each fetches its shares of the other hosts' blocks and distributes them on
        its host.
        """
        own, column = blocks[self._host], self._local.rank
        self._local.allgather_bytes(
            sources, own.parts(0, len(own)), [counts[member] for member in self._hosts[self._host]]
        )
        shares = [_spans(self._shares(len(block), 1)) for block in blocks]
        lengths = [stop - start for start, stop in (spans[column] for spans in shares)]
        if self._cross is not None and any(lengths):
            mine = [block.parts(*spans[column]) for block, spans in zip(blocks, shares, strict=True)]
            with self._across():
                self._cross.allgather_bytes(mine[self._host], _flat(mine), lengths)
        self._hand_round(blocks, shares)

    def _hand_round(self, blocks: Sequence[Segments], shares: Sequence[Sequence[Span]]) -> None:
        foreign = [index for index in range(len(blocks)) if index != self._host]
        parts = [
            _flat(blocks[index].parts(*shares[index][member]) for index in foreign)
            for member in range(self._local.size)
        ]
        totals = [sum([part.size for part in of_member]) for of_member in parts]
        self._local.allgather_bytes(parts[self._local.rank], _flat(parts), totals)

    def _shares(self, count: int, itemsize: int) -> list[int]:
        """How many of ``count`` elements each member of this host carries across the network."""
        carriers = 1 if count * itemsize <= SMALL else self._columns
        share, rest = divmod(count, carriers)
        return [share + (member < rest) if member < carriers else 0 for member in range(self._local.size)]


def _board_of(backend: HostBackend | None) -> Vote | None:
    return backend.vote() if isinstance(backend, OffersVote) else None


def _flat(lists: Iterable[Sequence[Array]]) -> list[Array]:
    return [array for arrays in lists for array in arrays]


def _spans(lengths: Sequence[int]) -> list[Span]:
    return [(end - length, end) for end, length in zip(accumulate(lengths), lengths, strict=True)]


def _lengths(count: int, step: int) -> list[int]:
    """Of the pieces of ``count`` elements: at most ``step``. From one and a half steps on, both ends are short.

    Nothing crosses the network while a host reduces the first piece, and while it hands out the last one.
    """
    end = step // 4
    if not end or count < step + 2 * end:
        return _cut(count, step)
    return [end, *_cut(count - 2 * end, step), end]


def _cut(count: int, step: int) -> list[int]:
    return [min(step, count - start) for start in range(0, count, step)]


def _merged(spans: Sequence[Span]) -> list[Span]:
    """Merge adjacent spans."""
    merged: list[Span] = []
    for start, stop in spans:
        touches = merged and merged[-1][1] == start
        merged.append((merged.pop()[0] if touches else start, stop))
    return merged
