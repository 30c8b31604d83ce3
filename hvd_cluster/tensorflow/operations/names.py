"""The names of operations in graphs: they must be the same on all ranks, each time that a function is traced."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

__all__ = ["name_of_node", "normalized", "unscoped"]

_FOREIGN = re.compile(r"[^a-zA-Z0-9_]")
CAPTURED = "captured"
_FOREIGN_IN_NODE = re.compile(r"[^A-Za-z0-9_.\\/>-]")


def normalized(name: str) -> str:
    """``name`` with an underscore for everything that is no letter and no digit."""
    return _FOREIGN.sub("_", name)


def name_of_node(op: str, tensors: Sequence[Any], name: str | None) -> str:
    """What to call the node of an operation; TensorFlow adds a number if another node has that name."""
    if name:
        return _FOREIGN_IN_NODE.sub("_", name).lstrip("_/\\>-") or op
    ends = dict.fromkeys((_name_of(tensors[0]), _name_of(tensors[-1]))) if tensors else {}
    return "_".join([op, *ends])


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
