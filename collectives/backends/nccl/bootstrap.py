"""How the members of a group come to use NCCL: each says whether it can, and the first one offers an id."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import msgpack

from collectives.api import HorovodInternalError, UnsupportedRequestError, override
from collectives.backends.base import Bootstrap, Group
from collectives.backends.nccl.backend import NcclBackend
from collectives.backends.nccl.interface import NcclConnection, NcclLibrary, Pause, version_text
from collectives.backends.nccl.presence import device_at, without_gpu
from collectives.backends.nccl.watcher import Watcher
from collectives.net.attempts import ConnectAttempt

logger = logging.getLogger(__name__)

_watcher = Watcher()


class NcclOffer(NamedTuple):
    """``reason`` is why a member cannot use NCCL, empty if it can; ``version`` is that of its NCCL.

    ``id`` is the id of the communicator; only that of the first member counts.
    """

    reason: str
    version: int = 0
    id: bytes = b""


class NcclBootstrap(Bootstrap):
    """A :class:`Bootstrap`, and :class:`NcclBackend` for ``timeout`` and ``settles_early``.

    The members connect in their first operation, so nothing here waits.
    """

    def __init__(self, group: Group, timeout: float, local_rank: int, settles_early: bool = True) -> None:
        self._timeout = timeout
        self._settles_early = settles_early
        self._local_rank = local_rank
        super().__init__(group, msgpack.packb(_offer(is_first=group.position == 0)))

    @override
    def connect(self, offers: Sequence[bytes], attempt: ConnectAttempt) -> NcclBackend:
        found = [NcclOffer(*msgpack.unpackb(offer)) for offer in offers]

        def connect(address: int, pause: Pause) -> NcclConnection:
            return _connect(self.group, found[0].id, address, self._local_rank, pause)

        reason = absence(self.group, found)
        return NcclBackend(self.group, connect, _watcher, self._timeout, self._settles_early, reason)


def absence(group: Group, offers: Sequence[NcclOffer]) -> str:
    """Why the members of ``group`` cannot use NCCL together; empty if they can."""
    for position, offer in enumerate(offers):
        if offer.reason:
            return f"NCCL cannot be used on {group.describe([position])}: {offer.reason}"
    versions = {offer.version: position for position, offer in enumerate(offers)}
    if len(versions) > 1:
        having = [f"{version_text(each)} on {group.describe([position])}" for each, position in versions.items()]
        return f"the ranks have different versions of NCCL: {', '.join(having)}; install one on all"
    return ""


def _offer(is_first: bool) -> NcclOffer:
    reason = unavailable()
    if reason:
        return NcclOffer(reason)
    library = load()
    try:
        return NcclOffer("", library.version, library.unique_id() if is_first else b"")
    except HorovodInternalError as error:
        return NcclOffer(str(error))


def _connect(group: Group, id: bytes, address: int, local_rank: int, pause: Pause) -> NcclConnection:
    library, device = load(), device_at(address, local_rank)
    return NcclConnection(library, device, library.connect(id, group.size, group.position, device, pause))


@lru_cache(1)
def unavailable() -> str:
    """Why this process cannot use NCCL, with the remedy; empty if it can. It is quick on a host without a GPU."""
    reason = without_gpu()
    if reason:
        return reason
    try:
        load()
    except (ImportError, UnsupportedRequestError) as error:
        return str(error)
    return ""


@lru_cache(1)
def load() -> NcclLibrary:
    """The binding of NCCL: nccl4py where it is installed, because it can give up to connect, else cupy.

    Raises ImportError, and UnsupportedRequestError for an NCCL that is too old. A process may find several versions of
    NCCL, those of cupy and of a framework, so the log says which one it is.
    """
    library = _first_binding()
    logger.info("tensors on GPUs travel by NCCL %s, called by %s", version_text(library.version), library.name)
    return library


def _first_binding() -> NcclLibrary:
    from collectives.backends.nccl.cupy_library import CupyLibrary
    from collectives.backends.nccl.nccl4py_library import Nccl4pyLibrary

    try:
        return Nccl4pyLibrary()
    except ImportError as error:
        logger.info("NCCL is called by cupy: %s", error)
        return CupyLibrary()
