"""How the coordinator's work grows: its messages, bytes, CPU time and memory in a training step of 8 to 10,000 ranks.

    python -m benchmarks.simulation --ranks 8 64 1024 --ways ranks hosts

Runs the real state machines in one process, in their wire form, without sockets; all ranks submit the same, so that one
worker stands for all of them. Hosts have 8 ranks. A step submits the 161 gradients of ResNet-50 on every rank and waits
for the first; ranks come in random order, and the coordinator decides after each message. "ranks": all talk to the
coordinator; "hosts": those of other hosts do so through their relay, in the envelopes of collectives.net. CPU time
is the coordinator's alone: reading messages, deciding, writing the answers, not the system calls that carry them. "new
tensor" is the CPU time of the first step for each tensor; memory is what the coordinator keeps after it, for each one.
benchmarks.phases has the other phases of a job: start, process set, lost host, growth, shutdown.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.gradients import resnet50
from benchmarks.measure import add_json_argument, tabulate
from collectives.api import DType, Operation, Parameters, Request
from collectives.controller.aggregation import Aggregator
from collectives.controller.coordinator import Coordinator
from collectives.controller.messages import Leave, Left, Message, Ready, Run, decode, encode
from collectives.controller.process_sets import ProcessSets
from collectives.controller.worker import Worker
from collectives.net import relay
from collectives.net.frames import HEADER_BYTES

HOST_RANKS = 8
PARAMETERS = Parameters(cycle_time=1.0)
COORDINATOR = 0

Frame: TypeAlias = tuple[int, bytes]
"""The sender of a message to the coordinator, and its bytes."""


class Direct:
    """A host whose ranks talk to the coordinator themselves, as those of rank 0's host always do."""

    def __init__(self, ranks: Sequence[int], sets: ProcessSets) -> None:
        self.ranks = ranks

    def up(self, rank: int, message: Message) -> list[Frame]:
        """The frames that reach the coordinator after ``rank`` has sent ``message``."""
        return [(rank, encode(message))]

    def open(self, frame: Frame) -> tuple[int, Message]:
        """The coordinator's side of :meth:`up`."""
        return frame[0], decode(frame[1])

    def wrap(self, ranks: Sequence[int], data: bytes) -> list[bytes]:
        """The frames that the coordinator sends for ``ranks`` of this host."""
        return [data for _ in ranks]

    def down(self, message: Message) -> list[Frame]:
        """The frames that reach the coordinator in response to its ``message``."""
        return []


class Relayed(Direct):
    """A host whose relay combines the messages of its ranks."""

    def __init__(self, ranks: Sequence[int], sets: ProcessSets) -> None:
        super().__init__(ranks, sets)
        self._aggregator = Aggregator(ranks, sets)

    def up(self, rank: int, message: Message) -> list[Frame]:
        """See :class:`Direct`."""
        return self._frames(self._aggregator.up(rank, message))

    def open(self, frame: Frame) -> tuple[int, Message]:
        """See :class:`Direct`."""
        ranks, data = relay.unpack_envelope(frame[1])
        return ranks[0], decode(data)

    def wrap(self, ranks: Sequence[int], data: bytes) -> list[bytes]:
        """See :class:`Direct`."""
        return [relay.pack_envelope(ranks, data)]

    def down(self, message: Message) -> list[Frame]:
        """See :class:`Direct`."""
        return self._frames(self._aggregator.down(message))

    def _frames(self, messages: Sequence[tuple[int | None, Message]]) -> list[Frame]:
        leader = self.ranks[0]
        senders = [(leader if rank is None else rank, message) for rank, message in messages]
        return [(rank, relay.pack_envelope((rank,), encode(message))) for rank, message in senders]


WAYS: dict[str, type[Direct]] = {"ranks": Direct, "hosts": Relayed}


@dataclass
class Work:
    """The work of the coordinator in one step; ``seconds`` of CPU time, and those of all ``relays`` together."""

    received: int = 0
    bytes_in: int = 0
    sent: int = 0
    bytes_out: int = 0
    seconds: float = 0.0
    relays: float = 0.0


class Job:
    """All ranks of a job; each :meth:`step` negotiates ``requests`` on all of them."""

    def __init__(self, size: int, way: str, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._size = size
        self._worker = Worker(PARAMETERS)
        self._coordinator = Coordinator(ProcessSets(size), PARAMETERS)
        self._hosts = [
            (WAYS[way] if first else Direct)(range(first, min(first + HOST_RANKS, size)), ProcessSets(size))
            for first in range(0, size, HOST_RANKS)
        ]
        self._random = random.Random(size)

    def step(self) -> Work:
        """The coordinator's work in a step."""
        work = Work()
        order = list(range(self._size))
        self._random.shuffle(order)
        answers: dict[int, list[Message]] = {rank: [] for rank in order}
        said = self._say()
        for rank in order:
            for frame in self._frames_of(rank, said, work):
                for host, ranks, message in self._coordinate(self._hosts[rank // HOST_RANKS], frame, work):
                    self._tell(host, message, work)
                    for told in ranks:
                        answers[told].append(message)
        assert all(messages == answers[COORDINATOR] for messages in answers.values()), "all ranks are told the same"
        ran = sum(self._obey(message) for message in answers[COORDINATOR])
        assert ran == len(self._requests), "every tensor runs, once"
        return work

    def add_set(self, members: Sequence[int], offers: Sequence[bytes]) -> Work:
        """The coordinator's work when all ranks add a process set of ``members``, which have ``offers``."""
        of_members = dict(zip(members, offers, strict=True))
        adding = Request("process_set.add", Operation.ADD_PROCESS_SET, splits=tuple(members))

        def say(rank: int) -> Message:
            return Ready((replace(adding, offer=of_members.get(rank, b"")),), urgent=(adding.key,))

        return self._pass(say)

    def leave(self) -> Work:
        """The coordinator's work when all ranks shut down."""
        work = self._pass(lambda rank: Leave())
        left = self._pass(lambda rank: Left())
        return Work(*(a + b for a, b in zip(astuple(work), astuple(left), strict=True)))

    def _pass(self, say: Callable[[int], Message]) -> Work:
        """Each rank says something, and all get one message in the end."""
        work = Work()
        answers: dict[int, list[Message]] = {rank: [] for rank in range(self._size)}
        for rank in self._random.sample(range(self._size), self._size):
            for frame in self._frames_of(rank, say(rank), work):
                for host, ranks, message in self._coordinate(self._hosts[rank // HOST_RANKS], frame, work):
                    self._tell(host, message, work)
                    for told in ranks:
                        answers[told].append(message)
        assert all(len(messages) == 1 for messages in answers.values()), "each rank is told one thing"
        return work

    def _frames_of(self, rank: int, message: Message, work: Work) -> list[Frame]:
        if rank == COORDINATOR:
            return [(COORDINATOR, encode(message))]
        begin = time.thread_time()
        frames = self._hosts[rank // HOST_RANKS].up(rank, message)
        work.relays += time.thread_time() - begin
        return frames

    def _tell(self, host: Direct, message: Message, work: Work) -> None:
        begin = time.thread_time()
        assert not host.down(message), "the host has nothing to add"
        work.relays += time.thread_time() - begin

    def _say(self) -> Message:
        for number, request in enumerate(self._requests):
            self._worker.submit(request, urgent=number == 0)
        said = self._worker.outgoing()
        assert said is not None
        return said

    def _obey(self, message: Message) -> int:
        assert isinstance(message, Run)
        return sum(len(batch.responses) for batch in self._worker.run(message))

    def _coordinate(self, host: Direct, frame: Frame, work: Work) -> Iterator[tuple[Direct, Sequence[int], Message]]:
        """Let the coordinator process a frame; yields its messages with their receivers."""
        begin = time.thread_time()
        sender, message = host.open(frame) if frame[0] != COORDINATOR else (COORDINATOR, decode(frame[1]))
        self._coordinator.receive(sender, message, 0.0)
        sent = []
        for outgoing in self._coordinator.decide(0.0):
            data = encode(outgoing.message)
            for told, ranks in self._by_host(outgoing.ranks):
                remote = [rank for rank in ranks if rank != COORDINATOR]
                sent.append((told, ranks, outgoing.message, told.wrap(remote, data)))
        work.seconds += time.thread_time() - begin
        if sender != COORDINATOR:
            work.received += 1
            work.bytes_in += HEADER_BYTES + len(frame[1])
        for told, ranks, answer, frames in sent:
            work.sent += len(frames)
            work.bytes_out += sum(HEADER_BYTES + len(data) for data in frames)
            yield told, ranks, answer

    def _by_host(self, ranks: Sequence[int]) -> list[tuple[Direct, list[int]]]:
        told: dict[int, list[int]] = {}
        for rank in ranks:
            told.setdefault(rank // HOST_RANKS, []).append(rank)
        return [(self._hosts[number], some) for number, some in told.items()]


def kept_bytes(size: int, way: str, requests: Sequence[Request]) -> int:
    """The memory that a coordinator keeps after ``size`` ranks have submitted ``requests`` for the first time."""
    unseen = [replace(request, name=f"{request.name}.{size}.{way}") for request in requests]  # nothing is reused
    frame = encode(Ready(tuple(unseen)))
    tracemalloc.start()
    try:
        coordinator = Coordinator(ProcessSets(size), PARAMETERS)
        for rank in range(size):
            coordinator.receive(rank, decode(frame), 0.0)
            coordinator.decide(0.0)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def gradients() -> list[Request]:
    """The requests of a step."""
    return [
        Request(f"gradient.{name}", Operation.ALLREDUCE, DType.FLOAT32, (elements,))
        for name, elements in reversed(resnet50().items())
    ]


def simulate(size: int, way: str, steps: int) -> dict[str, Any]:
    """A row: the work for a new tensor, and the medians of ``steps`` later ones."""
    requests = gradients()
    job = Job(size, way, requests)
    first = job.step()
    works = [job.step() for _ in range(steps)]
    return {
        "ranks": size,
        "hosts": -(-size // HOST_RANKS),
        "talk": way,
        "received": works[-1].received,
        "KB in": works[-1].bytes_in / 1024,
        "sent": works[-1].sent,
        "KB out": works[-1].bytes_out / 1024,
        "CPU, ms": 1e3 * statistics.median(work.seconds for work in works),
        "first: KB in": first.bytes_in / 1024,
        "new tensor: CPU, ms": 1e3 * first.seconds / len(requests),
        "new tensor: bytes kept": kept_bytes(size, way, requests) / len(requests),
    }


def _plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 5))
    for way in dict.fromkeys(row["talk"] for row in rows):
        mine = [row for row in rows if row["talk"] == way]
        axes.loglog([row["ranks"] for row in mine], [row["CPU, ms"] for row in mine], "o-", label=way)
    axes.set_xlabel("ranks")
    axes.set_ylabel("CPU time of the coordinator per step, ms")
    axes.legend(title="connected to it")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = [8, 64, 512, 4096, 10_000]
    parser.add_argument("--ranks", type=int, nargs="+", default=sizes, help="default: 8 to 10000")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS, help="default: ranks hosts")
    parser.add_argument("--steps", type=int, default=5, help="steps after the first (default: 5)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the CPU time into a PNG file, too")
    add_json_argument(parser)
    arguments = parser.parse_args()
    rows = [simulate(size, way, arguments.steps) for way in arguments.ways for size in arguments.ranks]
    tabulate("the coordinator's work in a step", rows, arguments)
    if arguments.plot:
        _plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
