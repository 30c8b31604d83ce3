"""Pure: the text of a flag -> its value. Each ValueError says which values are allowed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import Any

from collectives import LONGEST_SECONDS
from executors import SECONDS, Address, parse_host_list, parse_seconds

LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")
YES, NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
CORES = re.compile(r"\d+(,\d+)*", re.ASCII)


def text(given: str) -> str:
    """Any text but an empty one."""
    if not given.strip():
        raise ValueError("some text")
    return given


def count(given: str) -> int:
    """A number of things, at least one."""
    return _integer(given, 1, "an integer of at least 1")


def natural(given: str) -> int:
    """A number of things, or none."""
    return _integer(given, 0, "an integer of at least 0")


def port(given: str) -> int:
    """The number of a TCP port."""
    number = _integer(given, 1, "a port number, 1 to 65535")
    if number > 65535:
        raise ValueError("a port number, 1 to 65535")
    return number


def page(given: str) -> Address:
    """Where the live page is served."""
    return Address.parse(given)


def seconds(given: str) -> float:
    """A positive number of seconds."""
    try:
        return parse_seconds(given, "it")
    except ValueError:
        raise ValueError(SECONDS) from None


def duration(given: str) -> float:
    """A number of seconds, or 0 for never."""
    return _number(given, LONGEST_SECONDS, f"a number of seconds, at most {LONGEST_SECONDS}, or 0 for never")


def milliseconds(given: str) -> float:
    """A number of milliseconds."""
    most = LONGEST_SECONDS * 1000
    return _number(given, most, f"a number of milliseconds, 0 to {most}")


def fraction(given: str) -> float:
    """A number from 0 to 1."""
    return _number(given, 1.0, "a number from 0 to 1")


def names(given: str) -> tuple[str, ...]:
    """Names with commas between them."""
    found = tuple(name.strip() for name in given.split(","))
    if not all(found):
        raise ValueError("names with commas between them, such as eth0,eth1")
    return found


def words(given: str) -> tuple[str, ...]:
    """Words for a program, as a shell reads them."""
    try:
        return tuple(shlex.split(given))
    except ValueError as error:
        raise ValueError(f"arguments as in a shell; {error}") from None


def hosts(given: str) -> dict[str, int]:
    """Hosts with their slots, with commas between them."""
    try:
        return parse_host_list(given)
    except ValueError as error:
        raise ValueError(f"hosts with their slots, such as node1:4,node2:4; {error}") from None


def cores(given: str) -> str:
    """Numbers of cores with commas between them, one for each rank of a host."""
    if not CORES.fullmatch(given.strip()):
        raise ValueError("core numbers with commas between them, one for each rank of a host, such as 0,1")
    return given.strip()


def level(given: str) -> str:
    """A level of the log."""
    if given.upper() not in LEVELS:
        raise ValueError(f"one of: {', '.join(LEVELS)}")
    return given.upper()


def switch(given: str) -> bool:
    """Yes or no, in the words of YAML and of variables."""
    lower = given.strip().lower()
    if lower not in YES + NO:
        raise ValueError("true or false")
    return lower in YES


def _integer(given: str, least: int, allowed: str) -> int:
    if not given.isascii() or not given.isdigit() or int(given) < least:
        raise ValueError(allowed)
    return int(given)


def _number(given: str, most: float, allowed: str) -> float:
    try:
        value = float(given)
    except ValueError:
        raise ValueError(allowed) from None
    if "_" in given or not 0 <= value <= most:
        raise ValueError(allowed)
    return value


Parse = Callable[[str], Any]
