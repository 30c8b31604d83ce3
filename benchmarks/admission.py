"""The cost of the start of 64 to 10,000 ranks for rank 0 and a leader: messages, bytes, CPU, memory, descriptors.

    python -m benchmarks.admission --ranks 64 10000 --ways hosts

Hosts have 8 ranks. Rank 0 is a process of its own, with the real handshake over real sockets. So are the ranks of the
last host, threads of a second process. This one has a connection for each other rank ("ranks"), or for each other
leader ("hosts"), says what they would say, and reads the answers. The offers are those of a rank of such a job, with
other names and ports for each. CPU time includes system calls. The memory is the peak of the process of rank 0, with
all libraries.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import msgpack

from benchmarks.measure import add_json_argument, tabulate
from collectives.api import ShutDownError, Topology
from collectives.backends.registry import discard, prepare
from collectives.controller.process_sets import ProcessSets
from collectives.engine.start import _configuration
from collectives.handshake import Hello, connect_channel
from collectives.handshake import hello as hellos
from collectives.handshake.dial import Callee, dial
from collectives.handshake.hello import LocalEnd, pack_answer, pack_hello
from collectives.net import descriptors
from collectives.net.attempts import ConnectAttempt
from collectives.net.frames import HEADER_BYTES
from collectives.net.relay import pack_envelope
from collectives.settings import Settings
from collectives.store.memory import MemoryStore

HOST_RANKS = 8
SECRET = b"of the benchmark"
PATIENCE_SECONDS = 900.0
"""Also of the kernel: one process reads what a thousand leaders would read."""
KEY = "round-0/start-0/rank-0"


class Announcing(MemoryStore):
    """The store of rank 0, whose entry goes to the process of the other ranks, too."""

    def __init__(self, line: Connection) -> None:
        super().__init__()
        self._line = line

    def set_all(self, values: Any) -> None:
        """See :class:`MemoryStore`."""
        super().set_all(values)
        self._line.send(values[KEY])


class Puppet:
    """A connection to rank 0 for ``ranks``, of which the first one is connected."""

    def __init__(self, end: LocalEnd, entry: Any, ranks: Sequence[int], job: Job) -> None:
        self.sent = self.received = self.bytes_out = self.bytes_in = 0
        self._ranks = ranks
        self._job = job
        self.wire = dial(end, entry, 0)
        self._callee = Callee(end, 0, self.wire)
        self._callee._send_hello(entry)
        self._count(pack_hello(end.hello, bytes(32), entry["id"]) + bytes(32))
        for rank in ranks[1:]:
            self._send(pack_envelope((rank,), pack_hello(job.hello(rank), b"", "")))

    def _count(self, data: bytes) -> None:
        self.sent += 1
        self.bytes_out += HEADER_BYTES + len(data)

    def _send(self, data: bytes) -> None:
        self._count(data)
        self._callee.send(data)

    def hear(self) -> int | None:
        """The size of the next answer, None while it is incomplete."""
        frame = self.wire.read()
        if frame is None:
            return None
        self.received += 1
        self.bytes_in += HEADER_BYTES + len(frame)
        return len(frame)

    def offer(self) -> None:
        """The offers of all its ranks."""
        first, *others = [pack_answer((None, self._job.offers[rank])) for rank in self._ranks]
        self._send(first)
        for rank, data in zip(self._ranks[1:], others, strict=True):
            self._send(pack_envelope((rank,), data))

    def confirm(self) -> None:
        """The rank has connected within its host."""
        self._send(pack_answer(None))


class Job:
    """The ranks of a world of ``size``; ``way`` says whether leaders speak for them."""

    def __init__(self, size: int, way: str) -> None:
        self.size = size
        self.is_led = way == "hosts"
        self._configuration = _configuration(Settings(), ProcessSets(size, ()))
        self.offers = offers_of(size)
        hellos.MOST_DIRECT = 1 if self.is_led else size

    def hello(self, rank: int) -> Hello:
        """That of ``rank``."""
        host = f"host-{rank // HOST_RANKS:04}"
        return Hello(rank, self.size, host, tuple(range(HOST_RANKS)), self._configuration)

    @contextmanager
    def end(self, rank: int) -> Iterator[LocalEnd]:
        """The end of ``rank``."""
        with ConnectAttempt(PATIENCE_SECONDS) as attempt:
            local = rank % HOST_RANKS, HOST_RANKS
            yield LocalEnd(self.hello(rank), SECRET, "127.0.0.1", PATIENCE_SECONDS, attempt, *local)

    def connect(self, rank: int, store: MemoryStore) -> tuple[Any, float]:
        """The connected channel of ``rank``, and the CPU time of this thread."""
        begin = time.thread_time()
        with self.end(rank) as end:
            found = connect_channel(end, store, ProcessSets(self.size), lambda hosts, cores: self.offers[rank])
        return found.channel, time.thread_time() - begin

    # The process of all ranks but rank 0.

    def follow(self, line: Connection) -> None:
        """Be all ranks but rank 0; tell what has been said, and the CPU time of the real leader."""
        descriptors.raise_limit()
        packed = line.recv()
        store, entry = MemoryStore(), msgpack.unpackb(packed)
        store.set(KEY, packed)
        real = range(max(1, self.size - HOST_RANKS), self.size)
        found: dict[int, tuple[Any, float]] = {}
        threads = [
            threading.Thread(target=lambda rank=rank: found.update({rank: self.connect(rank, store)})) for rank in real
        ]
        for thread in threads:
            thread.start()
        puppets = self._puppets(entry, real.start)
        for step in self._steps():
            for puppet in puppets.values():
                step(puppet)
            self._hear(puppets)
        for thread in threads:
            thread.join()
        totals = {
            name: sum(getattr(each, name) for each in puppets.values())
            for name in ("sent", "bytes_out", "received", "bytes_in")
        }
        line.send((totals, found[real.start][1], statistics_of(found, real.start)))
        line.recv()
        for channel, _ in found.values():
            channel.close()

    def _steps(self) -> list[Any]:
        steps: list[Any] = [lambda puppet: None, Puppet.offer]
        return steps if self.is_led else [*steps, Puppet.confirm]

    def _puppets(self, entry: Any, count: int) -> dict[int, Puppet]:
        found = {}
        for first in range(0, count, HOST_RANKS):
            here = range(max(first, 1), min(first + HOST_RANKS, count))
            for ranks in [here] if self.is_led and first else [[rank] for rank in here]:
                with self.end(ranks[0]) as end:
                    puppet = Puppet(end, entry, ranks, self)
                found[puppet.wire.sock.fileno()] = puppet
        return found

    def _hear(self, puppets: dict[int, Puppet]) -> None:
        """An answer for each puppet, in any order."""
        poller, waiting = select.poll(), set(puppets)
        for descriptor in waiting:
            poller.register(descriptor, select.POLLIN)
        while waiting:
            for descriptor, _ in poller.poll():
                if puppets[descriptor].hear() is not None:
                    waiting.discard(descriptor)
                    poller.unregister(descriptor)


def offers_of(size: int) -> list[bytes]:
    """The offers of all ranks: that of a real one, with other names and ports for each."""
    hosts = tuple(f"host-{rank // HOST_RANKS:04}" for rank in range(size))
    topology = Topology(size - 1, size, hosts=hosts, cores=HOST_RANKS)
    bootstraps = prepare(range(size), topology, Settings(secret=SECRET), "127.0.0.1")
    offer = msgpack.packb({0: [bootstrap.offer for bootstrap in bootstraps]})
    discard(bootstraps, (), ShutDownError("the offer is known"))
    source = random.Random(size)
    return [_renewed(offer, rank // HOST_RANKS, source) for rank in range(size)]


def _renewed(value: Any, host: int, source: random.Random) -> Any:
    """``value``, whose names and ports of listeners are others."""
    if isinstance(value, bytes):
        with suppress(ValueError, msgpack.UnpackException):
            inner = msgpack.unpackb(value, strict_map_key=False)
            return msgpack.packb(_renewed(inner, host, source)) if isinstance(inner, dict | list) else value
    if isinstance(value, list):
        return [_renewed(each, host, source) for each in value]
    if not isinstance(value, dict):
        return value
    if "tcp" not in value:
        return {key: _renewed(each, host, source) for key, each in value.items()}
    address = f"10.0.{host // 250}.{host % 250 + 1}"
    return value | {"id": f"{source.getrandbits(32):08x}", "tcp": [address, source.randrange(32768, 60999)]}


def statistics_of(found: dict[int, tuple[Any, float]], leader: int) -> float:
    """The mean CPU time of the real followers."""
    times = [seconds for rank, (_, seconds) in found.items() if rank != leader]
    return sum(times) / len(times)


def measure(size: int, way: str) -> dict[str, Any]:
    """A row; this process becomes rank 0."""
    descriptors.raise_limit()
    job = Job(size, way)
    near, far = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=job.follow, args=(far,), daemon=True)
    child.start()
    far.close()
    begin, start = time.process_time(), time.monotonic()
    channel, _ = job.connect(0, Announcing(near))
    seconds, wall = time.process_time() - begin, time.monotonic() - start
    held = len(os.listdir("/proc/self/fd"))
    totals, leader, follower = near.recv()
    channel.close()
    near.send(None)
    child.join()
    return {
        "ranks": size,
        "hosts": -(-size // HOST_RANKS),
        "talk": way,
        "received": totals["sent"],
        "KB in": totals["bytes_out"] / 1024,
        "sent": totals["received"],
        "MB out": totals["bytes_in"] / 2**20,
        "CPU, s": seconds,
        "wall, s": wall,
        "leader: CPU, s": leader,
        "follower: CPU, s": follower,
        "descriptors": held,
        "peak, MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512, 4096, 10_000], help="default: 64 to 10000")
    parser.add_argument("--ways", nargs="+", default=["hosts"], choices=["ranks", "hosts"], help="default: hosts")
    parser.add_argument("--case", action="store_true", help=argparse.SUPPRESS)
    add_json_argument(parser)
    arguments = parser.parse_args()
    if arguments.case:
        sys.stdout.write(json.dumps(measure(arguments.ranks[0], arguments.ways[0])))
        return
    rows = [row_of(size, way) for way in arguments.ways for size in arguments.ranks]
    tabulate("the start of rank 0", rows, arguments)


def row_of(size: int, way: str) -> dict[str, Any]:
    """The row of :func:`measure`, of a fresh process: its peak of memory is its own."""
    command = [sys.executable, "-m", "benchmarks.admission", "--case", "--ranks", str(size), "--ways", way]
    row: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return row


if __name__ == "__main__":
    main()
