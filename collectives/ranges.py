"""Ranges in the profile of a framework, whose binding registers the profiler. Without a profile nothing is done."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

__all__ = ["named", "recording", "register"]


class _Profiler(NamedTuple):
    is_recording: Callable[[], bool]
    named: Callable[[str], AbstractContextManager[object]]


_registered = [_Profiler(lambda: False, nullcontext)]


def register(is_recording: Callable[[], bool], named: Callable[[str], AbstractContextManager[object]]) -> None:
    """Use this profiler from now on.

    ``is_recording`` says whether a profile is recorded now, in any thread; it must be cheap. The code within the
    context that ``named`` returns is a range of that name, on its thread.
    """
    _registered[0] = _Profiler(is_recording, named)


def recording() -> bool:
    """Whether a profile is recorded now."""
    return _registered[0].is_recording()


def named(name: str) -> AbstractContextManager[object]:
    """The code within is a range called ``name``."""
    return _registered[0].named(name)
