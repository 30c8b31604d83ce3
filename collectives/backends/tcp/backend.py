"""Collectives over TCP connections of our own.

The cost of each operation, for P members and S bytes (per member: messages one after the other, bytes sent):

============================  ===============================================  ========  =====================
operation                     algorithm                                        steps     bytes
============================  ===============================================  ========  =====================
allreduce, small              send all to all, each reduces all                1         (P - 1) S
allreduce, larger             reduce-scatter and allgather in one pipeline     2         2 S (P - 1) / P
reducescatter                 the first half of that                           1         S (P - 1) / P
allgather                     all to all, from and to the tensors              1         (P - 1) counts[rank]
alltoall, alltoallv           all messages at once                             1         the parts of the others
broadcast, small              a binomial tree                                  log2 P    S log2 P at the root
broadcast, larger             a chain in pieces                                P - 1     S
barrier                       each tells the member 1, 2, 4... ahead           log2 P    log2 P
============================  ===============================================  ========  =====================

Each element is reduced by one member, or by all in the same order: results are bit-identical.

Where the members vote whether they run an operation (see :mod:`collectives.backends.tcp.ballot`), that is one step
more, but not for those of one step and messages up to RIDING bytes; a broadcast up to there takes one step in all. A
vote through a hub (:mod:`collectives.backends.tcp.star`) is two steps, and takes the messages of such operations along,
as long as the hub has no more than 1 MB to pass on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from collectives.api import DType, override
from collectives.backends.base import OffersVote, Vote, is_large
from collectives.backends.host import Array, Bytes
from collectives.backends.messaging import MessagingBackend
from collectives.backends.phases import phase
from collectives.backends.tcp.reducing import Data, Span, even_spans
from collectives.backends.tcp.transport import TcpTransport, TcpVote
from collectives.backends.transport import parts
from collectives.kernels.reduction import ReductionKernel, scale_array
from collectives.kernels.segments import Segments

DIRECT = 1 << 18
"""Bytes that a member sends at most for an allreduce in one step."""
PACKED = 1 << 14
"""Tensors that are shorter than this on average are packed: a copy costs less than a system call for each."""
PIECE = 1 << 24
"""Bytes that are packed at once."""


class TcpBackend(MessagingBackend, OffersVote):
    """A member of the group of ``transport``, which it owns."""

    def __init__(self, transport: TcpTransport) -> None:
        super().__init__(transport)
        self._tcp = transport

    @override
    def allreduce_arrays(self, sources: Sequence[Array], destinations: Sequence[Array], how: ReductionKernel) -> None:
        dtype, source, destination = how.dtype, Segments(sources), Segments(destinations)
        if len(source) * dtype.itemsize * (self.size - 1) <= DIRECT:
            self._tcp.enter()
            self._reduce_at_once(source, destination, how)
            return
        self._tcp.check()
        if len(source) * dtype.itemsize < PACKED * len(sources):
            self._reduce_packed(source, destination, how)
        else:
            self._reduce_whole(source, destination, how)

    @override
    def reducescatter_arrays(
        self, sources: Sequence[Array], destinations: Sequence[Array], counts: Sequence[int], how: ReductionKernel
    ) -> None:
        source, destination = Segments(sources), Segments(destinations)
        spans = [(part.start, part.stop) for part in parts(counts)]
        if len(source) * how.dtype.itemsize <= DIRECT:
            self._tcp.enter()
            self._scatter_at_once(source, destination, spans, how)
        else:
            self._tcp.check()
            self._tcp.reduce(Data(source, destination, spans, is_whole=False), how)

    @override
    def allgather_bytes(self, sources: Sequence[Bytes], destinations: Sequence[Bytes], counts: Sequence[int]) -> None:
        self._tcp.enter()
        if len(sources) == len(destinations) == 1:
            self._gather_whole(sources[0], destinations[0], counts)
            return
        source, destination = Segments(sources), Segments(destinations)
        own = parts(counts)[self.rank].start
        if sum(counts) <= PIECE and sum(counts) < PACKED * len(destinations):
            self._gather_packed(source, destination, counts, own)
        else:
            self._gather(source, destination, counts)
            _keep_own(source, destination, own)

    @override
    def broadcast_bytes(self, source: Bytes, destination: Bytes, root: int) -> None:
        self._tcp.enter()
        data = source if self.rank == root else destination
        if data.size:
            self._tcp.broadcast(data, root)
        if self.rank == root:
            scale_array(source, destination, DType.UINT8, 1.0)

    @override
    def waited(self) -> tuple[float, float]:
        """Inside of operations, nobody knows whether a member waits or receives."""
        return self._tcp.ballot.waited(), 0.0

    @override
    def vote(self) -> Vote | None:
        """The first exchange of an operation is a round of the vote. A large group has none: most links are missing."""
        return None if is_large(self.size) else TcpVote(self._tcp)

    def _reduce_at_once(self, source: Segments, destination: Segments, how: ReductionKernel) -> None:
        count = len(source)
        if not count:
            return
        rows = self._rows_of(count, how.dtype)
        mine = _whole(source, 0, rows[self.rank])
        self._tcp.spread([mine], {other: (rows[other],) for other in self.group.others}, spare=True)
        self._combine_rows(destination, mine, rows, how)

    def _scatter_at_once(
        self, source: Segments, destination: Segments, spans: Sequence[Span], how: ReductionKernel
    ) -> None:
        first, last = spans[self.rank]
        rows = self._rows_of(last - first, how.dtype)
        self._tcp.swap(
            {other: _filled(source.parts(*spans[other])) for other in self.group.others},
            {other: _filled([rows[other]]) for other in self.group.others},
        )
        if last > first:
            self._combine_rows(destination, _whole(source, first, rows[self.rank]), rows, how)

    def _rows_of(self, count: int, dtype: DType) -> Array:
        """Room for ``count`` elements of each member."""
        return self._incoming.take(count * self.size, dtype).reshape(self.size, count)

    @phase("combine")
    def _combine_rows(self, destination: Segments, mine: Array, rows: Array, how: ReductionKernel) -> None:
        inputs, whole = [*rows], destination.view(0, rows.shape[1])
        inputs[self.rank] = mine
        result = rows[self.rank] if whole is None else whole
        how.combine_silently(result, inputs)
        if whole is None:
            destination.write(0, result)

    def _reduce_whole(self, source: Segments, destination: Segments, how: ReductionKernel) -> None:
        spans = even_spans(len(source), self.size)
        self._tcp.reduce(Data(source, destination, spans, is_whole=True), how)

    def _reduce_packed(self, source: Segments, destination: Segments, how: ReductionKernel) -> None:
        step = PIECE // how.dtype.itemsize
        for start in range(0, len(source), step):
            packed = self._outgoing.take(min(step, len(source) - start), how.dtype)
            source.read(start, packed)
            whole = Segments([packed])
            self._reduce_whole(whole, whole, how)
            destination.write(start, packed)

    def _gather_whole(self, source: Bytes, destination: Bytes, counts: Sequence[int]) -> None:
        places = [destination[part] for part in parts(counts)]
        mine = places[self.rank]
        self._tcp.spread(
            [source] if source.size else [], {other: [places[other]] for other in self.group.others if counts[other]}
        )
        if not np.may_share_memory(mine, source):
            mine[:] = source

    def _gather_packed(self, source: Segments, destination: Segments, counts: Sequence[int], own: int) -> None:
        landing = self._incoming.take(sum(counts), DType.UINT8)
        if len(source):
            source.read(0, landing[own : own + len(source)])
        whole = Segments([landing])
        self._gather(Segments([landing[own : own + len(source)]]), whole, counts, spare=True)
        destination.write(0, landing)

    def _gather(self, source: Segments, destination: Segments, counts: Sequence[int], spare: bool = False) -> None:
        """Receive the parts of the others at their places, and send this member's to them."""
        spans = parts(counts)
        self._tcp.spread(
            _filled(source.parts(0, len(source))),
            {other: _filled(destination.parts(spans[other].start, spans[other].stop)) for other in self.group.others},
            spare,
        )


def _whole(source: Segments, start: int, room: Array) -> Array:
    """The elements of ``source`` from ``start`` on: a view where they lie in one array, or else a copy in ``room``."""
    whole = source.view(start, start + room.size)
    if whole is not None:
        return whole
    source.read(start, room)
    return room


def _keep_own(source: Segments, destination: Segments, start: int) -> None:
    """Copy ``source`` to its place in the result, unless it lies there already."""
    for part in source.parts(0, len(source)):
        place = destination.view(start, start + part.size)
        if place is None or not np.may_share_memory(place, part):
            destination.write(start, part)
        start += part.size


def _filled(arrays: Sequence[Array]) -> list[Array]:
    return [array for array in arrays if array.size]
