"""NCCL and a GPU in the memory of the host: for tests only. Its kernels run late, and keep NCCL's own rules."""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from math import prod
from typing import NamedTuple

import numpy as np

from collectives.api import DType, HorovodInternalError, ReduceOp
from collectives.backends.base import Group
from collectives.backends.completion import Completion
from collectives.backends.host import Array, Bytes
from collectives.backends.memory import Floats, HostMemory
from collectives.backends.nccl.interface import (
    BYTES,
    CODES,
    Combine,
    Communicator,
    Device,
    DTypeConversion,
    NcclConnection,
    NcclLibrary,
    Pause,
    Placed,
)
from collectives.buffers import Buffer
from tests.collectives.backends.inproc import InprocGroup
from tests.collectives.backends.nccl.kernels import carried, returned
from tests.collectives.backends.nccl.streams import PATIENCE, LateStream
from tests.collectives.kernels.reductions import reduce_arrays

__all__ = ["FakeDevice", "FakeLibrary", "FakeNetwork", "connector"]

GARBAGE = 0xA5
FIRST = 1 << 60
"""Lower addresses are those of the host, whose memory a test may use as if it were a GPU's."""
_addresses = itertools.count(FIRST, 1 << 32)
_blocks: dict[int, Bytes | int] = {}
"""The memory of each allocation; its size, once it is somebody else's."""
_REDUCTIONS = {
    Combine.SUM: ReduceOp.SUM,
    Combine.AVERAGE: ReduceOp.SUM,
    Combine.PRODUCT: ReduceOp.PRODUCT,
    Combine.MAX: ReduceOp.MAX,
    Combine.MIN: ReduceOp.MIN,
}


class Block:
    """An allocation. Its memory is somebody else's as soon as nothing refers to it."""

    def __init__(self, nbytes: int) -> None:
        self.address = next(_addresses)
        _blocks[self.address] = np.full(nbytes, GARBAGE, np.uint8)


class Pinned:
    """The owner of memory on the host, which is somebody else's as soon as nothing refers to it."""


def free(address: int) -> None:
    block = _blocks[address]
    _blocks[address] = block if isinstance(block, int) else block.size


def view(address: int, nbytes: int) -> Bytes:
    """The memory behind an address, for kernels."""
    if not nbytes:
        return np.empty(0, np.uint8)
    if address < FIRST:
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
    start = address >> 32 << 32
    block = _blocks[start]
    memory = np.full(block, GARBAGE, np.uint8) if isinstance(block, int) else block
    return memory[address - start : address - start + nbytes]


def on_host(buffer: Buffer) -> Buffer:
    return Buffer(view(buffer.address, buffer.nbytes).view(buffer.dtype.storage), buffer.dtype, buffer.shape)


class FakeDevice(Device):
    """A GPU with one stream. ``gpu`` is its number."""

    def __init__(self, gpu: int = 0) -> None:
        self.gpu = gpu
        self.queue = LateStream()
        self.stream = self.queue.handle
        self._host = HostMemory()
        self.launches: list[str] = []

    def close(self) -> None:
        self.queue.close()

    # For tests.

    def upload(self, array: Array, dtype: DType) -> Buffer:
        """A tensor of the user: its memory is reused at once when it is dropped, in no order with this stream."""
        buffer, block = self._allocate(dtype, array.shape)
        weakref.finalize(block, free, block.address)
        on_host(buffer).host[:] = np.ascontiguousarray(array).reshape(-1).view(dtype.storage)
        return buffer

    def download(self, buffer: Buffer) -> Array:
        return on_host(buffer).host.reshape(buffer.shape).copy()

    def upload_into(self, buffer: Buffer, value: float) -> None:
        on_host(buffer).host[:] = value

    # As Device describes them.

    def current(self):
        return nullcontext()

    def empty(self, dtype, shape):
        buffer, block = self._allocate(dtype, shape)
        weakref.finalize(block, self._free_in_order, block.address)
        return buffer

    def fill(self, target, value):
        self._launch("fill", lambda: self._host.fill(on_host(target), value))

    def scale(self, source, target, factor):
        self._launch("scale", lambda: self._host.scale(on_host(source), on_host(target), factor))

    def combine(self, target, first, second):
        self._launch("combine", lambda: self._host.combine(*map(_floats, (target, first, second))))

    def products(self, first, second):
        return self._launch("products", lambda: self._host.products(_floats(first), _floats(second))).outcome()

    def store(self, numbers):
        buffer, copy = self.empty(DType.FLOAT64, (len(numbers),)), np.array(numbers)
        self._launch("store", lambda: np.copyto(on_host(buffer).host, copy))
        return buffer

    def load(self, source):
        return self._launch("load", on_host(source).host.tolist).outcome()

    def fence(self) -> Completion:
        return self.queue.enqueue(lambda: None)

    def pack(self, pieces: Sequence[Placed], target: Buffer, conversion: DTypeConversion = BYTES, factor: float = 1.0):
        pieces = [Placed(at, _weak(buffer)) for at, buffer in pieces]
        self._launch("pack", lambda: self._pack(pieces, target, conversion, factor))

    def unpack(
        self, source: Buffer, pieces: Sequence[Placed], conversion: DTypeConversion = BYTES, factor: float = 1.0
    ):
        pieces = [Placed(at, _weak(buffer)) for at, buffer in pieces]
        self._launch("unpack", lambda: self._unpack(source, pieces, conversion, factor))

    def pinned(self, nbytes):
        memory, owner = np.full(nbytes, GARBAGE, np.uint8), Pinned()
        weakref.finalize(owner, memory.fill, GARBAGE)
        return Buffer(memory, DType.UINT8, (nbytes,), owner)

    def download_to(self, source, target):
        room = target.host  # without the owner, as a kernel
        self._launch("download", lambda: np.copyto(room, on_host(source).host))

    def upload_from(self, source, target):
        room = source.host
        self._launch("upload", lambda: np.copyto(on_host(target).host, room))

    def _pack(self, pieces, target, conversion, factor):
        room = on_host(target).host
        for at, buffer in pieces:
            room[at : at + buffer.count] = carried(on_host(buffer).host, conversion, factor)

    def _unpack(self, source, pieces, conversion, factor):
        room = on_host(source).host
        for at, buffer in pieces:
            on_host(buffer).host[:] = returned(room[at : at + buffer.count], conversion, factor)

    def _allocate(self, dtype: DType, shape: Sequence[int]) -> tuple[Buffer, Block]:
        block = Block(prod(shape) * dtype.itemsize)
        return Buffer(None, dtype, tuple(shape), block, "cuda", block.address), block

    def _free_in_order(self, address: int) -> None:
        if self.queue._is_open:
            self.queue.enqueue(lambda: free(address))

    def _launch(self, name: str, call: Callable[[], object]):
        self.launches.append(name)
        return self.queue.enqueue(call)


def _weak(buffer: Buffer) -> Buffer:
    """Without its owner: a kernel keeps no memory alive."""
    return Buffer(None, buffer.dtype, buffer.shape, None, buffer.device, buffer.address)


def _floats(floats: Floats) -> Floats:
    return Floats(tuple(map(on_host, floats.planes)), floats.factor)


class Call(NamedTuple):
    """A call of NCCL: what all members must agree about, the memory, and the peer of a message."""

    kind: str
    about: tuple[object, ...]
    source: tuple[int, int]
    target: tuple[int, int]
    peer: int = -1


class FakeNetwork:
    """What connects the members of communicators; they find one another by the id."""

    def __init__(self) -> None:
        # Owned by this network, held for a few instructions.
        self._lock = threading.Lock()
        self._groups: dict[bytes, InprocGroup] = {}
        self._come: dict[bytes, int] = {}
        self._ids = itertools.count()

    def unique_id(self) -> bytes:
        return b"id-%d" % next(self._ids)

    def come(self, id: bytes, size: int) -> InprocGroup:
        with self._lock:
            self._come[id] = self._come.get(id, 0) + 1
            return self._groups.setdefault(id, InprocGroup(size))

    def is_complete(self, id: bytes, size: int) -> bool:
        return self._come.get(id, 0) >= size


class FakeLibrary(NcclLibrary):
    """One for each member."""

    name = "fake"
    version = 22203

    def __init__(self, network: FakeNetwork) -> None:
        self._network = network
        self.open: list[list[tuple[FakeCommunicator, Call]]] = []
        self.groups = 0
        self.aborts: list[tuple[FakeCommunicator, bool]] = []

    def unique_id(self) -> bytes:
        return self._network.unique_id()

    def connect(self, id: bytes, size: int, position: int, device: Device, pause: Pause) -> Communicator:
        shared = self._network.come(id, size)
        while not self._network.is_complete(id, size):
            pause()
        assert isinstance(device, FakeDevice)
        return FakeCommunicator(self, shared, size, position, device.queue)

    @contextmanager
    def group(self) -> Iterator[None]:
        self.groups += 1
        self.open.append([])
        try:
            yield
        finally:
            calls = self.open.pop()
            if calls:
                calls[0][0].launch([call for _, call in calls])


class FakeCommunicator(Communicator):
    """Copies what it sends to the others, and computes as NCCL does: in the type of the tensors, and NaN is lost."""

    def __init__(self, library: FakeLibrary, shared: InprocGroup, size: int, position: int, queue: LateStream) -> None:
        self._library = library
        self._shared = shared
        self._size = size
        self._position = position
        self._queue = queue
        self._group = Group(tuple(range(size)), position, ("a",) * size)
        self.trouble = ""
        self.is_destroyed = False

    def allreduce(self, source, target, count, dtype, op, stream):
        nbytes = self._nbytes(count, dtype)
        self._call(Call("allreduce", (count, dtype, op), (source, nbytes), (target, nbytes)), stream)

    def reducescatter(self, source, target, count, dtype, op, stream):
        nbytes = self._nbytes(count, dtype)
        self._call(Call("reducescatter", (count, dtype, op), (source, nbytes * self._size), (target, nbytes)), stream)

    def allgather(self, source, target, count, dtype, stream):
        nbytes = self._nbytes(count, dtype)
        self._call(Call("allgather", (count, dtype), (source, nbytes), (target, nbytes * self._size)), stream)

    def broadcast(self, source, target, count, dtype, root, stream):
        nbytes = self._nbytes(count, dtype)
        read = nbytes if root == self._position else 0
        self._call(Call("broadcast", (count, dtype, root), (source, read), (target, nbytes)), stream)

    def send(self, source, count, dtype, peer, stream):
        assert self._library.open, "a message outside of a group"
        self._call(Call("send", (), (source, self._nbytes(count, dtype)), (0, 0), peer), stream)

    def receive(self, target, count, dtype, peer, stream):
        assert self._library.open, "a message outside of a group"
        self._call(Call("receive", (), (0, 0), (target, self._nbytes(count, dtype)), peer), stream)

    def error(self):
        return self.trouble

    def abort(self):
        self._library.aborts.append((self, bool(self._library.open)))
        self._shared.fail(self._group, HorovodInternalError("aborted"))
        self._queue.catch_up()

    def destroy(self):
        self.is_destroyed = True

    def _nbytes(self, count: int, dtype: DType) -> int:
        assert dtype in CODES, f"NCCL has no {dtype.label}"
        assert count > 0
        return count * dtype.itemsize

    def _call(self, call: Call, stream: int) -> None:
        assert stream == self._queue.handle
        if self._library.open:
            self._library.open[-1].append((self, call))
        else:
            self.launch([call])

    def launch(self, calls: list[Call]) -> None:
        self._queue.enqueue(lambda: self._run(calls))

    def _run(self, calls: list[Call]) -> None:
        about = tuple((call.kind, call.about) for call in calls if call.peer < 0)
        sent = [(call, view(*call.source).copy()) for call in calls]
        members = self._shared.exchange(self._group, about, sent, PATIENCE)
        together = [[item for item in of_member if item[0].peer < 0] for of_member in members]
        for index, (call, _) in enumerate(together[self._position]):
            data = [of_member[index][1] for of_member in together]
            view(*call.target)[:] = self._result(call, data)
        for call in calls:
            if call.kind == "receive":
                view(*call.target)[:] = self._message(members[call.peer])

    def _result(self, call: Call, data: list[Bytes]) -> Bytes:
        if call.kind == "broadcast":
            return data[call.about[2]]
        if call.kind == "allgather":
            return np.concatenate(data)
        total = _reduced(data, *call.about[1:]).view(np.uint8)
        part = call.target[1]
        return total if call.kind == "allreduce" else total[self._position * part : (self._position + 1) * part]

    def _message(self, calls: list[tuple[Call, Bytes]]) -> Bytes:
        [data] = [data for call, data in calls if call.kind == "send" and call.peer == self._position]
        return data


@np.errstate(all="ignore")
def _reduced(data: list[Bytes], dtype: DType, op: Combine) -> Array:
    """Step by step, rounded each time."""
    arrays = [each.view(dtype.storage) for each in data]
    factor = 1.0 / len(arrays) if op is Combine.AVERAGE else 1.0
    total = np.empty_like(arrays[0])
    reduce_arrays(total, arrays[:1], dtype, ReduceOp.SUM, factor)
    for array in arrays[1:]:
        term = np.empty_like(array)
        reduce_arrays(term, [array], dtype, ReduceOp.SUM, factor)
        if op in (Combine.MIN, Combine.MAX) and not dtype.is_integer:
            (np.fmin if op is Combine.MIN else np.fmax)(total, term, out=total)  # which drop NaN
        else:
            reduce_arrays(total, [total, term], dtype, _REDUCTIONS[op])
    return total


def connector(
    library: FakeLibrary, id: bytes, group: Group, device: FakeDevice
) -> Callable[[int, Pause], NcclConnection]:
    """How a member connects, for :class:`NcclBackend`."""

    def connect(address: int, pause: Pause) -> NcclConnection:
        communicator = library.connect(id, group.size, group.position, device, pause)
        return NcclConnection(library, device, communicator)

    return connect
