"""The first messages of a connection between two ranks: a hello in one direction, answers in the other."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack

from collectives.api import EngineError, HorovodInternalError, PeerLostError, SettingsError
from collectives.controller.errors import ErrorData, for_other_ranks, pack, unpack
from collectives.controller.messages import Abort, decode, encode, inflated
from collectives.cores import usable_numbers
from collectives.net.attempts import ConnectAttempt
from collectives.net.frames import fingerprint, proof
from collectives.net.wire import Wire


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank's description of itself when it connects.

    ``job`` and ``round`` identify its world. ``cores`` are the numbers of as many cores as its process may use.
    ``configuration`` has the settings that must be the same on all ranks, as name -> value.
    """

    rank: int
    size: int
    host: str
    cores: tuple[int, ...] = field(default_factory=usable_numbers)
    configuration: Mapping[str, str] = field(default_factory=dict)
    job: str = "job"
    round: int = 0

    @property
    def world(self) -> str:
        """The world, for messages."""
        return f"round {self.round} of job {self.job!r}"


MOST_DIRECT = 512
"""A world with more ranks is *large*: rank 0 admits hosts. Up to it, half of the usual 1,024 descriptors are enough."""


@dataclass(frozen=True, slots=True)
class LocalEnd:
    """This rank's end of the future connections.

    Other hosts reach it at ``address``. ``heartbeat`` is the longest silence of another host, in seconds.
    ``local_rank`` and ``local_size`` are what the launcher says about the ranks of this host; one alone if it does not.
    """

    hello: Hello
    secret: bytes
    address: str
    heartbeat: float
    attempt: ConnectAttempt
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_large(self) -> bool:
        """Whether the world is."""
        return self.hello.size > MOST_DIRECT

    @property
    def may_lead(self) -> bool:
        """Whether the other ranks of this host look for this one, unless rank 0 is on this host."""
        return self.is_large and self.local_size > 1 and self.local_rank == 0

    @property
    def may_follow(self) -> bool:
        """Whether this rank looks for another one of its host, unless rank 0 is on this host."""
        return self.is_large and self.local_rank > 0


QUESTION, GO = False, True
"""Two answers of rank 0: whether a rank that it waits for runs; all ranks have connected within their hosts."""


def pack_hello(hello: Hello, nonce: bytes, admission: str) -> bytes:
    """The hello to the listener ``admission``; the answers must prove knowledge of ``nonce``."""
    world = (hello.job, hello.round)
    fields = (hello.rank, hello.size, hello.host, hello.cores, dict(hello.configuration), *world)
    packed: bytes = msgpack.packb((nonce, admission, fields))
    return packed


def unpack_hello(data: bytes) -> tuple[Hello, bytes, str]:
    """The hello, the nonce and the listener of :func:`pack_hello`; raises ValueError or TypeError."""
    nonce, admission, (rank, size, host, cores, configuration, job, round) = msgpack.unpackb(data)
    return Hello(rank, size, host, tuple(cores), dict(configuration), job, round), nonce, admission


LONG_ANSWER = 1 << 16
"""Bytes. Longer answers, which only large worlds have, are compressed: each host gets the addresses of all ranks."""
COMPRESSED = True
"""In the place of the error of an answer: the rest is another answer, compressed."""
LEVEL = 1
"""Of compression: rank 0 does it once, but while all wait."""


def pack_answer(value: object, error: BaseException | None = None) -> bytes:
    """``value``, or the ``error`` that keeps the ranks from connecting."""
    packed: bytes = msgpack.packb((_error_fields(error), value if error is None else None))
    if len(packed) > LONG_ANSWER:
        packed = msgpack.packb((COMPRESSED, zlib.compress(packed, LEVEL)))
    return packed


@dataclass(frozen=True, slots=True)
class Peer:
    """A rank that has proved that it knows ``secret``, its hello, and the nonce that it expects in the answers.

    The owner of the peer owns ``wire``.
    """

    wire: Wire
    hello: Hello
    nonce: bytes
    secret: bytes

    def answer(self, value: object, error: BaseException | None = None) -> None:
        """Send ``value``, or the ``error`` that keeps the ranks from connecting."""
        content = pack_answer(value, error)
        self.wire.send(self.proof(fingerprint(content)) + content)

    def proof(self, fingerprint: bytes) -> bytes:
        """The proof for this peer of a content with ``fingerprint``."""
        return proof(self.secret, self.nonce, fingerprint)


def pack_farewell(error: BaseException) -> bytes:
    """The reason of a rank that gives up: a control message, because the other rank may believe it connected."""
    return encode(Abort(pack(for_other_ranks(error))))


def unpack_answer(data: bytes) -> Any:
    """The value of :func:`pack_answer`; raises its error, or that of :func:`pack_farewell`."""
    fields, *rest = msgpack.unpackb(data)
    if fields is COMPRESSED:
        data = _decompressed(*rest)
        fields, *rest = msgpack.unpackb(data)
    if fields is None:
        (value,) = rest
        return value
    if not isinstance(fields, list):
        raise _farewell(data)
    kind, text, details = fields
    if kind == SettingsError.__name__:
        raise SettingsError(text)
    raise unpack(ErrorData(kind, text, tuple(details)))


def _decompressed(data: bytes) -> bytes:
    try:
        return inflated(data)
    except ValueError as error:
        raise ValueError(f"an answer of {len(data)} bytes cannot be read: {error}") from error


def _farewell(data: bytes) -> HorovodInternalError:
    message = decode(data)
    if isinstance(message, Abort):
        return unpack(message.error)
    return EngineError(f"{type(message).__name__} arrived while the ranks connected")


def _error_fields(error: BaseException | None) -> tuple[str, str, tuple[Any, ...]] | None:
    if error is None:
        return None
    if isinstance(error, SettingsError):
        return SettingsError.__name__, str(error), ()
    data = pack(for_other_ranks(error))
    return data.kind, data.text, data.details


class OtherWorldError(PeerLostError):
    """The two ranks were given different worlds. ``is_later``: the world of the other rank replaces this one."""

    def __init__(self, other: Hello, mine: Hello) -> None:
        super().__init__(
            f"rank {other.rank} is in {other.world}, rank {mine.rank} in {mine.world}; only ranks of one world can "
            "connect: ask the launcher for the current one",
            [other.rank],
        )
        self.is_later = other.job == mine.job and other.round > mine.round


def objection(hello: Hello, mine: Hello, missing: Collection[int]) -> OtherWorldError | SettingsError | None:
    """Why the rank of ``mine`` cannot admit that of ``hello``; ``missing`` are the ranks that it still expects."""
    if (hello.job, hello.round) != (mine.job, mine.round):
        return OtherWorldError(hello, mine)
    if hello.size != mine.size:
        return SettingsError(
            f"rank {hello.rank} was started for {hello.size} ranks and rank {mine.rank} for {mine.size}; "
            "start all with one HOROVOD_SIZE"
        )
    if hello.rank not in missing:
        return SettingsError(f"two processes have HOROVOD_RANK={hello.rank}; give each process its own rank")
    return None
