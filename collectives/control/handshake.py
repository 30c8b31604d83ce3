"""How the ranks of a world connect, in two steps over the same connections.

First every rank sends rank 0 its hello, and learns from the answer which rank is on which host. Then it offers the
addresses at which its backends, and the relay in its process, can be reached, and learns those of all others. Rank 0
lets no rank start unless all can, and sends every rank the same reason.
"""

from __future__ import annotations

import errno
import logging
import select
import socket
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import msgpack

from collectives import descriptors
from collectives.api import (
    CollectiveTimeoutError,
    EngineError,
    HorovodInternalError,
    PeerLostError,
    SettingsError,
    Store,
)
from collectives.attempt import ConnectAttempt
from collectives.control import envelope
from collectives.control.admission import Admission, family_of
from collectives.control.configuration import disagreement
from collectives.control.frames import NONCE_BYTES, Wire, nonce, seal, unseal
from collectives.control.hello import Hello, LocalEnd, pack_answer, pack_farewell, pack_hello, unpack_answer
from collectives.control.relay import Relay
from collectives.control.sockets import Connection, SocketChannel, end_in_silence
from collectives.control.starts import Starts
from collectives.control.tree import Center, Leader, Leaf, relays
from collectives.planning.aggregation import Aggregator
from collectives.planning.errors import unpack
from collectives.planning.messages import Abort, decode
from collectives.planning.process_sets import ProcessSets

__all__ = ["Connected", "Hello", "Offer", "connect_channel"]

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.02
FIRST_LOOK_SECONDS = 1.0
LONGEST_LOOK_SECONDS = 10.0
"""A look into the store ends after this time at the latest: hundreds of ranks may wait for rank 0."""
RESERVED = 4
"""Descriptors for the channel of a rank, or for the report that it cannot connect: no more than two of either."""
REASON_SECONDS = 0.5
"""How long a rank that gives up waits for the other rank's reason, in seconds."""
CALL_SECONDS = 0.5
"""How long a rank tries to reach a rank 0 of another round, in seconds."""
CURRENT = "current"
"""The key of the round in which rank 0 listens, or listened last, and of its entry."""

Offer: TypeAlias = Callable[[tuple[str, ...], int], bytes]
"""The host of each rank, and the cores that the ranks of this host share -> the addresses that this rank offers."""


@dataclass(frozen=True, slots=True)
class Connected:
    """A channel to the other ranks, and their answers.

    ``hosts[r]`` is the host of rank ``r``, ``offers[r]`` its offer. ``cores`` is the number of distinct cores that the
    ranks of this rank's host may use; it is the same on all of them. ``start`` is the number of this start of the
    world.
    """

    channel: SocketChannel
    hosts: tuple[str, ...]
    cores: int
    offers: tuple[bytes, ...]
    start: int


def connect_channel(
    end: LocalEnd, store: Store, process_sets: ProcessSets, offer: Offer, starts: Starts | None = None
) -> Connected:
    """Connect to the other ranks of the world, which find each other in ``store``, that of their job.

    ``offer`` is called once. ``starts`` holds what this process knows about earlier starts. Raises
    CollectiveTimeoutError that names the missing ranks, PeerLostError, SettingsError when the ranks were started in
    different ways, what ``offer`` raises on any rank, and the error that the attempt was aborted with.
    """
    starts = starts or Starts()
    if end.hello.rank == 0:
        return _center(end, store, offer, starts)
    return _member(end, store, process_sets, offer, starts)


def _world(hello: Hello) -> Hashable:
    return hello.job, hello.round


# Rank 0.


def _center(end: LocalEnd, store: Store, offer: Offer, starts: Starts) -> Connected:
    hello = end.hello
    start = starts.next(_world(hello))
    publishing = partial(_publishing_lack, end, store, starts, start)
    with (
        publishing(None),
        descriptors.Reserve(RESERVED) as reserve,
        Admission(end, range(1, hello.size)) as admission,
        publishing(reserve),  # before the admission closes its listeners
    ):
        store.set(_key(hello, start), msgpack.packb(admission.entry))
        starts.passed(_world(hello), start)
        store.set(CURRENT, msgpack.packb((hello.round, admission.entry)))
        peers = admission.admit_all()
        hellos = [hello, *(peers[rank].hello for rank in range(1, hello.size))]
        problem = disagreement([each.configuration for each in hellos])
        if problem is not None:
            raise SettingsError(problem)
        hosts, cores = tuple(each.host for each in hellos), _cores(hellos)
        admission.answer((hosts, cores))
        mine = offer(hosts, cores[hello.host])
        offers = {0: (None, mine), **admission.collect()}
        admission.answer([offers[rank] for rank in range(hello.size)])
    connections = {rank: Connection(peer.wire.sock) for rank, peer in peers.items()}
    channel = _channel_of_center(hosts, connections)
    return Connected(channel, hosts, cores[hello.host], tuple(offers[rank][1] for rank in range(hello.size)), start)


@contextmanager
def _publishing_lack(
    end: LocalEnd, store: Store, starts: Starts, start: int, reserve: descriptors.Reserve | None
) -> Iterator[None]:
    """Publish a lack of descriptors in the place of the entry: a rank that cannot be admitted can still read it."""
    try:
        yield
    except Exception as error:
        reason = descriptors.explained(error, end.hello.rank)
        if reason is error:
            raise
        if reserve is not None:
            reserve.release()
        with suppress(OSError, HorovodInternalError):
            store.set(_key(end.hello, start), msgpack.packb({"error": pack_answer(None, reason)}))
            starts.passed(_world(end.hello), start)
        raise reason from error


def _cores(hellos: Sequence[Hello]) -> dict[str, int]:
    """For each host the number of cores that its ranks may use together."""
    cores: dict[str, set[int]] = {}
    for hello in hellos:
        cores.setdefault(hello.host, set()).update(hello.cores)
    return {host: len(numbers) for host, numbers in cores.items()}


def _channel_of_center(hosts: Sequence[str], connections: Mapping[int, Connection]) -> SocketChannel:
    served = relays(hosts)
    if not served:
        return SocketChannel(0, len(hosts), connections)
    followers = {rank for leader, ranks in served.items() for rank in ranks if rank != leader}
    direct = {rank: connection for rank, connection in connections.items() if rank not in followers}
    return Center(len(hosts), direct, served, {rank: connections[rank] for rank in followers})


# The other ranks.


def _member(end: LocalEnd, store: Store, process_sets: ProcessSets, offer: Offer, starts: Starts) -> Connected:
    with ExitStack() as stack:
        center, start, (hosts, cores) = _join_center(end, store, starts)
        stack.callback(center.sock.close)
        starts.passed(_world(end.hello), start)
        hosts = tuple(hosts)
        mine = cores[end.hello.host]
        ranks = next((ranks for ranks in relays(hosts).values() if end.hello.rank in ranks), ())
        admission = None
        with center.hearing_errors():
            reserve = stack.enter_context(descriptors.Reserve(RESERVED))
            if ranks and ranks[0] == end.hello.rank:
                admission = stack.enter_context(Admission(end, ranks[1:], center.sock))
            answer = pack_answer((None if admission is None else admission.entry, offer(hosts, mine)))
        with suppress(OSError):  # the answer to it, which is next, gives the reason
            center.send(answer)
        offers = center.answer()
        reserve.release()
        channel = _channel(end, center, ranks, admission, offers, process_sets)
        stack.pop_all()
        if admission is not None:
            admission.__exit__(None, None, None)
    return Connected(channel, hosts, mine, tuple(backends for _, backends in offers), start)


def _channel(
    end: LocalEnd,
    center: _Answering,
    ranks: Sequence[int],
    admission: Admission | None,
    offers: Sequence[Any],
    process_sets: ProcessSets,
) -> SocketChannel:
    rank, size = end.hello.rank, end.hello.size
    if not ranks:
        return SocketChannel(rank, size, {0: Connection(center.sock)})
    if admission is None:
        leader = ranks[0]
        sock = _join(end, offers[leader][0], leader).sock
        return Leaf(rank, size, leader, Connection(sock), Connection(center.sock))
    peers = _admit_followers(admission, center.sock)
    admission.answer(None)
    connections = {each: Connection(peer.wire.sock) for each, peer in peers.items()}
    mine, theirs = socket.socketpair()
    relay = Relay(
        rank, Connection(center.sock), {rank: Connection(theirs), **connections}, Aggregator(ranks, process_sets)
    )
    return Leader(rank, size, Connection(mine), relay)


def _admit_followers(admission: Admission, center: socket.socket) -> Mapping[int, Any]:
    try:
        return admission.admit_all()
    except PeerLostError as error:
        raise _last_words(center) or error from error


def _last_words(center: socket.socket) -> HorovodInternalError | None:
    """The reason that rank 0 sent before it hung up."""
    with suppress(EngineError):
        for frame in Connection(center).receive():
            message = decode(envelope.unpack(frame)[1])
            if isinstance(message, Abort):
                return unpack(message.error)
    return None


# Connecting to another rank.


class _Answering:
    """The connection to a rank that admitted this one. Raises the errors of the attempt and of the other rank."""

    def __init__(self, end: LocalEnd, host: int, wire: Wire) -> None:
        self.sock = wire.sock
        self._end = end
        self._host = host
        self._wire = wire
        self._nonce = nonce()

    def greet(self, admission: str) -> None:
        """Prove knowledge of the secret, and describe this rank."""
        rank, host = self._end.hello.rank, self._host
        try:
            challenge = self._wire.exactly(NONCE_BYTES)
            self.send(seal(self._end.secret, challenge, pack_hello(self._end.hello, self._nonce, admission)))
        except TimeoutError as error:
            text = f"rank {rank}: rank {host} was reached, but did not answer in time; its process may be stopped"
            raise CollectiveTimeoutError(text, [host]) from error
        except OSError as error:
            text = f"rank {rank}: the connection to rank {host} broke before it was answered: {error}"
            raise PeerLostError(text, [host]) from error

    @contextmanager
    def hearing_errors(self) -> Iterator[None]:
        """Send the other rank the error that ends the block."""
        try:
            yield
        except BaseException as error:
            reason = descriptors.explained(error, self._end.hello.rank)
            self._leave(pack_answer(None, reason))
            if reason is error:
                raise
            raise reason from error

    def send(self, data: bytes) -> None:
        """Send a frame."""
        self._wire.send(data)

    def answer(self) -> Any:
        """The next answer of the other rank; raises the error that it contains."""
        rank, host = self._end.hello.rank, self._host
        try:
            return self._next()
        except TimeoutError as error:
            raise self._reason_for_being_late() from error
        except OSError as error:
            raise PeerLostError(f"rank {rank}: the connection to rank {host} broke: {error}", [host]) from error
        except BaseException as error:
            self._leave(pack_farewell(error))
            raise

    def _next(self) -> Any:
        return unpack_answer(unseal(self._end.secret, self._nonce, self._wire.receive()))

    def _reason_for_being_late(self) -> Exception:
        """Time is over. Only the other rank knows the missing ranks: tell it, and wait a moment for its reason."""
        rank, host = self._end.hello.rank, self._host
        text = f"rank {rank}: rank {host} did not say in time which ranks are missing; its process may be stopped"
        late = CollectiveTimeoutError(text, [host])
        self._leave(pack_farewell(late))
        try:
            with suppress(OSError), ConnectAttempt(REASON_SECONDS) as self._wire.attempt:
                self._next()
        except (HorovodInternalError, SettingsError) as reason:
            return reason
        return late

    def _leave(self, reason: bytes) -> None:
        """Send the other rank the packed reason why this one leaves."""
        with suppress(OSError, HorovodInternalError):
            self.send(reason)
            self.sock.shutdown(socket.SHUT_WR)


def _key(hello: Hello, start: int) -> str:
    """The entry of rank 0 in the store."""
    return f"round-{hello.round}/start-{start}/rank-0"


def _join_center(end: LocalEnd, store: Store, starts: Starts) -> tuple[_Answering, int, Any]:
    """A connection to rank 0, the number of the start, and the first answer."""
    start, refused = starts.next(_world(end.hello)), ""
    while True:
        entry = _look_up(end, store, starts, start, refused)
        try:
            center = _Answering(end, 0, _dial(end, entry, 0))
        except ConnectionRefusedError:
            _check_entry(end, store, starts, start)
            refused = f"rank 0 does not answer at {entry['tcp']}, where it listened for an earlier start"
            start += 1
            continue
        with ExitStack() as stack:
            stack.callback(center.sock.close)
            try:
                first = _greet(center, entry)
            except PeerLostError:
                _check_entry(end, store, starts, start)
                raise
            stack.pop_all()
        return center, start, first


def _entry(end: LocalEnd, store: Store, starts: Starts, start: int, seconds: float) -> Any:
    """The entry of rank 0 in this start; raises the error that it published instead, or CollectiveTimeoutError."""
    entry = msgpack.unpackb(store.get(_key(end.hello, start), seconds))
    if "error" in entry:
        starts.passed(_world(end.hello), start)
        unpack_answer(entry["error"])
    return entry


def _check_entry(end: LocalEnd, store: Store, starts: Starts, start: int) -> None:
    """Raise the error that rank 0 has published since, if any."""
    with suppress(CollectiveTimeoutError, PeerLostError):
        _entry(end, store, starts, start, 0.0)


def _look_up(end: LocalEnd, store: Store, starts: Starts, start: int, refused: str) -> Any:
    """Where rank 0 listens in this start; CollectiveTimeoutError, or PeerLostError where an earlier one is over."""
    seconds, called = FIRST_LOOK_SECONDS, ""
    while True:
        end.attempt.check()
        try:
            return _entry(end, store, starts, start, min(seconds, end.attempt.remaining))
        except CollectiveTimeoutError as error:
            seconds = min(2 * seconds, LONGEST_LOOK_SECONDS)
            round, entry = _current(end.hello, store)
            if round != end.hello.round and entry["id"] != called:
                called = entry["id"]
                _call(end, entry)
            if round > end.hello.round:
                raise _outdated(end.hello, round) from error
            if end.attempt.remaining:
                continue
            if refused:
                raise PeerLostError(refused, [0]) from error
            raise _without_center(end.hello, round) from error


def _current(hello: Hello, store: Store) -> tuple[int, Any]:
    """The round in which rank 0 listens, or listened last, and its entry; this rank's round where none is known."""
    try:
        round, entry = msgpack.unpackb(store.get(CURRENT, 0.0))
        return round, entry
    except CollectiveTimeoutError:
        return hello.round, None


def _call(end: LocalEnd, entry: Any) -> None:
    """Let a rank 0 of another round refuse this rank, so that it knows of the other round, too."""
    problems = OSError, HorovodInternalError, SettingsError
    with suppress(*problems), ConnectAttempt(CALL_SECONDS, end.attempt.check) as attempt:
        caller = replace(end, attempt=attempt)
        wire = _dial(caller, entry, 0)
        with closing(wire.sock):
            _greet(_Answering(caller, 0, wire), entry)
    end.attempt.check()


def _outdated(hello: Hello, round: int) -> PeerLostError:
    """Rank 0 is in the later ``round``: it will never join that of ``hello``."""
    return PeerLostError(
        f"rank {hello.rank} is in {hello.world}, rank 0 in {replace(hello, round=round).world}; only ranks of one "
        "world can connect: ask the launcher for the current one",
        [0],
    )


def _without_center(hello: Hello, round: int) -> CollectiveTimeoutError:
    """Rank 0 did not come; the last that it has announced is ``round``."""
    behind = f": it is still in round {round}" if round < hello.round else ""
    text = f"rank 0 of {hello.world} did not come in time{behind}; look at its output, or raise "
    return CollectiveTimeoutError(text + "HOROVOD_GLOO_TIMEOUT_SECONDS", [0])


def _join(end: LocalEnd, entry: Any, host: int) -> _Answering:
    """A connection to rank ``host``, which admitted this one."""
    try:
        other = _Answering(end, host, _dial(end, entry, host))
    except ConnectionRefusedError as error:
        raise PeerLostError(f"rank {host} does not listen any more: {error}", [host]) from error
    try:
        _greet(other, entry)
    except BaseException:
        other.sock.close()
        raise
    return other


def _greet(other: _Answering, entry: Mapping[str, Any]) -> Any:
    """The first answer of the other rank."""
    other.greet(entry["id"])
    return other.answer()


def _dial(end: LocalEnd, entry: Mapping[str, Any], host: int) -> Wire:
    """A connection to the listener of rank ``host``; ConnectionRefusedError where it no longer listens."""
    if entry["host"] == end.hello.host:
        try:
            return _open(end, socket.AF_UNIX, entry["unix"])
        except OSError as error:
            _check_descriptors(error, end.hello.rank)
            logger.debug("rank %d is on this host, but in another network namespace or gone; using TCP", host)
    while True:
        try:
            return _open(end, family_of(entry["tcp"][0]), tuple(entry["tcp"]))
        except ConnectionRefusedError:
            raise
        except OSError as error:
            _check_descriptors(error, end.hello.rank)
            if not end.attempt.remaining:
                raise PeerLostError(f"rank {host} does not answer at {entry['tcp']}: {error}", [host]) from error
            end.attempt.wait({}, RETRY_SECONDS)


def _check_descriptors(error: OSError, rank: int) -> None:
    """Raise HorovodInternalError where ``error`` is no fault of the other rank: ``rank`` has no descriptor left."""
    if descriptors.are_exhausted(error):
        raise descriptors.explained(error, rank) from error


def _open(end: LocalEnd, family: int, address: Any) -> Wire:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        _finish(sock, sock.connect_ex(address), end.attempt)
        end_in_silence(sock, end.heartbeat)
    except BaseException:
        sock.close()
        raise
    return Wire(sock, end.attempt)


def _finish(sock: socket.socket, problem: int, attempt: ConnectAttempt) -> None:
    """Wait for a connection that is under way; OSError where it fails."""
    if problem == errno.EINPROGRESS:
        if not attempt.wait({sock.fileno(): select.POLLOUT}):
            raise TimeoutError("no answer in time")
        problem = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if problem:
        raise OSError(problem, errno.errorcode.get(problem, "unknown error"))
