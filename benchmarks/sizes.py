"""Sizes in bytes, as text and as numbers, and how often a size is measured."""

from __future__ import annotations

import argparse

__all__ = ["label", "parse_size", "repeats_for"]

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


def repeats_for(nbytes: int, scale: float) -> int:
    """Rounds of ten calls, and one that is not timed: many for small tensors, a few for large ones."""
    return max(3, int(scale * (40 if nbytes <= 1 << 20 else 5)))
