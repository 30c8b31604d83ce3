"""Sizes in bytes, as text and as numbers, and how often a size is measured."""

from __future__ import annotations

import argparse
from typing import NamedTuple

__all__ = ["Turns", "label", "parse_size", "turns_for"]

LARGE = 16 << 20


class Turns(NamedTuple):
    """``rounds`` in which each side has its turn: a row of ``calls``."""

    rounds: int
    calls: int


SUFFIXES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes of "32", "64K" or "1M"; a multiple of 4, since the elements are float32."""
    unit = SUFFIXES.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    if not digits.isdigit() or not int(digits) or int(digits) * unit % 4:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; give a multiple of 4 such as 32, 64K or 1M")
    return int(digits) * unit


def label(nbytes: int) -> str:
    """The opposite of :func:`parse_size`."""
    for suffix, unit in reversed(SUFFIXES.items()):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {suffix}B"
    return f"{nbytes} B"


def turns_for(nbytes: int, scale: float) -> Turns:
    """Long rows for small tensors. After a change of sides, ranks that share cores are slow for some 10 ms."""
    if nbytes < LARGE:
        return Turns(max(5, int(scale * 10)), 100 if nbytes < 1 << 20 else 40)
    return Turns(max(3, int(scale * 5)), 5)
