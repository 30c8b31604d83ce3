"""A large group of single members in stages: *blocks* of members take the place of hosts.

A member of P is connected to those of its block and to those of its column only, which are some 2 sqrt(P). A column
that is large itself is a grid in turn, so no member has more than MOST_LINKED - 1 connections at a level, and there are
as many levels as P has digits to the base of MOST_LINKED. The flat backend, which an alltoall needs, and an average of
integers, connects members when they exchange data for the first time. For P = B L members, in B blocks of length L, the
steps one after the other, and the bytes that a member sends:

=============  ==========  =================
operation      steps       bytes
=============  ==========  =================
allreduce      4           2 S (P - 1) / P
reducescatter  2           S (P - 1) / P, or twice as many where blocks differ in length, and for few
allgather      3           about P times its own
broadcast      log2 P + 1  S log2 P at the root
vote           3           2 L + B frames at most
=============  ==========  =================

The members agree as those of several hosts do: each block first, then the blocks by their leaders.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

from collectives.api import Parameters, override
from collectives.backends import base
from collectives.backends.base import Group
from collectives.backends.hierarchical.backend import HierarchicalBackend


class GridBackend(HierarchicalBackend):
    """A member of a large ``group``; ``local`` has the members of its block, and ``cross`` those of its column."""

    name = "tcp"

    @classmethod
    @override
    def divide(cls, group: Group) -> list[list[int]]:
        return blocks(group.size, base.MOST_LINKED)

    @override
    def adopt(self, parameters: Parameters) -> None:
        """The variables that switch stages off mean those of hosts."""
        super().adopt(replace(parameters, hierarchical_allreduce=True, hierarchical_allgather=True))


def blocks(size: int, most: int) -> list[list[int]]:
    """The positions of ``size`` members in each block: consecutive ones, ``most`` at most.

    The lengths differ by one where no length divides ``size`` that is near enough to its square root.
    """
    count = -(-size // _length(size, most))
    ends = [size * block // count for block in range(count + 1)]
    return [list(range(start, end)) for start, end in pairwise(ends)]


def _length(size: int, most: int) -> int:
    root = min(most, math.isqrt(size - 1) + 1)
    exact = [length for length in range(root // 2 + 1, min(most, 2 * root) + 1) if size % length == 0]
    return min(exact, key=lambda length: abs(length - root), default=root)
