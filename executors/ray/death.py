"""Pure: how an actor ended, in a few words of Ray's long text."""

from __future__ import annotations

import re

__all__ = ["how"]

# Ray's explanation begins after the facts about the actor, each in a line "<tab>name: value".
DETAIL = re.compile(r"Worker exit detail: (.+?)(?:\. |\.?$)", re.MULTILINE)
FACT = re.compile(r"^\t\w+: ")
UNREACHABLE = re.compile(r"^The actor \S+ is unavailable: (.+?)\. The task may or may not", re.DOTALL)
LONGEST = 300


def how(error: BaseException) -> str:
    """The end of an actor from the ``error`` that Ray raises for its calls: it died, or cannot be reached."""
    unreachable = UNREACHABLE.match(str(error))
    if unreachable:
        return f"cannot be reached: {' '.join(unreachable[1].split())[:LONGEST]}"
    lines = [line for line in str(error).splitlines() if line and not FACT.match(line)]
    text = " ".join(line.strip() for line in lines[1:] or lines)
    detail = DETAIL.search(str(error))
    return f"died: {(detail[1] if detail else text)[:LONGEST]}"
