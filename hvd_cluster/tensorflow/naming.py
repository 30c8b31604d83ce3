"""The names of collectives in graphs, from the node that is built to the kernel that runs.

A node has its name as attributes, because transformations of a graph change the names of nodes: ``tensor_name``;
``node_name``, that of the node in the graph where it was built; and ``naming``, a :class:`Naming`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from enum import IntFlag
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary


class Naming(IntFlag):
    """GIVEN: ``tensor_name`` is the name.

    BY_PATH: the calls that lead to the node are a part of it, because a function may be called at several places.
    UNSCOPED: it has no name scopes.
    """

    GIVEN = 0
    BY_PATH = 1
    UNSCOPED = 2


class NamePlace(NamedTuple):
    """Where TensorFlow runs a node: ``path``, the calls, branches and loops around it, ends in a slash or is empty.

    ``depth`` is the number of loops.
    """

    path: str
    depth: int


_LOWERED = re.compile(r"(?<=/)_\d+/")
"""The number of a lowered function. TensorFlow counts them over the whole graph, so ranks may have different ones."""
_BODY = re.compile(r"/body/_\d+/")


def place_of(running: str, built: str) -> NamePlace:
    """The place of the node that was ``built`` under one name, and is ``running`` under another.

    TensorFlow puts the name of the node that calls a function, and a slash, before the names of the function's nodes.
    """
    path = running.removesuffix(built)
    if path == running or path[-1:] not in ("", "/"):
        return NamePlace("", 0)  # it has changed the name itself
    return NamePlace(_LOWERED.sub("", path), len(_BODY.findall(path)))


_FOREIGN = re.compile(r"[^a-zA-Z0-9_]")
CAPTURED = "captured"
_FOREIGN_IN_NODE = re.compile(r"[^A-Za-z0-9_.\\/>-]")
_unscoped_names: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()
"""How often each name without scopes is in a graph."""


def normalized(name: str) -> str:
    """``name`` with an underscore for everything that is no letter and no digit."""
    return _FOREIGN.sub("_", name)


def name_of_node(op: str, tensors: Sequence[Any], name: str | None) -> str:
    """What to call the node of an operation; TensorFlow adds a number if another node has that name."""
    if name:
        return _FOREIGN_IN_NODE.sub("_", name).lstrip("_/\\>-") or op
    ends = dict.fromkeys((_name_of(tensors[0]), _name_of(tensors[-1]))) if tensors else {}
    return "_".join([op, *ends])


def chosen(name: str | None, ignore_name_scope: bool, by_path: bool) -> Naming:
    """The rule for the name of a node. Without scopes, ranks may trace different functions."""
    is_own = bool(name) or ignore_name_scope
    scope = Naming.UNSCOPED if ignore_name_scope else Naming.GIVEN
    return scope | (Naming.BY_PATH if by_path or not is_own else Naming.GIVEN)


def attributes_of_name(graph: Any, label: str, naming: Naming) -> dict[str, Any]:
    """The attributes with the name of a node that ``graph`` is about to get, see :mod:`hvd_cluster.tensorflow.naming`.

    It is unique in the graph, as the name of a node is.
    """
    node = graph.unique_name(label, mark_as_used=False)
    name = _unique_in(graph, label) if Naming.UNSCOPED in naming else node
    return {"tensor_name": name, "node_name": node, "naming": int(naming)}


def _unique_in(graph: Any, label: str) -> str:
    counts = _unscoped_names.setdefault(graph, Counter())
    name = unscoped(label)
    counts[name] += 1
    return name if counts[name] == 1 else f"{name}_{counts[name] - 1}"


def _name_of(tensor: Any) -> str:
    """The name of a tensor that the graph captures is a number, which counts what this rank alone has done before."""
    try:
        name = tensor.name
    except AttributeError:  # a tensor of eager mode
        return CAPTURED
    return CAPTURED if unscoped(name).partition(":")[0].isdecimal() else normalized(name)


def unscoped(name: str) -> str:
    """``name`` without the scopes in front of it."""
    return name.rpartition("/")[2]
