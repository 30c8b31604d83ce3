"""The ranks that Lightning asks its cluster environment for."""

from __future__ import annotations

import functools
import logging
import socket
from typing import Any

from collectives import InvalidRequestError
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.ops.objects import broadcast_object

logger = logging.getLogger(__name__)


class RankEnvironment:
    """The members of ``process_set`` are the ranks of a Trainer or a Fabric; by default all processes of the job.

    The first question starts the engine, as ``init()`` does: that of a launcher, or a world of one without a launcher.
    Lightning starts no process. With it, Lightning's own strategies train under the launchers of this project, too:
    ``Trainer(strategy="ddp", devices=hvd.local_size(), plugins=[HorovodEnvironment()])``. InvalidRequestError on ranks
    outside of the set.
    """

    def __init__(self, process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        if not isinstance(process_set, ProcessSet):
            raise InvalidRequestError(f"process_set={process_set!r} must be a ProcessSet, such as ProcessSet([0, 1])")
        self.process_set = process_set

    def ranks(self) -> list[int]:
        """The global ranks of the members, in order."""
        if not basics.is_initialized():
            basics.init()
        if self.process_set is global_process_set:
            return list(range(basics.size()))  # a newcomer of an elastic job, which is still alone, expects these
        members = self.process_set.ranks or []
        if self.process_set.process_set_id is None:
            raise InvalidRequestError(
                f"{self.process_set} is not registered; call hvd.init(process_sets=[...]) before the Trainer is made"
            )
        if basics.rank() not in members:
            raise InvalidRequestError(
                f"rank {basics.rank()} is not in the process set {members} of the strategy; make the Trainer, or the "
                "Fabric, on members only"
            )
        return members

    @property
    def creates_processes_externally(self) -> bool:
        """Always: the launcher has started all processes."""
        return True

    @staticmethod
    def detect() -> bool:
        """Whether this process is a rank already."""
        return basics.is_initialized()

    def world_size(self) -> int:
        """The number of members."""
        return len(self.ranks())

    def global_rank(self) -> int:
        """The position of this process among the members."""
        return self.ranks().index(basics.rank())

    def local_rank(self) -> int:
        """The number of this process on its host."""
        self.ranks()
        return basics.local_rank()

    def node_rank(self) -> int:
        """The number of the host."""
        self.ranks()
        return basics.cross_rank()

    def set_world_size(self, size: int) -> None:
        """Does nothing: the launcher decides."""

    def set_global_rank(self, rank: int) -> None:
        """Does nothing: the launcher decides."""

    @functools.cached_property
    def _meeting_point(self) -> tuple[str, int]:
        """The host of the first member, and a port that is free there; all members ask for it together."""
        return broadcast_object(_free_port(), self.ranks()[0], "lightning.address", self.process_set)

    @property
    def main_address(self) -> str:
        """The host on which strategies of Lightning meet; our own need none."""
        return self._meeting_point[0]

    @property
    def main_port(self) -> int:
        """The port on which strategies of Lightning meet."""
        return self._meeting_point[1]


def _free_port() -> tuple[str, int]:
    """Another process may take the port before Lightning does; torch then says so."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
    host = "127.0.0.1" if basics.local_size() == basics.size() else socket.gethostname()
    return host, port


def tolerate_broken_mpi(environments: Any) -> None:
    """Let Lightning go on where mpi4py cannot load an MPI library.

    ``environments`` is Fabric's package of this name. Where a strategy is given by name, Lightning first looks for an
    environment, also for that of MPI. mpi4py then raises a RuntimeError, but Lightning expects an ImportError only.
    """
    detect = environments.MPIEnvironment.detect

    @functools.wraps(detect)
    def detect_or_pass() -> bool:
        try:
            return bool(detect())
        except RuntimeError as error:
            logger.debug("Lightning does not use MPI: %s", error)
            return False

    environments.MPIEnvironment.detect = staticmethod(detect_or_pass)
