"""The phases of an elastic job of 8 to 10,000 ranks: what they cost the driver, the store, rank 0 and a relay.

    python -m benchmarks.phases --ranks 64 10000

Hosts have 8 ranks. The driver, its membership, the store and its HTTP server are the real ones, in one process; the
agents start nothing. A second process sends what the ranks ask the store for, signed; all of them wait for the next
world, each over a connection of its own, and of other equal requests 1,000 stand for all. Above 512 ranks one process
of each host asks, as in a real job; what it costs to tell the others there is not in these figures: some 0.5 ms of its
CPU for each of them and each key. The start of the ranks is that of benchmarks.admission, with the real rank 0, a real
leader and its followers. The messages of the steps are those of benchmarks.simulation. "clock" is the time until all
ranks could go on, if each of these parts had a core of its own and the network cost nothing: the CPU time of the
driver, of the store and of rank 0, one after the other. A host that is lost is noticed at once.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import multiprocessing
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeAlias
from urllib.parse import quote

from benchmarks.admission import HOST_RANKS, offers_of, row_of
from benchmarks.measure import add_json_argument, tabulate
from benchmarks.simulation import Job as Ranks
from benchmarks.simulation import Work, gradients
from collectives.backends.base import MOST_LINKED, is_large
from collectives.backends.hierarchical.grid import blocks
from collectives.handshake.hello import MOST_DIRECT
from collectives.net import descriptors
from collectives.store.client import MOST_READERS
from collectives.store.signing import NO_TIME, ServerTime, sign
from executors.driver.driver import ACCUSED_SECONDS, Agents, Driver
from executors.job.job import Job
from executors.job.worlds import Published, Report, report_key, world_key
from executors.membership import Limits
from executors.membership.membership import GATHER_SECONDS

ENTRY_BYTES = 150
"""Of the description of a listener."""
GROWTH_HOSTS = 100
AT_ONCE = 256
SAMPLE = 1000
"""The requests of one kind that are sent; the cost of more is scaled up from theirs."""
SIZES = [8, 64, 512, 4096, 10_000]

Question: TypeAlias = tuple[str, str, bytes]
"""A request: the method, the path, the body."""


class Idle(Agents):
    """Starts nothing; its clock moves on when somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0
        self.started: list[str] = []
        self._alarms: list[tuple[float, int, Callable[[], None]]] = []
        self._calls: list[Callable[[], None]] = []
        self._numbers = itertools.count()

    def start(self, worker: str, host: str, environment: Mapping[str, str]) -> None:
        """See :class:`Agents`."""
        self.started.append(worker)

    def stop(self, worker: str) -> None:
        """See :class:`Agents`."""

    def kill(self, worker: str) -> None:
        """See :class:`Agents`."""

    def end(self, spare: str | None = None) -> None:
        """See :class:`Agents`."""

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """See :class:`Agents`."""
        heapq.heappush(self._alarms, (self.now + seconds, next(self._numbers), action))

    def soon(self, action: Callable[[], None]) -> None:
        """See :class:`Agents`."""
        self._calls.append(action)

    def call(self) -> None:
        """Run what other threads have handed over."""
        while self._calls:
            calls, self._calls = self._calls, []
            for call in calls:
                call()

    def wait(self, seconds: float) -> None:
        """Let the time pass."""
        end = self.now + seconds
        while self._alarms and self._alarms[0][0] <= end:
            self.now, _, action = heapq.heappop(self._alarms)
            action()
        self.now = end


class Crowd:
    """The ranks, as the store sees them: a process that asks the server at ``port`` in their place."""

    def __init__(self, port: int, secret: bytes) -> None:
        self._port, self._secret = port, secret
        self._line, far = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(target=self._run, args=(far,), daemon=True)
        self._process.start()
        far.close()

    def begin(self, requests: Sequence[Question], most: int) -> None:
        """Send ``requests``, so many at once at most; :meth:`answers` has what they get."""
        self._line.send((requests, most))

    def answers(self) -> int:
        """The bytes that came, once all have."""
        return int(self._line.recv())

    def close(self) -> None:
        """End the process."""
        self._line.send(None)
        self._process.join()

    def _run(self, line: Connection) -> None:
        descriptors.raise_limit()
        self._line.close()
        while (task := line.recv()) is not None:
            requests, most = task
            moment = ServerTime.decode(self._converse([("GET", "/time", b"")], 1, NO_TIME)[1])
            line.send(self._converse(requests, most, moment)[0])

    def _converse(self, requests: Sequence[Question], most: int, moment: ServerTime) -> tuple[int, bytes]:
        """The bytes of all answers, and the last one."""
        waiting, poller, total, last = list(reversed(requests)), select.poll(), 0, b""
        open_: dict[int, tuple[socket.socket, list[bytes], Question]] = {}
        while waiting or open_:
            while waiting and len(open_) < most:
                question = waiting.pop()
                sock = self._send(*question, moment)
                open_[sock.fileno()] = sock, [], question
                poller.register(sock, select.POLLIN)
            for descriptor, _ in poller.poll():
                sock, parts, question = open_[descriptor]
                if piece := sock.recv(1 << 18):
                    parts.append(piece)
                    continue
                poller.unregister(descriptor)
                sock.close()
                del open_[descriptor]
                if not parts:  # a busy server drops connections that it did not read for long, and clients call again
                    waiting.append(question)
                    continue
                last = b"".join(parts)
                if last.startswith(b"HTTP/1.1 404"):  # not there yet
                    waiting.append(question)
                    continue
                assert last.startswith(b"HTTP/1.1 200"), last[:200]
                total += len(last)
        return total, last.partition(b"\r\n\r\n")[2]

    def _send(self, method: str, path: str, body: bytes, moment: ServerTime) -> socket.socket:
        headers = sign(self._secret, method, path, body, moment, os.urandom(16).hex())
        headers |= {"Host": "127.0.0.1", "Connection": "close", "Content-Length": str(len(body))}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        sock = socket.create_connection(("127.0.0.1", self._port))
        sock.sendall("\r\n".join(lines).encode() + body)
        return sock


class Store:
    """The server of ``job``, and the ``crowd`` that asks it. ``found`` has what it has done since :meth:`reset`."""

    def __init__(self, job: Job) -> None:
        self._server = job._server
        self._crowd = Crowd(job.port, job.secret.key)
        self.reset()

    def reset(self) -> None:
        """Count from here on."""
        self.requests, self.megabytes, self.seconds = 0, 0.0, 0.0

    def close(self) -> None:
        """End the crowd."""
        self._crowd.close()

    def ask(self, method: str, key: str, count: int, body: bytes = b"") -> None:
        """``count`` ranks send the same request; with ``{}`` in the ``key``, each for a key of its own.

        At most SAMPLE of them do, and stand for the others.
        """
        some = min(count, SAMPLE)
        with self._counting(count, count / max(1, some)):
            self._crowd.begin([(method, _path(key.format(number)), body) for number in range(some)], AT_ONCE)
            self.megabytes += self._crowd.answers() / 2**20 * count / max(1, some)

    def await_key(self, key: str, count: int, change: Callable[[], object]) -> None:
        """``count`` ranks wait for ``key``, which appears in ``change``."""
        self._crowd.begin([("GET", f"{_path(key)}?wait=50", b"")] * count, count)
        while self._server.waiting < count:
            time.sleep(0.01)
        with self._counting(count, 1.0):
            change()
            self.megabytes += self._crowd.answers() / 2**20

    @contextmanager
    def _counting(self, count: int, factor: float) -> Iterator[None]:
        """All CPU time of this process that is not that of this thread is the server's."""
        begin, own = time.process_time(), time.thread_time()
        yield
        self.seconds += factor * ((time.process_time() - begin) - (time.thread_time() - own))
        self.requests += count


def _path(key: str) -> str:
    return f"/keys/{quote(key, safe='')}"


class Phases:
    """A job of ``size`` ranks; each phase is a row."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._hosts = -(-size // HOST_RANKS)
        self._agents = Idle()
        self._seconds = 0.0

    def rows(self) -> Iterator[dict[str, Any]]:
        """Those of all phases, in order."""
        most = self._size + GROWTH_HOSTS * HOST_RANKS
        with Job(self._size) as self._job:
            self._store = Store(self._job)
            self._driver = Driver(Limits(self._size, 1, most), self._job, self._agents, 1e6, lambda: self._agents.now)
            yield self._start()
            yield from self._steps()
            yield self._lose_a_host()
            yield self._grow()
            yield self._row("shutdown", self._size, work=self._ranks.leave())
            self._store.close()

    def _row(
        self,
        phase: str,
        ranks: int,
        driver: float = 0.0,
        admission: dict[str, Any] | None = None,
        work: Work | None = None,
    ) -> dict[str, Any]:
        """``driver`` is the CPU time for which the ranks wait, of all that the driver has used."""
        store, start = self._store, admission or {"received": 0, "KB in": 0.0, "sent": 0, "MB out": 0.0, "CPU, s": 0.0}
        sums = work or Work()
        row = {
            "ranks": ranks,
            "phase": phase,
            "driver: CPU, s": self._seconds,
            "store: requests": store.requests,
            "store: MB": store.megabytes,
            "store: CPU, s": store.seconds,
            "rank 0: in": start["received"] + sums.received,
            "KB in": start["KB in"] + sums.bytes_in / 1024,
            "out": start["sent"] + sums.sent,
            "MB out": start["MB out"] + sums.bytes_out / 2**20,
            "CPU, ms": 1e3 * (start["CPU, s"] + sums.seconds),
            "relay: CPU, ms": 1e3 * (start.get("leader: CPU, s", 0.0) + sums.relays / self._hosts),
            "clock, s": driver + store.seconds + start["CPU, s"] + sums.seconds,
        }
        self._seconds = 0.0
        store.reset()
        return row

    def _drive(self, action: Callable[[], object] = lambda: None) -> float:
        """The driver does ``action``, and what its loop has been handed; returns its CPU time."""
        begin = time.thread_time()
        action()
        self._agents.call()
        seconds = time.thread_time() - begin
        self._seconds += seconds
        return seconds

    def _start(self) -> dict[str, Any]:
        found = self._drive(lambda: self._driver.found(self._slots(self._hosts)))
        self._store.ask("GET", world_key(0), readers(self._size))
        return self._row("start", self._size, found, self._connect(self._size, 0))

    def _slots(self, hosts: int) -> dict[str, int]:
        """The slots of the first ``hosts`` hosts; a job smaller than a host has a small one."""
        return {f"host-{number:04}": min(HOST_RANKS, self._size) for number in range(hosts)}

    def _connect(self, size: int, round: int) -> dict[str, Any]:
        """What ``size`` ranks ask the store for when they connect in ``round``; the start of rank 0, in a process."""
        entry, leaders = os.urandom(ENTRY_BYTES), -(-size // HOST_RANKS) if size > MOST_DIRECT else 0
        self._store.ask("PUT", f"job/round-{round}/start-0/rank-0", 1, entry)
        self._store.ask("GET", f"job/round-{round}/start-0/rank-0", readers(size) - 1)
        if leaders:
            self._store.ask("PUT", f"job/round-{round}/leaders/{{}}", leaders, entry)
            self._store.ask("GET", f"job/round-{round}/leaders/0", leaders)
            self._store.ask("DELETE", f"job/round-{round}/leaders/", 1)
        return row_of(size, "hosts" if size > MOST_DIRECT else "ranks")

    def _steps(self) -> Iterator[dict[str, Any]]:
        self._ranks = Ranks(self._size, "hosts", gradients())
        for phase in ("first step", "steady step"):
            yield self._row(phase, self._size, work=self._ranks.step())
        members = range(0, self._size, 2)
        yield self._row("process set", self._size, work=self._ranks.add_set(members, offers_of(self._size)[::2]))

    def _lose_a_host(self) -> dict[str, Any]:
        """That of the last ranks. The others report that their collectives have failed, but nobody waits for that."""
        for worker in self._agents.started:
            self._driver.up(worker)
        self._report(self._agents.started[0], 0, Report("formed", 0))
        self._seconds = 0.0
        self._store.reset()
        if self._hosts == 1:
            return self._row("lost host", 0)
        left, times = HOST_RANKS * (self._hosts - 1), []
        host = f"host-{self._hosts - 1:04}"
        self._store.await_key(
            world_key(1), readers(left), lambda: times.append(self._drive(lambda: self._driver.host_lost(host, "lost")))
        )
        row = self._connect(left, 1)
        for worker in self._agents.started[:left]:
            self._report(worker, 1, Report("failed", 0, tuple(range(left, self._size)), "a rank is gone"))
        self._drive(lambda: self._agents.wait(2 * ACCUSED_SECONDS))
        self._report(self._agents.started[0], 2, Report("formed", 1))
        self._left = left
        return self._row("lost host", left, times[0], row)

    def _report(self, worker: str, number: int, report: Report) -> None:
        self._job.store.set(report_key(worker, number), report.encode())
        self._drive()

    def _grow(self) -> dict[str, Any]:
        """Newcomers are ready one after the other; the driver waits a moment for all, and plans the next world."""
        before = len(self._agents.started)
        round = 1 + (self._hosts > 1)
        hosts = self._slots(self._hosts - (self._hosts > 1)) | {
            f"new-{number:04}": HOST_RANKS for number in range(GROWTH_HOSTS)
        }
        self._drive(lambda: self._driver.found(hosts))
        newcomers = self._agents.started[before:]
        size = (HOST_RANKS * (self._hosts - 1) if self._hosts > 1 else self._size) + len(newcomers)
        times: list[float] = []

        def become_ready() -> None:
            for worker in newcomers:
                self._report(worker, 0, Report("ready"))
            times.append(self._drive(lambda: self._agents.wait(GATHER_SECONDS + 1.0)))

        self._store.await_key(world_key(round), readers(size), become_ready)
        assert len(Published.decode(self._job.store.get(world_key(round), 0.0)).workers) == size
        return self._row("growth", size, times[0], self._connect(size, round))


def readers(size: int) -> int:
    """The processes that read the store for all ``size`` ranks."""
    return -(-size // HOST_RANKS) if size > MOST_READERS else size


def connections(size: int) -> dict[str, Any]:
    """Those of rank 0 and of the first rank of another host, when the world has started and no alltoall has run."""
    hosts = -(-size // HOST_RANKS)
    here, local = min(size, HOST_RANKS) - 1, 0 if size > MOST_DIRECT else HOST_RANKS - 1
    control = here + (hosts - 1) * (1 + local)
    flat = 0 if is_large(size) or hosts == 1 else size - 1
    return {
        "ranks": size,
        "rank 0: control": control,
        "leader: control": min(hosts - 1, 1) * HOST_RANKS,
        "column": _linked(hosts),
        "flat": flat,
        "in an alltoall": size - 1 if hosts > 1 else 0,
    }


def _linked(size: int) -> int:
    """The links of the first member of a TCP group of single members."""
    if not is_large(size):
        return size - 1
    parts = blocks(size, MOST_LINKED)
    return len(parts[0]) - 1 + _linked(len(parts))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=SIZES, help="default: 8 to 10000")
    add_json_argument(parser)
    arguments = parser.parse_args()
    descriptors.raise_limit()
    tabulate("the connections of a rank", [connections(size) for size in arguments.ranks], arguments)
    tabulate("the phases of a job", [row for size in arguments.ranks for row in Phases(size).rows()], arguments)


if __name__ == "__main__":
    main()
