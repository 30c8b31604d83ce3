"""Checks of the arguments of launchers, before anything is started.

Each error names the argument, its value and the values that are allowed.
"""

from __future__ import annotations

import math
import operator
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Real
from typing import Any, SupportsIndex, TypeVar, cast

from collectives import ENVIRONMENT_SECRET, LONGEST_SECONDS
from executors.api import Slot
from executors.job.environment import COURSE

T = TypeVar("T")

SECONDS = f"a positive number of seconds, at most {LONGEST_SECONDS}"
"""The values of a timeout that are allowed, for error messages."""

RESERVED = frozenset(Slot("", 0, 1, 0, 1, 0, 1).environment()) | {
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
    "HOROVOD_ELASTIC",
    "HOROVOD_NEWCOMER",
    "HOROVOD_ROUND",
    "HOROVOD_WORKER_ID",
    COURSE,
    ENVIRONMENT_SECRET,
}
"""The variables that place a worker in its job."""


def check_arguments(args: object, kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments of a function, None for none. Raises TypeError."""
    positional, keywords = () if args is None else args, {} if kwargs is None else kwargs
    if isinstance(positional, str | bytes) or not isinstance(positional, Sequence):
        raise TypeError(
            f"args is {args!r}, but must be a list or tuple of the positional arguments, such as ({args!r},)"
        )
    if not isinstance(keywords, Mapping) or not all(isinstance(name, str) for name in keywords):
        raise TypeError(f"kwargs is {kwargs!r}, but must be a dict of the keyword arguments by name")
    return tuple(positional), dict(keywords)


def check_variables(variables: object, argument: str, launcher: str) -> dict[str, str]:
    """Variables for the environment of workers, None for none. Raises ValueError, also if ``launcher`` sets one."""
    entries = {} if variables is None else variables
    if not isinstance(entries, Mapping):
        raise ValueError(f"{argument} is {variables!r}, but must be a dict of variables and their values")
    for name, value in entries.items():
        if not _is_variable(name, value):
            raise ValueError(
                f"{argument} has {name!r}: {value!r}, but names and values must be strings, the name not empty and "
                "without '=', and both without a zero character"
            )
    taken = sorted(RESERVED.intersection(entries))
    if taken:
        raise ValueError(f"{argument} has {', '.join(taken)}, which {launcher} sets; leave them out")
    return dict(entries)


def _is_variable(name: object, value: object) -> bool:
    if not isinstance(name, str) or not isinstance(value, str) or not name or "=" in name:
        return False
    try:
        return b"\0" not in os.fsencode(name) + os.fsencode(value)
    except UnicodeEncodeError:
        return False


def check_integer(value: object, argument: str, least: int) -> int:
    """A count, of any type that is an integer to Python, such as NumPy's. Raises ValueError."""
    try:
        number = None if isinstance(value, bool) else operator.index(cast("SupportsIndex", value))
    except TypeError:
        number = None
    if number is None or number < least:
        raise ValueError(f"{argument} is {value!r}, but must be an integer of at least {least}")
    return number


def check_seconds(value: object, argument: str) -> float:
    """A timeout, of any type that is a real number to Python, such as NumPy's. Raises ValueError."""
    try:
        seconds = float(value) if isinstance(value, Real) and not isinstance(value, bool) else 0.0
    except OverflowError:
        seconds = math.inf
    if not 0 < seconds <= LONGEST_SECONDS:
        raise ValueError(f"{argument} is {value!r}, but must be {SECONDS}")
    return seconds


def parse_seconds(text: str, variable: str) -> float:
    """A timeout from the environment. Raises ValueError."""
    try:
        return check_seconds(float(text), variable)
    except ValueError:
        raise ValueError(f"{variable} is {text!r}, but must be {SECONDS}") from None


def resolve_seconds(seconds: object, argument: str, variable: str, default: float) -> float:
    """A timeout: ``seconds``, or else that of the environment, or else ``default``. Raises ValueError."""
    if seconds is not None:
        return check_seconds(seconds, argument)
    text = os.environ.get(variable, "").strip()
    return parse_seconds(text, variable) if text else default


def refuse_mpi(use_mpi: object, use_gloo: object, mpi_args: object, name: str) -> None:
    """Raise ValueError if one of the arguments of Horovod asks for MPI; ``name`` is that of ``mpi_args``."""
    if use_mpi or mpi_args or use_gloo is False:
        raise ValueError(f"workers find each other without MPI; leave out use_mpi and {name}, and use_gloo=False")


def renamed(name: str, value: T | None, old_name: str, old_value: T | None) -> T | None:
    """The value of an argument that also has an old name, which warns. Raises ValueError if both are given."""
    if old_value is None:
        return value
    if value is not None:
        raise ValueError(
            f"{name}={value!r} and its old name {old_name}={old_value!r} are both given; leave {old_name} out"
        )
    warnings.warn(f"{old_name} is the old name of {name}; use {name}", DeprecationWarning, stacklevel=3)
    return old_value


def interface_names(nics: Iterable[str] | str | None) -> tuple[str, ...]:
    """One name of a network interface, several, or none, as a tuple; a set is sorted.

    Raises ValueError for an impossible name.
    """
    names = (nics,) if isinstance(nics, str) or not isinstance(nics, Iterable | None) else tuple(nics or ())
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"nics is {nics!r}, but must be names of network interfaces, such as ['eth0']")
    return tuple(sorted(names)) if isinstance(nics, Set) else names
