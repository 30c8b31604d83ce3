"""Open files on their way into a process that ``multiprocessing`` starts, such as a worker of a ``DataLoader``."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing import context, reduction
from typing import Any

__all__ = ["received", "sent"]


def sent(descriptors: Sequence[int]) -> list[Any]:
    """Objects to pickle instead of ``descriptors``; the started process passes them to :func:`received`.

    Raises TypeError if no process is being started.
    """
    if context.get_spawning_popen() is None:
        raise TypeError(
            "a shard cannot be pickled: its rows are in open files of this process; only processes that this one "
            "starts can share them, such as those of DataLoader(shard, num_workers=2)"
        )
    return [reduction.DupFd(descriptor) for descriptor in descriptors]


def received(descriptors: Sequence[Any]) -> list[int]:
    """The descriptors in this process, where they stay open until it ends."""
    return [descriptor.detach() for descriptor in descriptors]
