"""The votes of TCP groups in tests, and an operation of each kind to attempt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives.api import DType, ReduceOp
from collectives.backends.base import OffersVote, Vote
from collectives.backends.host import HostBackend
from collectives.backends.tcp.ballot import RIDING
from collectives.kernels.reduction import reduction

LENGTHS = pytest.mark.parametrize("length", [0, 5, RIDING // 8, RIDING // 8 + 1, 300_001], ids="{} int64".format)
NAMES = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier")


def vote_of(member: HostBackend) -> Vote:
    assert isinstance(member, OffersVote)
    vote = member.vote()
    assert vote is not None
    return vote


def nothing() -> None:
    return


def ignore(absent: list[int]) -> None:
    return


class Operations:
    """Each operation on ``length`` elements, with the destination as it was before, and its right result."""

    def __init__(self, member: HostBackend, length: int) -> None:
        self.member, self.rank, self.size, self.length = member, member.rank, member.size, length
        self.mine = np.arange(length) + self.rank
        self.all = [np.arange(length) + rank for rank in range(self.size)]
        self.result = np.full(0, -1)

    def expect(self, name: str) -> np.ndarray[Any, Any]:
        """Prepares the destination; returns its right content."""
        of_all = np.concatenate(self.all)
        expected = {
            "allreduce": sum(self.all),
            "allgather": of_all,
            "broadcast": self.all[1],
            "alltoall": of_all,
            "reducescatter": np.full(1, 0) if not self.length else sum(self.all),
            "barrier": self.mine[:0],
        }[name]
        self.result = np.full(len(expected), -1)
        return np.asarray(expected)

    def call(self, name: str) -> None:
        member, length, size = self.member, self.length, self.size
        counts, raw = [8 * length] * size, self.result.view(np.uint8)
        if name == "allreduce":
            member.allreduce_arrays([self.mine], [self.result], reduction(DType.INT64, ReduceOp.SUM))
        elif name == "allgather":
            member.allgather_bytes([self.mine.view(np.uint8)], np.array_split(raw, 3), counts)
        elif name == "broadcast":
            member.broadcast_bytes(self.mine.view(np.uint8), raw, 1)
        elif name == "alltoall":
            member.alltoall_bytes(np.tile(self.mine, size).view(np.uint8), raw, counts, counts)
        elif name == "barrier":
            member.wait_for_all()
        else:
            source = np.tile(self.mine, size) if length else np.zeros(size, np.int64)
            member.reducescatter_arrays(
                [source], [self.result], [max(length, 1)] * size, reduction(DType.INT64, ReduceOp.SUM)
            )
