"""The names of collectives in graphs, from the node that is built to the kernel that runs.

A node has its name as attributes, because transformations of a graph change the names of nodes: ``tensor_name``;
``node_name``, that of the node in the graph where it was built; and ``naming``, a :class:`Naming`.
"""

from __future__ import annotations

import re
from enum import IntFlag
from typing import NamedTuple

__all__ = ["Naming", "Place", "place_of"]


class Naming(IntFlag):
    """GIVEN: ``tensor_name`` is the name.

    BY_PATH: the calls that lead to the node are a part of it, because a function may be called at several places.
    UNSCOPED: it has no name scopes.
    """

    GIVEN = 0
    BY_PATH = 1
    UNSCOPED = 2


class Place(NamedTuple):
    """Where TensorFlow runs a node: ``path``, the calls, branches and loops around it, ends in a slash or is empty.

    ``depth`` is the number of loops.
    """

    path: str
    depth: int


_LOWERED = re.compile(r"(?<=/)_\d+/")
"""The number of a lowered function. TensorFlow counts them over the whole graph, so ranks may have different ones."""
_BODY = re.compile(r"/body/_\d+/")


def place_of(running: str, built: str) -> Place:
    """The place of the node that was ``built`` under one name, and is ``running`` under another.

    TensorFlow puts the name of the node that calls a function, and a slash, before the names of the function's nodes.
    """
    path = running.removesuffix(built)
    if path == running or path[-1:] not in ("", "/"):
        return Place("", 0)  # it has changed the name itself
    return Place(_LOWERED.sub("", path), len(_BODY.findall(path)))
