"""Collectives between GPUs with NCCL.

NCCL's reducescatter and allgather take as many elements from each member. So the parts of all members travel side by
side, a piece of each at a time, and shorter parts leave room that nobody reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate, compress
from operator import not_
from typing import NamedTuple, TypeAlias

from collectives.api import DType, ReduceOp, override
from collectives.backends.base import Backend, Group, OnWait, ignore_waits
from collectives.backends.completion import DONE, Completion
from collectives.backends.memory import Memory
from collectives.backends.nccl.interface import Connect, NcclConnection, Placed, Recipe, recipe
from collectives.backends.nccl.life import Life, NcclOperation
from collectives.backends.nccl.watcher import Watcher
from collectives.buffers import Buffer, as_bytes
from collectives.kernels.segments import Plane, Span


class PaddedColumn(NamedTuple):
    """``width`` elements of room for each member; ``spans[m]`` are the elements of member m that travel in it."""

    width: int
    spans: Sequence[Span]

    def pieces(self, plane: Plane, member: int, shift: int = 0) -> list[Placed]:
        """The memory of the part of ``member``; ``plane`` begins at element ``shift`` of all elements."""
        start, stop = self.spans[member]
        return placed(plane, (start - shift, stop - shift), member * self.width)


def columns(counts: Sequence[int], room: int) -> Iterator[PaddedColumn]:
    """The columns for ``counts[m]`` elements of each member m, of at most ``room`` elements in all."""
    starts = [end - count for end, count in zip(accumulate(counts), counts, strict=True)]
    longest, step = max(counts), max(1, room // len(counts))
    for begin in range(0, longest, step):
        end = min(begin + step, longest)
        spans = [
            (start + min(begin, count), start + min(end, count)) for start, count in zip(starts, counts, strict=True)
        ]
        yield PaddedColumn(end - begin, spans)


def placed(plane: Plane, span: Span, at: int = 0) -> list[Placed]:
    """The buffers of ``span``, one after another from element ``at`` on."""
    buffers = plane.pieces(span)
    starts = accumulate([buffer.count for buffer in buffers], initial=at)
    return [Placed(start, buffer) for start, buffer in zip(starts, buffers, strict=False)]


ROOM = 32 << 20
"""Bytes of the memory in which tensors are packed."""
LARGE = 1 << 20
"""Tensors of so many bytes travel in place: to pack them costs more than a call of their own."""

Pair: TypeAlias = tuple[Buffer, Buffer]
"""A source and its destination."""


class NcclBackend(Backend):
    """The member of a group that reaches the others through NCCL.

    The members connect in their first operation, because only its tensors tell which GPU a rank uses. No operation
    waits for the GPU. NCCL adds 16-bit floats in 16 bits, so a sum is rounded once for each member.

    ``timeout`` bounds the time of an operation, in seconds. With ``settles_early`` the streams of callers wait for an
    operation, without it the callers do. ``absence`` says why there is no such backend on this or another member; empty
    where there is.
    """

    name = "nccl"
    device = "cuda"

    def __init__(
        self,
        group: Group,
        connect: Connect,
        watcher: Watcher,
        timeout: float = 30.0,
        settles_early: bool = True,
        absence: str = "",
    ) -> None:
        super().__init__(group)
        self.settles_early = settles_early
        self.absence = absence
        self._life = Life(group, timeout, watcher)
        self._connect = connect
        self._link: NcclConnection | None = None
        self._room: Buffer | None = None
        self._awaited: list[Completion] = []
        self._begin: Completion = DONE
        self._on_wait: OnWait = ignore_waits

    @property
    @override
    def memory(self) -> Memory:  # type: ignore[override]
        """The first use connects the members."""
        return self._opened(0).device

    @override
    def allreduce(
        self,
        sources: Sequence[Buffer],
        destinations: Sequence[Buffer],
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Completion:
        how = recipe(sources[0].dtype, op, prescale, postscale, self.group.size)
        pairs = [(source, target) for source, target in zip(sources, destinations, strict=True) if source.count]
        alone, packed = _divide(pairs, how)
        with self._launching(destinations) as link:
            if alone:
                _reduce_in_place(link, alone, how)
            if packed:
                self._reduce_packed(link, packed, how)
            return self._end(link)

    @override
    def reducescatter(
        self,
        sources: Sequence[Buffer],
        destinations: Sequence[Buffer],
        counts: Sequence[int],
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Completion:
        how = recipe(sources[0].dtype, op, prescale, postscale, self.group.size)
        source, target = _only(sources), _only(destinations)
        with self._launching(destinations) as link:
            if source and target and how.is_native and how.before == 1.0 and len(set(counts)) == 1:
                carrier, stream = how.conversion.carrier, link.device.stream
                link.communicator.reducescatter(source.pointer, target.pointer, counts[0], carrier, how.combine, stream)
                _scale(link, [target], how.after)
            else:
                self._reducescatter_packed(link, Plane(sources), Plane(destinations), counts, how)
            return self._end(link)

    @override
    def allgather(self, sources: Sequence[Buffer], destinations: Sequence[Buffer], counts: Sequence[int]) -> Completion:
        source, target = _only(sources), _only(destinations)
        with self._launching(destinations) as link:
            if target and (source or not counts[self.group.position]):
                self._gather(link, source.pointer if source else 0, target.pointer, counts)
            elif sum(counts):
                self._gather_packed(link, Plane(as_bytes(sources)), Plane(as_bytes(destinations)), counts)
            return self._end(link)

    @override
    def broadcast(self, source: Buffer, destination: Buffer, root: int) -> Completion:
        with self._launching([destination]) as link:
            if source.nbytes:
                link.communicator.broadcast(
                    source.pointer, destination.pointer, source.nbytes, DType.UINT8, root, link.device.stream
                )
            return self._end(link)

    @override
    def alltoall(
        self, source: Buffer, destination: Buffer, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Completion:
        with self._launching([destination]) as link:
            if source.pointer == destination.pointer and source.nbytes:
                source = _copied(link, source.cast(DType.UINT8))
            stream, start, begin = link.device.stream, source.pointer, destination.pointer
            with link.library.group():
                for peer, (sent, received) in enumerate(zip(send_counts, receive_counts, strict=True)):
                    if sent:
                        link.communicator.send(start, sent, DType.UINT8, peer, stream)
                    if received:
                        link.communicator.receive(begin, received, DType.UINT8, peer, stream)
                    start, begin = start + sent, begin + received
            return self._end(link)

    @override
    def barrier(self) -> Completion:
        with self._launching([]) as link:
            room = self._room_of(link, DType.UINT8, 1)
            how = recipe(DType.UINT8, ReduceOp.MAX, 1.0, 1.0, self.group.size)
            _combine(link, room, room, how)
            return self._end(link)

    @override
    def begin_after(self, ready: Completion) -> None:
        self._awaited.append(ready)

    @override
    def attend(self, on_wait: OnWait) -> None:
        """Only the connecting of the members waits."""
        self._on_wait = on_wait

    @override
    def close(self) -> None:
        self._life.close()
        self._link = self._room = None

    @override
    def abort(self, error: Exception) -> None:
        self._life.fail(error)

    # The parts of an operation.

    @contextmanager
    def _launching(self, destinations: Sequence[Buffer]) -> Iterator[NcclConnection]:
        link = self._opened(destinations[0].pointer if destinations else 0)
        with self._life.launching(), link.device.current():
            for ready in {id(buffer.ready): buffer.ready for buffer in destinations}.values():
                if ready is not None:
                    link.device.begin_after(ready)
            self._begin = link.device.fence()
            yield link

    def _opened(self, address: int) -> NcclConnection:
        self._life.check()
        if self._link is None:
            with self._life.connecting(self._on_wait) as pause:
                self._link = self._connect(address, pause)
            self._life.begin(self._link)
        awaited, self._awaited = self._awaited, []
        for ready in awaited:
            self._link.device.begin_after(ready)
        return self._link

    def _end(self, link: NcclConnection) -> Completion:
        operation = NcclOperation(link.device.fence(), self._life.check, self._begin)
        self._life.launched(operation)
        return operation

    def _room_of(self, link: NcclConnection, dtype: DType, count: int) -> Buffer:
        """Memory for ``count`` elements, the same for all operations: they run one after another."""
        nbytes = count * dtype.itemsize
        if self._room is None or self._room.nbytes < nbytes:
            self._room = link.device.empty(DType.UINT8, (max(nbytes, LARGE),))
        return self._room.part(0, nbytes).cast(dtype)

    def _reduce_packed(self, link: NcclConnection, pairs: Sequence[Pair], how: Recipe) -> None:
        sources, targets = (Plane(buffers) for buffers in zip(*pairs, strict=True))
        carrier = how.conversion.carrier
        step = ROOM // carrier.itemsize
        for start in range(0, sources.end, step):
            span = start, min(start + step, sources.end)
            room = self._room_of(link, carrier, span[1] - span[0])
            link.device.pack(placed(sources, span), room, how.conversion, how.before)
            _combine(link, room, room, how)
            link.device.unpack(room, placed(targets, span), how.conversion, how.after)

    def _reducescatter_packed(
        self, link: NcclConnection, sources: Plane, targets: Plane, counts: Sequence[int], how: Recipe
    ) -> None:
        position, carrier = self.group.position, how.conversion.carrier
        members, shift = range(len(counts)), sum(counts[:position])
        for column in columns(counts, ROOM // carrier.itemsize):
            room = self._room_of(link, carrier, len(counts) * column.width)
            pieces = [piece for member in members for piece in column.pieces(sources, member)]
            link.device.pack(pieces, room, how.conversion, how.before)
            own = room.part(position * column.width, (position + 1) * column.width)
            link.communicator.reducescatter(
                room.pointer, own.pointer, column.width, carrier, how.combine, link.device.stream
            )
            link.device.unpack(room, column.pieces(targets, position, shift), how.conversion, how.after)

    def _gather(self, link: NcclConnection, source: int, target: int, counts: Sequence[int]) -> None:
        stream = link.device.stream
        if len(set(counts)) == 1:
            link.communicator.allgather(source, target, counts[0], DType.UINT8, stream)
            return
        with link.library.group():
            for member, count in enumerate(counts):
                if count:  # the source of the others is not read
                    read = source if member == self.group.position else target
                    link.communicator.broadcast(read, target, count, DType.UINT8, member, stream)
                target += count

    def _gather_packed(self, link: NcclConnection, sources: Plane, targets: Plane, counts: Sequence[int]) -> None:
        position, members = self.group.position, range(len(counts))
        shift = sum(counts[:position])
        for column in columns(counts, ROOM):
            room = self._room_of(link, DType.UINT8, len(counts) * column.width)
            link.device.pack(column.pieces(sources, position, shift), room)
            own = room.part(position * column.width, (position + 1) * column.width)
            link.communicator.allgather(own.pointer, room.pointer, column.width, DType.UINT8, link.device.stream)
            link.device.unpack(room, [piece for member in members for piece in column.pieces(targets, member)])


def _divide(pairs: list[Pair], how: Recipe) -> tuple[list[Pair], list[Pair]]:
    """The tensors that travel on their own, and those that are packed."""
    if not how.is_native:
        return [], pairs
    if len(pairs) == 1:
        return pairs, []
    is_large = [source.nbytes >= LARGE for source, _ in pairs]
    if not any(is_large):
        return [], pairs
    return [*compress(pairs, is_large)], [*compress(pairs, map(not_, is_large))]


def _only(buffers: Sequence[Buffer]) -> Buffer | None:
    """The one that is not empty; None where there are several, or none."""
    full = [buffer for buffer in buffers if buffer.count]
    return full[0] if len(full) == 1 else None


def _copied(link: NcclConnection, source: Buffer) -> Buffer:
    copy = link.device.empty(source.dtype, source.shape)
    link.device.copy(source, copy)
    return copy


def _combine(link: NcclConnection, source: Buffer, target: Buffer, how: Recipe) -> None:
    link.communicator.allreduce(
        source.pointer, target.pointer, source.count, how.conversion.carrier, how.combine, link.device.stream
    )


def _scale(link: NcclConnection, buffers: Sequence[Buffer], factor: float) -> None:
    if factor != 1.0:
        for buffer in buffers:
            link.device.scale(buffer, buffer, factor)


def _reduce_in_place(link: NcclConnection, pairs: Sequence[Pair], how: Recipe) -> None:
    """Each tensor without a copy; the calls begin together."""
    if how.before != 1.0:
        for source, target in pairs:
            link.device.scale(source, target, how.before)
        pairs = [(target, target) for _, target in pairs]
    with link.library.group() if len(pairs) > 1 else nullcontext():
        for source, target in pairs:
            _combine(link, source, target, how)
    _scale(link, [target for _, target in pairs], how.after)
