"""Collectives over messages, for ranks of different hosts: the algorithms over any :class:`Transport`.

The cost of each operation, for P members and S bytes (per member: messages one after the other, bytes sent). A = steps
of the transport's allgather, which sends (P - 1) S bytes:

=============================  ===========================================  =============  ===================
operation                      algorithm                                    steps          bytes
=============================  ===========================================  =============  ===================
allreduce, up to DIRECT bytes  send all to all, each reduces all            1              (P - 1) S
allreduce, by the transport    as the transport does it, a ring for Gloo    2 (P - 1)      2 S (P - 1) / P
allreduce, anything else       alltoall, reduce own slice, allgather        1 + A          2 S (P - 1) / P
reducescatter                  alltoall, reduce own slice                   1              S (P - 1) / P
allgather, DIRECT bytes each   alltoall of copies                           1              (P - 1) counts[rank]
allgather, larger              the transport's, padded to the longest       A              (P - 1) max(counts)
allgather, skewed              one broadcast for each member                P log2 P       S log2 P at most
alltoall, alltoallv            the transport's                              1              the parts of the others
broadcast                      the transport's                              log2 P         S log2 P at the root
=============================  ===========================================  =============  ===================

Operations that need working memory go in pieces of PIECE bytes, each of which takes these steps. That bounds the
memory: two workspaces, and the copies that the transport makes.

Reductions that the transport does not compute exactly as :mod:`collectives.kernels.reduction` describes move as bytes
in the storage type (half the bytes of widening) and are reduced here. Each element is reduced by one member, or by all
in the same order: results are bit-identical.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from collectives.api import DType, override
from collectives.backends.base import OnWait
from collectives.backends.host import Array, Bytes, HostBackend, Workspace
from collectives.backends.phases import phase
from collectives.backends.transport import Transport, parts
from collectives.kernels.reduction import ReductionKernel, scale_array
from collectives.kernels.segments import Segments

DIRECT = 1 << 16
"""Up to this many bytes, a member sends all its data to every other: one step; a ring has 2 (P - 1) or P - 1."""

ALONE = 1 << 22
"""An array of this many bytes is not packed with others: two more copies cost more than one more operation."""

PIECE = 1 << 24
"""Bytes that go through a workspace at once, or DIRECT for each member where that is more: a message has a cost."""

Pairs = Sequence[tuple[Array, Array]]


class MessagingBackend(HostBackend):
    """A member of the group of ``transport``, which it owns and closes."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport.group)
        self.name = transport.name
        self._transport = transport
        self._outgoing, self._incoming = Workspace(), Workspace()
        self._piece = max(PIECE, DIRECT * self.size)

    def allreduce_arrays(self, sources: Sequence[Array], destinations: Sequence[Array], how: ReductionKernel) -> None:
        self._transport.check()
        pairs = [pair for pair in zip(sources, destinations, strict=True) if pair[0].size]
        if not pairs:
            return
        count = sum([source.size for source, _ in pairs])
        if count * how.dtype.itemsize <= DIRECT:
            self._reduce_direct(pairs, count, how)
        elif self._transport.reduces(how.dtype, how.op):
            self._reduce_natively(pairs, how)
        else:
            self._reduce_slices(pairs, count, how)

    def reducescatter_arrays(
        self, sources: Sequence[Array], destinations: Sequence[Array], counts: Sequence[int], how: ReductionKernel
    ) -> None:
        self._transport.check()
        source, destination = Segments(sources), Segments(destinations)
        step = self._piece // how.dtype.itemsize // self.size
        if max(counts) > step:
            step //= 2  # Packed data should stay in the cache.
        for start in range(0, max(counts), step):
            lengths = [_clip(count - start, step) for count in counts]
            received = self._scatter(source, [part.start + start for part in parts(counts)], lengths, how.dtype)
            if received.size:
                rows = self._rows(received)
                whole = destination.view(start, start + rows.shape[1])
                result = rows[0] if whole is None else whole
                self._combine(result, rows, how)
                if whole is None:
                    destination.write(start, result)

    def allgather_bytes(self, sources: Sequence[Bytes], destinations: Sequence[Bytes], counts: Sequence[int]) -> None:
        self._transport.check()
        source, destination = Segments(sources), Segments(destinations)
        if max(counts) <= DIRECT:
            self._allgather_direct(source, destination, counts)
            return
        starts, step = [part.start for part in parts(counts)], self._piece // self.size
        for start in range(0, max(counts), step):
            lengths = [_clip(count - start, step) for count in counts]
            offsets = [first + start for first in starts]
            if max(lengths) * self.size <= 2 * sum(lengths):
                self._allgather_padded(source, start, destination, offsets, lengths)
            else:
                self._allgather_skewed(source, start, destination, offsets, lengths)

    def broadcast_bytes(self, source: Bytes, destination: Bytes, root: int) -> None:
        self._transport.check()
        if self.rank == root:
            scale_array(source, destination, DType.UINT8, 1.0)
        if destination.size:
            self._transport.broadcast(destination, root)

    def alltoall_bytes(
        self, source: Bytes, destination: Bytes, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> None:
        self._transport.enter()
        if np.may_share_memory(source, destination):
            staged = self._outgoing.take(source.size, DType.UINT8)
            np.copyto(staged, source)
            source = staged
        self._exchange(source, destination, list(send_counts), list(receive_counts))

    def wait_for_all(self) -> None:
        self._transport.enter()
        self._transport.barrier()

    @override
    def attend(self, on_wait: OnWait) -> None:
        self._transport.on_wait = on_wait

    @override
    def close(self) -> None:
        self._transport.close()

    @override
    def abort(self, error: Exception) -> None:
        self._transport.abort(error)

    @override
    def phased(self) -> Sequence[object]:
        return self, self._transport

    def _reduce_direct(self, pairs: Pairs, count: int, how: ReductionKernel) -> None:
        """One step, (P - 1) S bytes: every member gets all data."""
        outgoing = self._outgoing.take(count * self.size, how.dtype)
        received = self._incoming.take(count * self.size, how.dtype)
        packed = outgoing[:count]
        self._pack(pairs, packed)
        self._rows(outgoing)[1:] = packed
        self._exchange(outgoing, received)
        result = pairs[0][1] if len(pairs) == 1 else packed
        self._combine(result, self._rows(received), how)
        if result is packed:
            _segments(pairs)[1].write(0, packed)

    def _reduce_natively(self, pairs: Pairs, how: ReductionKernel) -> None:
        """By the transport: once for each long array, in place, and once for each piece of the others, packed."""
        limit = ALONE if len(pairs) > 1 else 0
        for source, destination in pairs:
            if source.nbytes > limit:
                scale_array(source, destination, how.dtype, how.prescale)
                self._transport.allreduce(destination, how.op)
                scale_array(destination, destination, how.dtype, how.postscale)
        fused = [pair for pair in pairs if pair[0].nbytes <= limit]
        inputs, outputs = _segments(fused)
        for start, count in _pieces(len(inputs), self._piece // how.dtype.itemsize):
            packed = self._outgoing.take(count, how.dtype)
            inputs.read(start, packed)
            scale_array(packed, packed, how.dtype, how.prescale)
            self._transport.allreduce(packed, how.op)
            scale_array(packed, packed, how.dtype, how.postscale)
            outputs.write(start, packed)

    def _reduce_slices(self, pairs: Pairs, count: int, how: ReductionKernel) -> None:
        """P steps, 2 S (P - 1) / P bytes: each member reduces one slice, all of them padded to one length."""
        source, destination = _segments(pairs)
        for start, length in _pieces(count, self._piece // how.dtype.itemsize):
            share = -(-length // self.size)
            packed = self._outgoing.take(share * self.size, how.dtype)
            received = self._incoming.take(share * self.size, how.dtype)
            source.read(start, packed[:length])
            packed[length:] = 0
            self._exchange(packed, received)
            self._combine(received[:share], self._rows(received), how)
            self._transport.allgather(_bytes(received[:share]), _bytes(packed))
            destination.write(start, packed[:length])

    def _scatter(self, source: Segments, offsets: Sequence[int], lengths: Sequence[int], dtype: DType) -> Array:
        """One step: ``lengths[r]`` elements from ``offsets[r]`` on go to member r. Returns those received, in order."""
        is_together = all(
            offset == offsets[0] + part.start for offset, part in zip(offsets, parts(lengths), strict=True)
        )
        packed = source.view(offsets[0], offsets[0] + sum(lengths)) if is_together else None
        if packed is None:
            packed = self._outgoing.take(sum(lengths), dtype)
            for offset, part in zip(offsets, parts(lengths), strict=True):
                source.read(offset, packed[part])
        mine, width = lengths[self.rank], dtype.itemsize
        received = self._incoming.take(mine * self.size, dtype)
        self._exchange(packed, received, [length * width for length in lengths], [mine * width] * self.size)
        return received

    def _allgather_direct(self, source: Segments, destination: Segments, counts: Sequence[int]) -> None:
        copies = self._outgoing.take(len(source) * self.size, DType.UINT8)
        rows = self._rows(copies)
        source.read(0, rows[0])
        rows[1:] = rows[0]
        whole = destination.view(0, sum(counts))
        landing = self._incoming.take(sum(counts), DType.UINT8) if whole is None else whole
        self._exchange(copies, landing, [len(source)] * self.size, list(counts))
        if whole is None:
            destination.write(0, landing)

    def _allgather_padded(
        self, source: Segments, start: int, destination: Segments, offsets: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """The ``lengths[r]`` bytes of member r from ``start`` on belong to ``offsets[r]`` of the result."""
        padded = self._outgoing.take(max(lengths), DType.UINT8)
        source.read(start, padded[: lengths[self.rank]])
        received = self._incoming.take(padded.size * self.size, DType.UINT8)
        self._transport.allgather(padded, received)
        for row, offset, length in zip(self._rows(received), offsets, lengths, strict=True):
            destination.write(offset, row[:length])

    def _allgather_skewed(
        self, source: Segments, start: int, destination: Segments, offsets: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """As :meth:`_allgather_padded`."""
        for root, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            part = self._outgoing.take(length, DType.UINT8)
            if root == self.rank:
                source.read(start, part)
            self.broadcast_bytes(part, part, root)
            destination.write(offset, part)

    def _exchange(
        self, source: Array, destination: Array, send_counts: Sequence[int] = (), receive_counts: Sequence[int] = ()
    ) -> None:
        """One alltoall, with counts in bytes; without counts in equal parts."""
        self._transport.alltoall(_bytes(source), _bytes(destination), send_counts, receive_counts)

    @staticmethod
    @phase("copy in")
    def _pack(pairs: Pairs, packed: Array) -> None:
        if len(pairs) == 1:
            np.copyto(packed, pairs[0][0])
        else:
            np.concatenate([source for source, _ in pairs], out=packed)

    @staticmethod
    @phase("combine")
    def _combine(result: Array, rows: Array, how: ReductionKernel) -> None:
        how.combine_silently(result, [*rows])

    def _rows(self, flat: Array) -> Array:
        return flat.reshape(self.size, flat.size // self.size)


def _segments(pairs: Pairs) -> tuple[Segments, Segments]:
    return Segments([source for source, _ in pairs]), Segments([destination for _, destination in pairs])


def _pieces(total: int, step: int) -> Iterator[tuple[int, int]]:
    """Start and length of each piece of at most ``step``."""
    for start in range(0, total, step):
        yield start, min(step, total - start)


def _clip(count: int, limit: int) -> int:
    return max(0, min(count, limit))


def _bytes(array: Array) -> Bytes:
    return array.view(np.uint8)
