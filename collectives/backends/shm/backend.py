"""Collectives through shared memory, for ranks of one host.

An operation runs in rounds, each on the next buffer of every rank: copy a piece into its own buffer, cross the barrier,
read the buffers of the others. Buffers are small so that they stay in the cache: the only traffic to main memory is
reading the source and writing the destination.

Allreduce through buffers: two algorithms, by bytes.

S bytes on n ranks. *Everywhere*, up to SMALL_BYTES: each rank copies S in, crosses the barrier and combines everything
itself, which reads n S. *Slices*, for the rest: a rank owns an n-th of every round. It copies the slices of the others
into its buffer, (n - 1) / n S; combines its own slice of all buffers and of its source, S; writes the result over the
inputs in every other buffer, (n - 1) / n S; and copies the results of the others out of its own buffer, (n - 1) / n S.
Between these steps lies a crossing; a pipeline of rounds shares it.

Where cores share no cache, the ownership of cache lines limits the speed. If one core has only read a line, another
core must first invalidate that copy before it writes, one line at a time: 2.4 GB/s on an AMD EPYC across two core
complexes. If the reading core has also written the line, it moves at full speed: 11 to 18 GB/s. So the results go back
into every buffer, although one copy would be enough: each line is written by the rank that read it last.

*In place*, for tensors that lie in memory which the ranks share: a rank combines its n-th of the tensors themselves,
and writes the result to those of all ranks. On two ranks 23 MB take 4 ms that way, and 8 ms through the buffers. Ranks
agree on it in the first crossing, where each shows a digest of the places of its tensors. If one has them elsewhere,
the slices go on.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextvars import copy_context
from hashlib import blake2b
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from collectives.api import ReduceOp, override
from collectives.backends.base import Bootstrap, Call, Group, OffersVote, OnDeath, OnMissing, OnWait, Vote
from collectives.backends.completion import DONE, Completion
from collectives.backends.host import Array, Bytes, HostBackend
from collectives.backends.phases import phase
from collectives.backends.shm.barrier import (
    BUFFER_BYTES,
    BarrierDisagreement,
    ShmBarrier,
    ShmBuffers,
    barrier_bytes,
    buffers_bytes,
)
from collectives.backends.shm.deaths import DeathWatch, deaths_bytes
from collectives.backends.shm.movement import Movement
from collectives.backends.shm.segment import Segment, SegmentSource, receive_segment
from collectives.buffers import Buffer
from collectives.kernels.reduction import ReductionKernel, reduction
from collectives.kernels.segments import Segments
from collectives.net.attempts import ConnectAttempt

SMALL_BYTES = 1 << 15
ALIGNMENT = 64
PIECE_BYTES = 1 << 17
"""So much of the tensors of each rank stays in the cache between reading and writing it."""
KEPT_PLACES = 1 << 10


class SharedRows:
    """Memory that all members read and write: the row of each, by position, all of one length.

    ``key`` tells these rows apart from others on all members.
    """

    def __init__(self, rows: Sequence[Bytes], position: int, key: bytes) -> None:
        self._rows = list(rows)
        self._start, self._nbytes = _address(rows[position]), rows[position].nbytes
        self._key = key
        self._known: dict[int, list[Segments]] = {}

    def find(self, arrays: Sequence[Array]) -> tuple[int, Sequence[Segments]]:
        """A digest of the places of ``arrays`` in this member's row, and the same places of all rows.

        (0, []) if one of them is elsewhere, or two of them overlap.
        """
        starts = [_address(array) - self._start for array in arrays]
        stops = [start + array.nbytes for start, array in zip(starts, arrays, strict=True)]
        if min(starts) < 0 or max(stops) > self._nbytes:
            return 0, []
        places = np.array([starts, stops]).tobytes() + arrays[0].dtype.char.encode()
        digest = int.from_bytes(blake2b(places, key=self._key, digest_size=8).digest(), "big") or 1
        if digest not in self._known:
            if len(self._known) == KEPT_PLACES:
                self._known.clear()
            spans = list(zip(starts, stops, strict=True))
            is_clear = all(stop <= start for (_, stop), (start, _) in pairwise(sorted(spans)))
            self._known[digest] = [_segments(row, spans, arrays[0].dtype) for row in self._rows] if is_clear else []
        return (digest, self._known[digest]) if self._known[digest] else (0, [])


def _segments(row: Bytes, spans: Sequence[tuple[int, int]], dtype: np.dtype[Any]) -> Segments:
    return Segments([row[start:stop].view(dtype) for start, stop in spans])


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


class ShmRound(NamedTuple):
    """``length`` elements of the long vector from ``start`` on, and the buffers they go through.

    This rank owns [lower, upper) of them.
    """

    buffers: list[Array]
    start: int
    length: int
    lower: int
    upper: int


class ShmAllreduce:
    """The work of one rank; all ranks call it in step, over the same ``buffers`` and ``barrier``."""

    def __init__(self, rank: int, size: int, buffers: ShmBuffers, barrier: ShmBarrier) -> None:
        self._rank = rank
        self._size = size
        self._buffers = buffers
        self._barrier = barrier
        self._shared: list[weakref.ref[SharedRows]] = []
        self._shows_place = False
        # NumPy keeps what it does about an overflow in the context. To set that in each call takes longer than to add.
        self._silently = copy_context().run
        self._silently(np.seterr, all="ignore")

    def share(self, rows: SharedRows) -> None:
        """Look for tensors in ``rows``, as long as somebody has them. Any thread."""
        self._shared.append(weakref.ref(rows, self._shared.remove))

    def of_one(self, source: Array, destination: Array, reduction: ReductionKernel) -> None:
        """destination = the reduction of all ranks' sources, for one array each; they may be the same memory."""
        if source.nbytes > SMALL_BYTES:
            self._in_slices(Segments((source,)), Segments((destination,)), reduction)
            return
        count = len(source)  # as in _everywhere(): for a small array, its segments would take longer than the data
        buffers = self._buffers.next(reduction.dtype)
        buffers[self._rank][:count] = source
        self._barrier.cross()
        self._silently(reduction.combine, destination, [buffer[:count] for buffer in buffers])

    def __call__(self, source: Segments, destination: Segments, reduction: ReductionKernel) -> None:
        """destination = the reduction of all ranks' sources; they may be the same memory."""
        if len(source) * reduction.dtype.itemsize <= SMALL_BYTES:
            self._everywhere(source, destination, reduction)
        else:
            self._in_slices(source, destination, reduction)

    def _everywhere(self, source: Segments, destination: Segments, reduction: ReductionKernel) -> None:
        """One crossing; every rank combines everything itself."""
        count = len(source)
        buffers = self._buffers.next(reduction.dtype)
        source.read(0, buffers[self._rank][:count])
        self._barrier.cross()
        whole = destination.view(0, count)
        result = np.empty(count, reduction.dtype.storage) if whole is None else whole
        self._silently(reduction.combine, result, [buffer[:count] for buffer in buffers])
        if whole is None:
            destination.write(0, result)

    def _in_slices(self, source: Segments, destination: Segments, reduction: ReductionKernel) -> None:
        """A pipeline: between two crossings a rank copies in one round, combines the one before, and copies out the
        one before that.

        Copying in comes before the wait, which it shortens: it writes to the buffer of three rounds ago. All others had
        finished with that buffer when they arrived at the last barrier but one. After the last barrier a rank uses only
        its own buffer. So the next operation may use the same buffers, which are in the cache.
        """
        before = self._buffers.turn
        digest, tensors = self._place(source, destination) if self._shared else (0, [])
        if digest or self._shows_place:
            self._barrier.show(digest)
            self._shows_place = bool(digest)
        total, step = len(source), BUFFER_BYTES // reduction.dtype.itemsize
        rounds = [self._round(start, min(step, total - start), reduction) for start in range(0, total, step)]
        for turn in range(len(rounds) + 2):
            if turn == 1 and digest and self._is_in_place(digest):
                self._combine_in_place(tensors, reduction)
                self._barrier.cross()
                break
            if turn < len(rounds):
                self._copy_in(rounds[turn], source)
            if turn:
                self._barrier.wait()
            if 0 < turn <= len(rounds):
                self._combine(rounds[turn - 1], source, destination, reduction)
            if turn > 1:
                self._copy_out(rounds[turn - 2], destination)
            if turn <= len(rounds):
                self._barrier.arrive()
        self._buffers.turn = before

    def _place(self, source: Segments, destination: Segments) -> tuple[int, Sequence[Segments]]:
        """The digest for the others, and the tensors of all ranks; (0, []) where all share no memory for them."""
        if [_address(array) for array in source.arrays] != [_address(array) for array in destination.arrays]:
            return 0, []
        for each in list(self._shared):
            rows = each()
            digest, tensors = rows.find(source.arrays) if rows is not None else (0, [])
            if digest:
                return digest, tensors
        return 0, []

    def _is_in_place(self, digest: int) -> bool:
        """After the first crossing: whether the tensors of all ranks are at one place of their rows."""
        self._barrier.wait()
        return self._barrier.all_show(digest)

    @phase("combine")
    def _combine_in_place(self, tensors: Sequence[Segments], reduction: ReductionKernel) -> None:
        """On the slice of this rank, in the tensors of all ranks."""
        step, span = PIECE_BYTES // reduction.dtype.itemsize, self._slice(len(tensors[0]))
        for parts in zip(*[each.parts(*span) for each in tensors], strict=True):
            for start in range(0, len(parts[0]), step):
                self._barrier.check()  # after an abort this rank writes no more
                inputs = [part[start : start + step] for part in parts]
                result = inputs[self._rank]
                self._silently(reduction.combine, result, inputs)
                del inputs[self._rank]
                for other in inputs:
                    other[:] = result

    def _slice(self, length: int) -> tuple[int, int]:
        """The first of ``length`` elements that this rank owns, and the one after the last."""
        share = -(-length // self._size)
        share += -share % ALIGNMENT
        return min(self._rank * share, length), min((self._rank + 1) * share, length)

    def _round(self, start: int, length: int, reduction: ReductionKernel) -> ShmRound:
        return ShmRound(self._buffers.next(reduction.dtype), start, length, *self._slice(length))

    @phase("copy in")
    def _copy_in(self, round: ShmRound, source: Segments) -> None:
        buffer = round.buffers[self._rank]
        source.read(round.start, buffer[: round.lower])
        source.read(round.start + round.upper, buffer[round.upper : round.length])

    @phase("combine")
    def _combine(self, round: ShmRound, source: Segments, destination: Segments, reduction: ReductionKernel) -> None:
        if round.lower == round.upper:
            return
        start, stop = round.start + round.lower, round.start + round.upper
        inputs = [buffer[round.lower : round.upper] for buffer in round.buffers]
        unused = inputs[self._rank]  # no other rank reads or writes there
        inputs[self._rank] = source.gather(start, stop)
        whole = destination.view(start, stop)
        result = unused if whole is None else whole
        self._silently(reduction.combine, result, inputs)
        del inputs[self._rank]
        for other in inputs:
            other[:] = result
        if whole is None:
            destination.write(start, result)

    @phase("copy out")
    def _copy_out(self, round: ShmRound, destination: Segments) -> None:
        buffer = round.buffers[self._rank]
        destination.write(round.start, buffer[: round.lower])
        destination.write(round.start + round.upper, buffer[round.upper : round.length])


class ShmVote(Vote):
    """The first crossing of an operation compares the values. Before it, an operation writes to own buffers only."""

    def __init__(self, barrier: ShmBarrier, buffers: ShmBuffers) -> None:
        self._barrier = barrier
        self._buffers = buffers

    @override
    def attempt(self, value: int, call: Call, waiting: OnMissing, agreed: Call) -> bool:
        turn = self._buffers.turn
        self._barrier.ask(value, waiting, agreed)
        try:
            call()
            if self._barrier.is_asking:  # the operation had nothing to exchange
                self._barrier.cross()
        except BarrierDisagreement:
            self._buffers.turn = turn
            return False
        return True

    @override
    def decline(self) -> None:
        self._barrier.arrive()


PAGE = 4096


class ShmBackend(HostBackend, OffersVote):
    """A :class:`HostBackend`. All ranks must be on one host and run as one user; Linux only."""

    name = "shm"
    closes_aside = True

    def __init__(self, group: Group, segment: Segment, timeout: float, crowded: bool) -> None:
        super().__init__(group)
        rank, size = group.position, group.size
        self._segment = segment
        base, barrier = _buffers_start(size), barrier_bytes(size)
        self._barrier = ShmBarrier(segment.array[:barrier], group, timeout, crowded)
        self._words = segment.array[barrier : barrier + deaths_bytes(size)]
        self._deaths: DeathWatch | None = None
        self._buffers = ShmBuffers(segment.array[base : base + buffers_bytes(size)], size)
        self._allreduce = ShmAllreduce(rank, size, self._buffers, self._barrier)
        self._movement = Movement(rank, size, self._buffers, self._barrier)
        self._closed = False

    @override
    def allreduce(
        self,
        sources: Sequence[Buffer],
        destinations: Sequence[Buffer],
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Completion:
        if len(sources) == 1:  # the shorter way: the lists of several would take longer than a small tensor
            source, destination = sources[0].array, destinations[0].array
            if source is not None and destination is not None:
                self._allreduce.of_one(source, destination, reduction(sources[0].dtype, op, prescale, postscale))
                return DONE
        return super().allreduce(sources, destinations, op, prescale, postscale)

    @override
    def allreduce_arrays(self, sources: Sequence[Array], destinations: Sequence[Array], how: ReductionKernel) -> None:
        self._allreduce(Segments(sources), Segments(destinations), how)

    @override
    def reducescatter_arrays(
        self, sources: Sequence[Array], destinations: Sequence[Array], counts: Sequence[int], how: ReductionKernel
    ) -> None:
        """One crossing per BUFFER_BYTES / (size - 1) for each of the other members."""
        self._movement.reducescatter(Segments(sources), Segments(destinations), counts, how)

    @override
    def allgather_bytes(self, sources: Sequence[Bytes], destinations: Sequence[Bytes], counts: Sequence[int]) -> None:
        """One crossing per BUFFER_BYTES of the largest source."""
        self._movement.allgather(Segments(sources), Segments(destinations), counts)

    @override
    def broadcast_bytes(self, source: Bytes, destination: Bytes, root: int) -> None:
        """One crossing per BUFFER_BYTES."""
        self._movement.broadcast(source, destination, root)

    @override
    def alltoall_bytes(
        self, source: Bytes, destination: Bytes, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> None:
        """One crossing per BUFFER_BYTES / (size - 1) for each of the other members."""
        self._movement.alltoall(source, destination, send_counts, receive_counts)

    @override
    def share(self, rows: Sequence[Bytes], key: bytes) -> SharedRows:
        shared = SharedRows(rows, self.group.position, key)
        self._allreduce.share(shared)
        return shared

    @override
    def vote(self) -> Vote:
        """The first crossing of an operation is a round of the vote."""
        return ShmVote(self._barrier, self._buffers)

    @override
    def attend(self, on_wait: OnWait) -> None:
        self._barrier.on_wait = on_wait

    @override
    def waited(self) -> tuple[float, float]:
        return self._barrier.waited()

    @override
    def watch(self, on_death: OnDeath) -> None:
        ranks = self.group.ranks
        self._deaths = DeathWatch(self._words, self.group.position, lambda position: on_death(ranks[position]))

    @override
    def phased(self) -> Sequence[object]:
        return self._allreduce, self._movement, self._barrier

    @override
    def wait_for_all(self) -> None:
        """One crossing."""
        self._barrier.cross()

    @override
    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._deaths is not None:
                self._deaths.close()
            del self._words
            self._barrier.close()
            self._buffers.close()
            self._segment.close()

    @override
    def abort(self, error: Exception) -> None:
        self._barrier.abort(error)


def segment_bytes(size: int) -> int:
    """Bytes of shared memory for a group of ``size`` members."""
    return _buffers_start(size) + buffers_bytes(size)


def _buffers_start(size: int) -> int:
    return -(-(barrier_bytes(size) + deaths_bytes(size)) // PAGE) * PAGE


class ShmBootstrap(Bootstrap):
    """A :class:`Bootstrap`. ``timeout`` bounds the silence of a peer within an operation, in seconds.

    ``crowded``: the host has more ranks than cores, see :class:`collectives.cores.Cores`.
    """

    def __init__(self, group: Group, timeout: float, crowded: bool) -> None:
        self._crowded = crowded
        self._nbytes = segment_bytes(group.size)
        self._timeout = timeout
        self._source = None if group.position else SegmentSource(self._nbytes, group.size)
        super().__init__(group, self._source.address if self._source is not None else b"")

    @override
    def connect(self, offers: Sequence[bytes], attempt: ConnectAttempt) -> ShmBackend:
        if self._source is not None:
            segment = self._source.hand_out(self.group, attempt)
        else:
            segment = receive_segment(offers[0], self._nbytes, self.group, attempt)
        return ShmBackend(self.group, segment, self._timeout, self._crowded)

    @override
    def close(self) -> None:
        if self._source is not None:
            self._source.close()
