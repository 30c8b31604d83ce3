"""The channel of a rank to the others: the handshake of rank 0, or of another rank."""

from __future__ import annotations

from collectives.api import PeerLostError, Store
from collectives.control.handshake.center import admit_members
from collectives.control.handshake.connected import Connected, Offer
from collectives.control.handshake.entries import Entries
from collectives.control.handshake.hello import LocalEnd
from collectives.control.handshake.member import join_center
from collectives.control.handshake.notes import EndWatch
from collectives.control.handshake.starts import Starts
from collectives.planning.process_sets import ProcessSets

__all__ = ["connect_channel"]


def connect_channel(
    end: LocalEnd, store: Store, process_sets: ProcessSets, offer: Offer, starts: Starts | None = None
) -> Connected:
    """Connect to the other ranks of the world, which find each other in ``store``, that of their job.

    ``offer`` is called once. ``starts`` holds what this process knows about earlier starts. Raises
    CollectiveTimeoutError that names the missing ranks, PeerLostError, SettingsError when the ranks were started in
    different ways, what ``offer`` raises on any rank, and the error that the attempt was aborted with.
    """
    entries = Entries(end.hello, store, starts or Starts())
    try:
        if end.hello.rank == 0:
            return admit_members(end, entries, offer, EndWatch(store))
        return join_center(end, entries, process_sets, offer)
    except PeerLostError as error:
        if type(error) is PeerLostError:
            raise
        # A launcher knows the lost rank as the cause by the printed name of this class; subclasses stay in this folder.
        raise PeerLostError(str(error), error.ranks, error.hosts) from error
