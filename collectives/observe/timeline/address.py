"""The address at which rank 0 takes the records of the other ranks, and the messages between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgpack

from collectives.api import Store, World
from collectives.handshake.hello import Hello, LocalEnd
from collectives.net.attempts import ConnectAttempt
from collectives.observe.timeline.records import Record, TraceRow
from collectives.settings import Settings
from collectives.store.client import RendezvousClient
from collectives.store.memory import PrefixStore

PING, RECORDS, END = b"p", b"r", b"e"
"""The first byte of a frame: of a question for the time, of records, and of the end of the recording."""
RECORDS_IN_A_FRAME = 64


@dataclass(frozen=True, slots=True)
class TimelineAddress:
    """The world of an engine, for its timelines. ``address`` is that of this rank for the others."""

    world: World
    settings: Settings
    address: str

    @property
    def key(self) -> str:
        """Where in the store of the job rank 0 publishes its address."""
        return f"timeline/round-{self.world.round}"

    def end(self, attempt: ConnectAttempt) -> LocalEnd:
        """This rank's end of a connection."""
        world, topology = self.world, self.world.topology
        hello = Hello(topology.rank, topology.size, world.host, job=world.job, round=world.round)
        return LocalEnd(hello, self.settings.secret, self.address, self.settings.timeouts.heartbeat, attempt)

    @contextmanager
    def store(self) -> Iterator[Store]:
        """The store of the job."""
        address, port = self.world.rendezvous or ("", 0)
        seconds = self.settings.timeouts.connect
        with closing(RendezvousClient(address, port, self.settings.secret, seconds)) as client:
            yield PrefixStore(client, self.world.job)


def pack_records(records: Sequence[Record]) -> Iterator[bytes]:
    """Frames of ``records``."""
    rest = iter(records)
    while some := list(islice(rest, RECORDS_IN_A_FRAME)):
        yield RECORDS + msgpack.packb([(*row, made) for row, made in some])


def unpack_records(frame: bytes) -> list[Record]:
    """The records of a frame; raises ValueError or TypeError."""
    found: list[Any] = msgpack.unpackb(frame[len(RECORDS) :])
    return [Record(TraceRow(str(name), int(rank)), str(made)) for name, rank, made in found]
