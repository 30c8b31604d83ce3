"""Lists of tensors are matched by position. An error about one of them also names the variable that it belongs to."""

from __future__ import annotations

import re
from collections.abc import Sequence

from collectives.api import MismatchError

__all__ = ["about", "with_variable"]

_POSITION = re.compile(r"(?:\[(\d+)\]|\.(\d+))$")


def with_variable(error: MismatchError, names: Sequence[str]) -> MismatchError:
    """``error``, with the one of ``names`` that is at the position of its tensor."""
    return type(error)(f"{error}{about(error, names)}", error.tensor, error.property, error.values)


def about(error: MismatchError, names: Sequence[str]) -> str:
    """The end of a message: the name of the variable at the position of the tensor; empty if it has no position."""
    found = _POSITION.search(error.tensor)
    position = int(found[1] or found[2]) if found else len(names)
    return f". It is the variable {names[position]!r} of this rank" if position < len(names) else ""
