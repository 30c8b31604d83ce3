"""A process that a launcher of others started becomes a rank: it finds rank 0, and gets the place of every rank."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

from collectives import (
    LOOPBACK,
    CollectiveTimeoutError,
    HorovodInternalError,
    RendezvousClient,
    RendezvousServer,
    SettingsError,
    Store,
    attempts,
    frames,
)
from executors.api import JobSecret
from executors.job import host
from executors.job.environment import Course
from executors.job.job import environment_of
from executors.job.worlds import slots_of
from executors.launchers.place import Farewell, Found, Place, nothing, text

logger = logging.getLogger(__name__)


NONCE_BYTES = 16
PURPOSE = b"hvd-cluster secret of the job"


def sealed(secret: JobSecret, rendezvous: JobSecret) -> list[str]:
    """``secret``, of 32 bytes, under a pad that is used once and that only those with the other secret can make."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return [nonce.hex(), _padded(secret.key, rendezvous, nonce).hex()]


def unsealed(content: Sequence[str], rendezvous: JobSecret) -> JobSecret:
    """The reverse of :func:`sealed`."""
    nonce, padded = map(bytes.fromhex, content)
    return JobSecret(_padded(padded, rendezvous, nonce))


def _padded(content: bytes, rendezvous: JobSecret, nonce: bytes) -> bytes:
    pad = frames.digest(rendezvous.key, PURPOSE, nonce)
    return bytes(a ^ b for a, b in zip(content, pad, strict=True))


JOINED = "_HOROVOD_JOINED"
"""The id of the process that became a rank, a digest of its place, and its connection to the launcher, if any."""
PMI = "PMI_FD"
SOCKET = "socket:"


def leave_mark(environment: MutableMapping[str, str], place: Place) -> None:
    """Note in ``environment`` that this process has the rank of ``place``."""
    environment[JOINED] = f"{os.getpid()} {_digest(place)} {_connection(environment)}".strip()


def erase_mark(environment: MutableMapping[str, str]) -> None:
    """The reverse of :func:`leave_mark`."""
    environment.pop(JOINED, None)


def refuse_child(environment: Mapping[str, str], place: Place) -> None:
    """Raise SettingsError if another process has the rank of ``place`` already, and has started this one."""
    process, place_digest, connection = (*text(environment, JOINED).split(" "), "", "")[:3]
    # A job of mpirun that a rank starts may have the same variables, but has connections of its own.
    is_started = _connection(environment) not in ("", connection)
    if process == str(os.getpid()) or place_digest != _digest(place) or is_started:
        return
    raise SettingsError(
        f"this process, {os.getpid()}, is a child of rank {place.rank}, which is process {process}: it has inherited "
        f"the variables of {place.launcher}, but cannot be a second rank {place.rank}. Call hvd.init() only in the "
        f"processes that {place.launcher} started. To train here apart from the job, start this process with "
        f"HOROVOD_SIZE=1 or without {place.variable}; to start several ranks, use hvdrun"
    )


def _digest(place: Place) -> str:
    return hashlib.sha256(f"{place.launcher} {place.job} {place.rank} {place.size}".encode()).hexdigest()[:16]


def _connection(environment: Mapping[str, str]) -> str:
    """The socket that mpirun has given to this process, by its number in the kernel; empty where there is none."""
    with suppress(OSError):
        target = os.readlink(f"/proc/self/fd/{text(environment, PMI) or 'none'}")
        return target if target.startswith(SOCKET) else ""
    return ""


PLACES = "places"
WORLD = "world"
READ = "read"
# Rank 0 knows which ranks are missing, and says it first.
GRACE_SECONDS = 5.0
# A rank 0 that has ended is not waited for.
REACH_SECONDS = 10.0
# Ranks that are there read at once why the rendezvous has failed.
REASON_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Joined:
    """The variables that a launcher of ours would have set.

    ``close`` ends what runs for the job in this process; ``disown`` leaves it to the parent, in a forked child.
    """

    environment: dict[str, str]
    close: Callable[[], None] = nothing
    disown: Callable[[], None] = nothing


class _HeardError(Exception):
    """This rank has heard before why a rendezvous has failed, or that all have come."""


def join(place: Place, seconds: float, farewell: Farewell) -> Joined:
    """Find the other ranks of the job of ``place``, each of which calls this, within ``seconds``.

    If ranks do not come, rank 0 leaves the reason to ``farewell``. A rank that comes late raises it, too: once, then it
    waits for the next rendezvous. Raises SettingsError where the launcher offers no way; CollectiveTimeoutError if
    rank 0 or other ranks do not come, PeerLostError if rank 0 ends meanwhile.
    """
    if place.rendezvous is None:
        raise SettingsError(_impossible(place))
    logger.info("rank %d of %d of %s looks for the others", place.rank, place.size, place.launcher)
    farewell.end()
    return _lead(place, seconds, farewell) if place.rank == 0 else _follow(place, seconds)


def _impossible(place: Place) -> str:
    return (
        f"{place.launcher} started this process as one of {place.size} ({place.variable}={place.size}), but its "
        f"variables do not say where rank 0 is: {place.remedy}. Or start the script with "
        f"hvdrun -np {place.size} python train.py. Set HOROVOD_SIZE=1 to train separate models on purpose"
    )


def _lead(place: Place, seconds: float, farewell: Farewell) -> Joined:
    """Rank 0 serves the rendezvous until all have the world, and the job, with a secret of its own, until it ends."""
    secret = JobSecret()
    with ExitStack() as stack:
        led = place.rendezvous.lead(place.job, seconds)  # type: ignore[union-attr]
        stack.callback(led.close)
        with ExitStack() as rendezvous:
            rendezvous.callback(led.server.stop)
            rendezvous.callback(led.end)
            server = RendezvousServer(secret.key, led.server.address)
            stack.enter_context(server)
            store = led.server.store
            _report(store, place, LOOPBACK)
            world = _world(store, place, seconds) | {"port": server.port, "secret": sealed(secret, led.secret)}
            store.set(WORLD, json.dumps(world).encode())
            if "error" in world:
                _await_readers(store, _present(store, place.size), REASON_SECONDS)
                farewell.hold(rendezvous.pop_all().close, led.server.disown)
            environment = _environment(store, place, LOOPBACK, led.secret, seconds)
            _await_readers(store, range(1, place.size), REACH_SECONDS)
        close = stack.pop_all().close
    return Joined(environment, close, server.disown)


def _follow(place: Place, seconds: float) -> Joined:
    reason = ""
    for left in attempts(seconds):
        try:
            found = place.rendezvous.follow(place.job, left)  # type: ignore[union-attr]
        except CollectiveTimeoutError:
            if reason:
                break
            raise
        try:
            return _enter(found, place, seconds)
        except _HeardError as error:
            reason = str(error)
    raise CollectiveTimeoutError(reason)


def _enter(found: Found, place: Place, seconds: float) -> Joined:
    with ExitStack() as stack:
        stack.callback(found.close)
        # Rank 0 runs: it has answered already.
        reach = min(seconds, REACH_SECONDS)
        with RendezvousClient(found.address, found.port, found.secret.key, reach) as store:
            if _has(store, f"{READ}/{place.rank}", 0.0):
                raise _HeardError(_reason(store, place))
            _report(store, place, found.address)
            environment = _environment(store, place, found.address, found.secret, seconds)
        return Joined(environment, stack.pop_all().close)


def _reason(store: Store, place: Place) -> str:
    """The next rendezvous may have taken the port of this one between two requests, and has no world yet."""
    try:
        world = json.loads(store.get(WORLD, 0.0))
    except CollectiveTimeoutError:
        return _twice(place)
    return world.get("error") or _twice(place)


def _twice(place: Place) -> str:
    return (
        f"rank {place.rank} of this job of {place.launcher} has started twice, but the first one has met the other "
        "ranks already, which do not wait for another: let the launcher start all ranks again"
    )


def _present(store: Store, size: int) -> list[int]:
    return [rank for rank in range(1, size) if _has(store, f"{PLACES}/{rank}", 0.0)]


def _await_readers(store: Store, ranks: Iterable[int], seconds: float) -> None:
    """Wait until these ranks have read the world, or have had the time for it."""
    deadline = time.monotonic() + seconds
    for rank in ranks:
        _has(store, f"{READ}/{rank}", deadline - time.monotonic())


def _report(store: Store, place: Place, address: str) -> None:
    """Tell all ranks the host and the node of this one, and the address at which it reaches rank 0.

    Ranks of one host share memory. A node is a machine, whose devices its ranks share by their local ranks; each of its
    containers is a host.
    """
    text = json.dumps([f"{host.identity()} {place.node}".strip(), host.machine(place.node), address])
    store.set(f"{PLACES}/{place.rank}", text.encode())


def _world(store: Store, place: Place, seconds: float) -> dict[str, Any]:
    """What rank 0 tells all: the hosts and nodes of the ranks, and its own address; or the ranks that are missing."""
    deadline = time.monotonic() + seconds
    ranks = range(place.size)
    missing = [rank for rank in ranks if not _has(store, f"{PLACES}/{rank}", deadline - time.monotonic())]
    if missing:
        return {
            "error": f"of {place.size} ranks that {place.launcher} started, {_shown(missing)} did not come within "
            f"{seconds:g} s; look at the log of the first of them, or raise HOROVOD_START_TIMEOUT"
        }
    reports = [json.loads(store.get(f"{PLACES}/{rank}", 0.0)) for rank in ranks]
    hosts, nodes, addresses = zip(*reports, strict=True)
    return {"hosts": hosts, "nodes": nodes, "address": _address(hosts, addresses)}


def _has(store: Store, key: str, seconds: float) -> bool:
    try:
        store.get(key, max(seconds, 0.0))
    except CollectiveTimeoutError:
        return False
    return True


def _shown(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def _address(hosts: Sequence[str], addresses: Sequence[str]) -> str:
    """The address of rank 0 for the ranks of its host: one that other hosts reach, if there are any.

    Ranks are known by the address that they have on the way to it.
    """
    others = (address for host, address in zip(hosts, addresses, strict=True) if host != hosts[0])
    return next(others, LOOPBACK)


def _environment(store: Store, place: Place, address: str, rendezvous: JobSecret, seconds: float) -> dict[str, str]:
    world = json.loads(store.get(WORLD, seconds + GRACE_SECONDS))
    with suppress(HorovodInternalError):  # rank 0 has waited long enough, and the world is here
        store.set(f"{READ}/{place.rank}", b"")
    if "error" in world:
        raise CollectiveTimeoutError(world["error"])
    hosts = world["hosts"]
    slot = replace(slots_of(world["nodes"])[place.rank], host=hosts[place.rank])
    own = world["address"] if slot.host == hosts[0] else address
    return environment_of(slot, own, world["port"], unsealed(world["secret"], rendezvous), Course())
