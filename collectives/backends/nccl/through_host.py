"""The memory of GPUs with a backend for host memory: copies there and back, through pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgpack

from collectives.api import DType, Parameters, ReduceOp, ShutDownError, override
from collectives.backends.base import Backend, Bootstrap, Group, OnDeath, OnWait, ignore_waits
from collectives.backends.completion import Completion
from collectives.backends.nccl.backend import placed
from collectives.backends.nccl.interface import Device, Placed
from collectives.backends.nccl.life import NcclOperation
from collectives.backends.nccl.presence import device_at, without_gpu
from collectives.backends.single import SingleBackend
from collectives.buffers import Buffer, as_bytes
from collectives.kernels.segments import Plane
from collectives.net.attempts import ConnectAttempt

PIECE = 4 << 20
"""Bytes of an allreduce that travel at once: the GPU copies a piece while the host combines the one before."""
LOOK_SECONDS = 0.05
"""How often a wait for the GPU looks for an abort, and lets the engine work: other ranks may hold the GPU up."""

Place = Callable[[int], Device]
"""The GPU with the tensor at an address; with 0, that of this rank."""


class ThroughHostBackend(Backend):
    """Runs the operations of ``inner`` on copies. It waits for the GPU until these are there, then for ``inner``.

    It owns ``inner``. With ``settles_early`` the streams of callers wait for the copies back, else the callers do.
    ``absence`` says why there is no such backend; empty where there is.
    """

    device = "cuda"

    def __init__(self, inner: Backend, place: Place, settles_early: bool = True, absence: str = "") -> None:
        super().__init__(inner.group)
        self.name = inner.name
        self.settles_early = settles_early
        self.absence = absence
        self._inner = inner
        self._place = place
        self._device: Device | None = None
        self._awaited: list[Completion] = []
        self._on_wait: OnWait = ignore_waits
        self._error: Exception | None = None

    @property
    @override
    def memory(self) -> Device:  # type: ignore[override]
        return self._ready(0)

    @override
    def allreduce(
        self,
        sources: Sequence[Buffer],
        destinations: Sequence[Buffer],
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Completion:
        """A pipeline of pieces, each in place on the host."""
        device, dtype = self._begin(destinations), sources[0].dtype
        ins, outs = Plane(sources), Plane(destinations)
        room = device.pinned(ins.end * dtype.itemsize).cast(dtype)
        step = PIECE // dtype.itemsize
        spans = [(start, min(start + step, ins.end)) for start in range(0, ins.end, step)]
        copied = [_down(device, ins, spans[0], room)] if spans else []
        for number, span in enumerate(spans):
            copied += [_down(device, ins, after, room) for after in spans[number + 1 : number + 2]]
            self._await(copied[number])
            piece = room.part(*span)
            self._inner.allreduce([piece], [piece], op, prescale, postscale)
            _up(device, room, outs, span)
        return self._end(device, room)

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
        return self._run(
            sources,
            destinations,
            lambda ins, outs: self._inner.reducescatter([ins], [outs], counts, op, prescale, postscale),
        )

    @override
    def allgather(self, sources: Sequence[Buffer], destinations: Sequence[Buffer], counts: Sequence[int]) -> Completion:
        ins, outs = as_bytes(sources), as_bytes(destinations)
        return self._run(ins, outs, lambda source, target: self._inner.allgather([source], [target], counts))

    @override
    def broadcast(self, source: Buffer, destination: Buffer, root: int) -> Completion:
        ins, outs = as_bytes([source]), as_bytes([destination])
        return self._run(ins, outs, lambda source, target: self._inner.broadcast(source, target, root))

    @override
    def alltoall(
        self, source: Buffer, destination: Buffer, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Completion:
        ins, outs = as_bytes([source]), as_bytes([destination])
        return self._run(
            ins, outs, lambda source, target: self._inner.alltoall(source, target, send_counts, receive_counts)
        )

    @override
    def barrier(self) -> Completion:
        self._check()
        return self._inner.barrier()

    @override
    def begin_after(self, ready: Completion) -> None:
        self._awaited.append(ready)

    @override
    def attend(self, on_wait: OnWait) -> None:
        self._on_wait = on_wait
        self._inner.attend(on_wait)

    @override
    def waited(self) -> tuple[float, float]:
        return self._inner.waited()

    @override
    def watch(self, on_death: OnDeath) -> None:
        self._inner.watch(on_death)

    @override
    def adopt(self, parameters: Parameters) -> None:
        self._inner.adopt(parameters)

    @override
    def close(self) -> None:
        self._error = self._error or ShutDownError("the backend was closed")
        self._inner.close()

    @override
    def abort(self, error: Exception) -> None:
        self._error = self._error or error
        self._inner.abort(error)

    # The parts of an operation.

    def _run(
        self,
        sources: Sequence[Buffer],
        destinations: Sequence[Buffer],
        call: Callable[[Buffer, Buffer], Completion],
    ) -> Completion:
        device, dtype = self._begin(destinations), sources[0].dtype
        ins, outs = Plane(sources), Plane(destinations)
        source, target = (device.pinned(plane.end * dtype.itemsize).cast(dtype) for plane in (ins, outs))
        self._await(_down(device, ins, (0, ins.end), source))
        call(source, target)
        _up(device, target, outs, (0, outs.end))
        return self._end(device, target)

    def _begin(self, destinations: Sequence[Buffer]) -> Device:
        device = self._ready(destinations[0].pointer)
        for ready in {id(buffer.ready): buffer.ready for buffer in destinations}.values():
            if ready is not None:
                device.begin_after(ready)
        return device

    def _ready(self, address: int) -> Device:
        self._check()
        if self._device is None:
            self._device = self._place(address)
        awaited, self._awaited = self._awaited, []
        for ready in awaited:
            self._device.begin_after(ready)
        return self._device

    def _end(self, device: Device, held: Buffer) -> Completion:
        """Holds the memory that the GPU copies from, until it has done so."""
        return _Holding(device.fence(), self._check, held)

    def _await(self, end: Completion) -> None:
        while not end.wait(LOOK_SECONDS):
            self._check()
            self._on_wait()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error


class _Holding(NcclOperation):
    """An operation that keeps memory of the host alive."""

    def __init__(self, end: Completion, check: Callable[[], None], held: Buffer) -> None:
        super().__init__(end, check)
        self.held = held


def _down(device: Device, plane: Plane, span: tuple[int, int], room: Buffer) -> Completion:
    """Copy the elements of ``span`` to the same place of ``room``, by one kernel and one copy."""
    part = room.part(*span)
    if part.count:
        packed = device.empty(DType.UINT8, (part.nbytes,))
        device.pack(_pieces(plane, span, part), packed)
        device.download_to(packed, part.cast(DType.UINT8))
    return device.fence()


def _up(device: Device, room: Buffer, plane: Plane, span: tuple[int, int]) -> None:
    """The reverse of :func:`_down`."""
    part = room.part(*span)
    if part.count:
        packed = device.empty(DType.UINT8, (part.nbytes,))
        device.upload_from(part.cast(DType.UINT8), packed)
        device.unpack(packed, _pieces(plane, span, part))


def _pieces(plane: Plane, span: tuple[int, int], part: Buffer) -> list[Placed]:
    """As bytes."""
    size = part.dtype.itemsize
    return [Placed(size * at, buffer.cast(DType.UINT8)) for at, buffer in placed(plane, span)]


class ThroughHostBootstrap(Bootstrap):
    """A :class:`Bootstrap`, and :class:`ThroughHostBackend` for ``settles_early``.

    ``prepare`` makes the bootstrap of the backend of the host, which this one owns. A host without a GPU does not need
    it, and then nobody connects: a job on CPUs has no connections for GPUs.
    """

    def __init__(
        self, group: Group, prepare: Callable[[], Bootstrap], local_rank: int, settles_early: bool = True
    ) -> None:
        reason = without_gpu()
        self._inner = None if reason else prepare()
        super().__init__(group, msgpack.packb((reason, b"" if self._inner is None else self._inner.offer)))
        self._local_rank = local_rank
        self._settles_early = settles_early

    @override
    def connect(self, offers: Sequence[bytes], attempt: ConnectAttempt) -> ThroughHostBackend:
        reasons, of_inner = zip(*map(msgpack.unpackb, offers), strict=True)
        named = [f"{self.group.describe([position])}: {reason}" for position, reason in enumerate(reasons) if reason]

        def place(address: int) -> Device:
            return device_at(address, self._local_rank)

        if self._inner is None or named:  # an operation of it is refused before it begins
            return ThroughHostBackend(SingleBackend(self.group), place, absence=f"no GPU can be used on {named[0]}")
        return ThroughHostBackend(self._inner.connect(of_inner, attempt), place, self._settles_early)

    @override
    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
