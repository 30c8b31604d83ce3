"""The steps of an operation, such as copying and waiting, as timelines and profiles show them.

A method is only marked. While an observer listens, each object with marked methods gets timed ones in their place; at
other times nothing is different from a method without a mark. A profile is an observer, too: calls are its ranges.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial, wraps
from time import monotonic
from typing import Any, ParamSpec, TypeAlias, TypeVar


class Profiler:
    """The profiler of a framework.

    ``is_recording`` says whether a profile is recorded now, in any thread; it is called before each operation. The code
    within the context that ``named`` returns is a range of that name, on its thread.
    """

    __slots__ = ("is_recording", "named")

    def __init__(self) -> None:
        self.is_recording: Callable[[], bool] = bool
        self.named: Callable[[str], AbstractContextManager[object]] = nullcontext


PROFILER = Profiler()
"""That of this process."""


def register(is_recording: Callable[[], bool], named: Callable[[str], AbstractContextManager[object]]) -> None:
    """Use this profiler from now on: the attributes of :class:`Profiler`."""
    PROFILER.is_recording, PROFILER.named = is_recording, named


SHORT = {"BROADCAST": "BCAST"}
PARTS = {"copy in": "MEMCPY_IN_FUSION_BUFFER", "copy out": "MEMCPY_OUT_FUSION_BUFFER"}


@lru_cache(256)
def activity(operation: str, backend: str) -> str:
    """The work of ``backend`` for ``operation``, such as SHM_ALLREDUCE."""
    name = operation.upper()
    return f"{backend.upper()}_{SHORT.get(name, name)}"


@lru_cache(256)
def part(phase: str) -> str:
    """A phase inside of the backend."""
    return PARTS.get(phase) or phase.upper().replace(" ", "_")


Span: TypeAlias = tuple[str, float, float]
"""The name of a phase, its beginning and its end in seconds of ``time.monotonic()``."""
OnPhase: TypeAlias = Callable[[Span], object]


class Receiver:
    """Hands each span to ``take``, which its owner may replace at any time: another function for each batch.

    The timed methods hold the receiver and not the function, because to make them takes longer than a small batch.
    """

    __slots__ = ("take",)

    def __init__(self, take: OnPhase) -> None:
        self.take = take


P = ParamSpec("P")
R = TypeVar("R")
Method = TypeVar("Method", bound=Callable[..., object])

_MARK = "__phases__"
_WHOLE = ""


def phase(name: str) -> Callable[[Method], Method]:
    """Mark a method: each call is a phase called ``name``. The methods that override it are marked, too."""
    return _mark({_WHOLE: name})


def phases_in(**names: str) -> Callable[[Method], Method]:
    """Mark a method: each call of the function that is its argument ``key`` is a phase called ``names[key]``."""
    return _mark(names)


def _mark(names: Mapping[str, str]) -> Callable[[Method], Method]:
    def mark(method: Method) -> Method:
        setattr(method, _MARK, names)
        return method

    return mark


def time_phases(owner: object, receiver: Receiver | None, in_profile: bool = False) -> None:
    """Give each call of the marked methods of ``owner`` to ``receiver``; None ends that.

    With ``in_profile`` it is a range of the profile, too.
    """
    for name, marks in _marked(type(owner)).items():
        vars(owner).pop(name, None)
        if receiver is not None:
            setattr(owner, name, _timed_method(getattr(owner, name), marks, receiver, in_profile))


def _marked(kind: type) -> dict[str, Mapping[str, str]]:
    """The marks of each method of ``kind``; those of a base class hold where a class overrides the method."""
    found: dict[str, Mapping[str, str]] = {}
    for base in reversed(kind.__mro__):
        functions = {name: getattr(value, "__func__", value) for name, value in vars(base).items()}
        found |= {name: marks for name, value in functions.items() if (marks := getattr(value, _MARK, None))}
    return found


def _timed_method(
    method: Callable[..., Any], marks: Mapping[str, str], receiver: Receiver, in_profile: bool
) -> Callable[..., Any]:
    time = partial(_timed, receiver=receiver, in_profile=in_profile)
    if _WHOLE in marks:
        return wraps(method)(time(method, marks[_WHOLE]))
    signature = inspect.signature(method)

    @wraps(method)
    def with_timed_arguments(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments |= {key: time(bound.arguments[key], name) for key, name in marks.items()}
        return method(*bound.args, **bound.kwargs)

    return with_timed_arguments


def _timed(function: Callable[P, R], name: str, receiver: Receiver, in_profile: bool) -> Callable[P, R]:
    called = _in_range(function, part(name)) if in_profile else function

    # A large batch makes hundreds of these calls: there is nothing in it but the clock.
    def timed(*args: P.args, **kwargs: P.kwargs) -> R:
        begin = monotonic()
        try:
            return called(*args, **kwargs)
        finally:
            receiver.take((name, begin, monotonic()))

    return timed


def _in_range(function: Callable[P, R], label: str) -> Callable[P, R]:
    def within(*args: P.args, **kwargs: P.kwargs) -> R:
        with PROFILER.named(label):
            return function(*args, **kwargs)

    return within
