"""Collectives over TCP with torch's Gloo, for ranks of different hosts.

What each operation costs, for P members and S bytes (per member: messages one after the other, bytes sent):

=============================  ======================================  =============  ===================
operation                      algorithm                               steps          bytes
=============================  ======================================  =============  ===================
allreduce, up to DIRECT bytes  send all to all, each reduces all       1              (P - 1) S
allreduce, native SUM/PRODUCT  Gloo's ring                             2 (P - 1)      2 S (P - 1) / P
allreduce, anything else       alltoall, reduce own slice, allgather   1 + (P - 1)    2 S (P - 1) / P
reducescatter                  alltoall, reduce own slice              1              S (P - 1) / P
allgather, DIRECT bytes each   alltoall of copies                      1              (P - 1) counts[rank]
allgather, larger              Gloo's ring, padded to the longest      P - 1          (P - 1) max(counts)
allgather, what is skewed      one broadcast for each member           P log2 P       S log2 P at most
alltoall, alltoallv            Gloo's alltoall                         1              what is sent away
broadcast                      Gloo's tree                             log2 P         S log2 P at the root
=============================  ======================================  =============  ===================

What needs scratch goes in pieces of PIECE bytes, each of which takes these steps. That bounds the memory: two
scratches, and the copy of the result that torch makes in an allgather.

Gloo itself rounds a 16-bit sum at each hop, refuses int16, and drops NaN from MIN and MAX or not, depending on the
place in the ring. So only sums and products of types it computes exactly as :mod:`collectives.kernels.reduction` does
are left to its ring; all else moves as bytes in the storage type (half the bytes of widening) and is reduced here. Each
element is reduced by one member, or by all in the same order: results are bit-identical.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import accumulate
from typing import Any

import numpy as np

from collectives.api import DType, PeerLostError, ReduceOp, ShutDownError, Store
from collectives.backends.gloo.connections import ADDRESS_BYTES, NOWHERE, Connections
from collectives.backends.gloo.meeting import import_torch, meet, open_device, some_of, translate
from collectives.backends.group import Group
from collectives.backends.host import Array, Bytes, HostBackend
from collectives.backends.scratch import Scratch
from collectives.kernels.reduction import reduce_arrays, scale_array
from collectives.kernels.segments import Segments

__all__ = ["GlooBackend"]

DIRECT = 1 << 16
"""Up to so many bytes a member sends all it has to every other: one step, where the ring has 2 (P - 1) or P - 1."""

ALONE = 1 << 22
"""An array of this many bytes is not packed with others: two more copies cost more than one more operation."""

PIECE = 1 << 24
"""Bytes that go through a scratch at once; DIRECT for each member where that is more, for messages have a cost, too."""

SLICE = timedelta(seconds=0.1)
GRACE = timedelta(seconds=0.2)
POLL = 0.1

_RING_DTYPES = frozenset({"uint8", "int8", "int32", "int64", "float32", "float64"})
_RING_OPS = {ReduceOp.SUM: "SUM", ReduceOp.PRODUCT: "PRODUCT"}

Pairs = Sequence[tuple[Array, Array]]


class GlooBackend(HostBackend):
    """A member of ``group``, which meets in ``store``, under a prefix that no other group uses.

    ``timeout`` bounds the meeting, and the silence of a peer within a call, in seconds. ``interface`` is the network
    interface, or ``hostname`` the own name or address, that the peers connect to; by default what the host's name
    resolves to.
    """

    name = "gloo"

    def __init__(
        self, group: Group, store: Store, timeout: float = 30.0, interface: str = "", hostname: str = ""
    ) -> None:
        super().__init__(group)
        self._torch = import_torch()
        self._error: Exception | None = None
        self._error_lock = threading.Lock()
        self._unfinished: Any = None
        self._outgoing, self._incoming = Scratch(), Scratch()
        self._piece = max(PIECE, DIRECT * self.size)
        device, address = open_device(interface, hostname)
        self._connections = Connections(address)
        self._group: Any = meet(group, store, timeout, device)
        self._connections.find(self._exchange_addresses(address))

    def allreduce_arrays(
        self,
        sources: Sequence[Array],
        destinations: Sequence[Array],
        dtype: DType,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        self._check()
        pairs = [pair for pair in zip(sources, destinations, strict=True) if pair[0].size]
        if not pairs:
            return
        count = sum([source.size for source, _ in pairs])
        if count * dtype.itemsize <= DIRECT:
            self._reduce_direct(pairs, count, dtype, op, prescale, postscale)
        elif dtype.label in _RING_DTYPES and op in _RING_OPS:
            self._reduce_in_ring(pairs, dtype, op, prescale, postscale)
        else:
            self._reduce_slices(pairs, count, dtype, op, prescale, postscale)

    def reducescatter_arrays(
        self,
        sources: Sequence[Array],
        destinations: Sequence[Array],
        counts: Sequence[int],
        dtype: DType,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        self._check()
        source, destination = Segments(sources), Segments(destinations)
        step = self._piece // dtype.itemsize // self.size
        if max(counts) > step:
            step //= 2  # What has to be packed had better stay in the cache.
        for start in range(0, max(counts), step):
            lengths = [_clip(count - start, step) for count in counts]
            received = self._scatter(source, [part.start + start for part in _parts(counts)], lengths, dtype)
            if received.size:
                rows = self._rows(received)
                whole = destination.view(start, start + rows.shape[1])
                result = rows[0] if whole is None else whole
                reduce_arrays(result, [*rows], dtype, op, prescale, postscale)
                if whole is None:
                    destination.write(start, result)

    def allgather_bytes(self, sources: Sequence[Bytes], destinations: Sequence[Bytes], counts: Sequence[int]) -> None:
        self._check()
        source, destination = Segments(sources), Segments(destinations)
        if max(counts) <= DIRECT:
            self._allgather_direct(source, destination, counts)
            return
        starts, step = [part.start for part in _parts(counts)], self._piece // self.size
        for start in range(0, max(counts), step):
            lengths = [_clip(count - start, step) for count in counts]
            places = [first + start for first in starts]
            if max(lengths) * self.size <= 2 * sum(lengths):
                self._allgather_padded(source, start, destination, places, lengths)
            else:
                self._allgather_skewed(source, start, destination, places, lengths)

    def broadcast_bytes(self, source: Bytes, destination: Bytes, root: int) -> None:
        self._check()
        if self.rank == root:
            scale_array(source, destination, DType.UINT8, 1.0)
        if destination.size:
            options = self._torch.distributed.BroadcastOptions()
            options.rootRank = root
            self._run("broadcast", [self._tensor(destination)], options)

    def alltoall_bytes(
        self, source: Bytes, destination: Bytes, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> None:
        self._check()
        if np.may_share_memory(source, destination):
            staged = self._outgoing.take(source.size, DType.UINT8)
            np.copyto(staged, source)
            source = staged
        self._exchange(source, destination, list(send_counts), list(receive_counts))

    def wait_for_all(self) -> None:
        self._check()
        self._run("barrier")

    def close(self) -> None:
        self._error = self._error or ShutDownError("the gloo backend was closed")
        group, work, self._group, self._unfinished = self._group, self._unfinished, None, None
        if work is not None:
            threading.Thread(target=_drop, args=(group, work), name="hvd-gloo-drop", daemon=True).start()

    def abort(self, error: Exception) -> None:
        with self._error_lock:
            self._error = error
        if self._group is not None:
            self._connections.shut_down()

    def _reduce_direct(
        self, pairs: Pairs, count: int, dtype: DType, op: ReduceOp, prescale: float, postscale: float
    ) -> None:
        """One step, (P - 1) S bytes: everybody gets everything."""
        outgoing = self._outgoing.take(count * self.size, dtype)
        received = self._incoming.take(count * self.size, dtype)
        packed = outgoing[:count]
        _pack(pairs, packed)
        self._rows(outgoing)[1:] = packed
        self._exchange(outgoing, received)
        result = pairs[0][1] if len(pairs) == 1 else packed
        reduce_arrays(result, [*self._rows(received)], dtype, op, prescale, postscale)
        if result is packed:
            _segments(pairs)[1].write(0, packed)

    def _reduce_in_ring(self, pairs: Pairs, dtype: DType, op: ReduceOp, prescale: float, postscale: float) -> None:
        """2 (P - 1) steps, 2 S (P - 1) / P bytes: slices go round once to be reduced and once to be shared.

        Once for each long array, in place, and once for each piece of the others, packed.
        """
        limit = ALONE if len(pairs) > 1 else 0
        for source, destination in pairs:
            if source.nbytes > limit:
                scale_array(source, destination, dtype, prescale)
                self._ring(destination, op)
                scale_array(destination, destination, dtype, postscale)
        fused = [pair for pair in pairs if pair[0].nbytes <= limit]
        inputs, outputs = _segments(fused)
        for start, count in _pieces(len(inputs), self._piece // dtype.itemsize):
            packed = self._outgoing.take(count, dtype)
            inputs.read(start, packed)
            scale_array(packed, packed, dtype, prescale)
            self._ring(packed, op)
            scale_array(packed, packed, dtype, postscale)
            outputs.write(start, packed)

    def _reduce_slices(
        self, pairs: Pairs, count: int, dtype: DType, op: ReduceOp, prescale: float, postscale: float
    ) -> None:
        """P steps, 2 S (P - 1) / P bytes: each member reduces one slice, all of them padded to one length."""
        source, destination = _segments(pairs)
        for start, length in _pieces(count, self._piece // dtype.itemsize):
            share = -(-length // self.size)
            packed = self._outgoing.take(share * self.size, dtype)
            received = self._incoming.take(share * self.size, dtype)
            source.read(start, packed[:length])
            packed[length:] = 0
            self._exchange(packed, received)
            reduce_arrays(received[:share], [*self._rows(received)], dtype, op, prescale, postscale)
            self._allgather_even(received[:share], packed)
            destination.write(start, packed[:length])

    def _scatter(self, source: Segments, places: Sequence[int], lengths: Sequence[int], dtype: DType) -> Array:
        """One step: ``lengths[r]`` elements from ``places[r]`` on go to member r; what comes here, in rank order."""
        is_together = all(place == places[0] + part.start for place, part in zip(places, _parts(lengths), strict=True))
        packed = source.view(places[0], places[0] + sum(lengths)) if is_together else None
        if packed is None:
            packed = self._outgoing.take(sum(lengths), dtype)
            for place, part in zip(places, _parts(lengths), strict=True):
                source.read(place, packed[part])
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

    def _allgather_even(self, source: Array, destination: Array) -> None:
        self._run("_allgather_base", self._tensor(_bytes(destination)), self._tensor(_bytes(source)))

    def _allgather_padded(
        self, source: Segments, start: int, destination: Segments, places: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """What member r has from ``start`` on, ``lengths[r]`` bytes, belongs to ``places[r]`` of the result."""
        padded = self._outgoing.take(max(lengths), DType.UINT8)
        source.read(start, padded[: lengths[self.rank]])
        received = self._incoming.take(padded.size * self.size, DType.UINT8)
        self._allgather_even(padded, received)
        for row, place, length in zip(self._rows(received), places, lengths, strict=True):
            destination.write(place, row[:length])

    def _allgather_skewed(
        self, source: Segments, start: int, destination: Segments, places: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """As :meth:`_allgather_padded`."""
        for root, (place, length) in enumerate(zip(places, lengths, strict=True)):
            part = self._outgoing.take(length, DType.UINT8)
            if root == self.rank:
                source.read(start, part)
            self.broadcast_bytes(part, part, root)
            destination.write(place, part)

    def _exchange(
        self, source: Array, destination: Array, send_counts: Sequence[int] = (), receive_counts: Sequence[int] = ()
    ) -> None:
        """One alltoall of bytes; without counts in equal parts."""
        tensors = self._tensor(_bytes(destination)), self._tensor(_bytes(source))
        self._run("alltoall_base", *tensors, receive_counts, send_counts)

    def _ring(self, array: Array, op: ReduceOp) -> None:
        options = self._torch.distributed.AllreduceOptions()
        options.reduceOp = getattr(self._torch.distributed.ReduceOp, _RING_OPS[op])
        self._run("allreduce", [self._tensor(array)], options)

    def _rows(self, flat: Array) -> Array:
        return flat.reshape(self.size, flat.size // self.size)

    def _tensor(self, array: Array) -> Any:
        return self._torch.from_numpy(array if array.flags.writeable else array.copy())

    def _exchange_addresses(self, address: bytes) -> frozenset[bytes]:
        mine, theirs = np.frombuffer(address, np.uint8), np.empty(ADDRESS_BYTES * self.size, np.uint8)
        self._allgather_direct(Segments([mine]), Segments([theirs]), [ADDRESS_BYTES] * self.size)
        return frozenset(row.tobytes() for row in self._rows(theirs)) - {NOWHERE}

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self, operation: str, *arguments: object) -> None:
        """Do one operation of the group.

        No frame of a traceback may hold the work or the group: nobody could tell when they would be dropped.
        """
        try:
            self._wait(getattr(self._group, operation)(*arguments))
        except RuntimeError as error:
            raise self._fail(error) from error.with_traceback(None)
        self._check()

    def _wait(self, work: Any) -> None:
        """Wait in slices, because only our own flag ends a wait, and because Gloo may miss that a connection broke."""
        while not _finished(work, SLICE):
            if self._error is not None or self._connections.broken():
                if not _finished(work, GRACE):
                    self._unfinished = work
                    self._fail(PeerLostError(f"the connection to {some_of(self.group)} is gone; form a new job"))
                return

    def _fail(self, error: Exception) -> Exception:
        """The error that this and all later calls raise. The peers lose us, so that they do not wait in vain."""
        with self._error_lock:
            if self._error is None:
                self._error = translate(error, self.group)
        self._connections.shut_down()
        return self._error


def _drop(group: Any, work: Any) -> None:
    """Hold ``group`` until ``work`` has ended, within Gloo's timeout; then nothing blocks where it is dropped.

    It polls, because a thread that waits inside Gloo when the interpreter ends would abort the process.
    """
    while not work.is_completed():
        time.sleep(POLL)


def _finished(work: Any, limit: timedelta) -> bool:
    """Wait for ``work`` for a while; raises what it failed with. An expired wait does not stop the operation."""
    with suppress(RuntimeError):
        work.wait(limit)
        return True
    if not work.is_completed():
        return False
    work.wait()  # It has failed, or it ended just when the limit expired: this tells which.
    return True


def _pack(pairs: Pairs, packed: Array) -> None:
    if len(pairs) == 1:
        np.copyto(packed, pairs[0][0])
    else:
        np.concatenate([source for source, _ in pairs], out=packed)


def _segments(pairs: Pairs) -> tuple[Segments, Segments]:
    return Segments([source for source, _ in pairs]), Segments([destination for _, destination in pairs])


def _pieces(total: int, step: int) -> Iterator[tuple[int, int]]:
    """Start and length of each piece of at most ``step``."""
    for start in range(0, total, step):
        yield start, min(step, total - start)


def _clip(count: int, limit: int) -> int:
    return max(0, min(count, limit))


def _parts(counts: Sequence[int]) -> list[slice]:
    """Where each member's part lies in a buffer that holds ``counts[r]`` elements for member r, in rank order."""
    return [slice(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)]


def _bytes(array: Array) -> Bytes:
    return array.view(np.uint8)
