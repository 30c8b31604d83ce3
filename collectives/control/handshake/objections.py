"""Pure: the reasons to refuse an authentic hello."""

from __future__ import annotations

from collections.abc import Collection

from collectives.api import PeerLostError, SettingsError
from collectives.control.handshake.hello import Hello

__all__ = ["OtherWorldError", "objection"]


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
