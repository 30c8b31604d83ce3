"""Pure: finds the settings that differ between the ranks of a job, though they must be the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

__all__ = ["brief", "disagreement"]

SHOWN_RANKS = 8
SHOWN_CHARACTERS = 200


def brief(value: str) -> str:
    """``value``, or its beginning and a digest when it is too long to show and to send around."""
    if len(value) <= SHOWN_CHARACTERS:
        return value
    return f"{value[:SHOWN_CHARACTERS]}... (SHA-256 {hashlib.sha256(value.encode()).hexdigest()[:16]})"


def disagreement(configurations: Sequence[Mapping[str, str]]) -> str | None:
    """For each rank, in order, name -> value: a text with the different values and their ranks; None when all agree."""
    names = dict.fromkeys(name for configuration in configurations for name in configuration)
    texts = [_difference(name, [each.get(name, "") for each in configurations]) for name in names]
    different = "; ".join(text for text in texts if text)
    return f"{different}; it must be the same on all ranks" if different else None


def _difference(name: str, values: Sequence[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    if len(ranks) == 1:
        return ""
    return f"{name} is " + " and ".join(f"{value!r} on {_list(some)}" for value, some in ranks.items())


def _list(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:SHOWN_RANKS]))
    more = f" and {len(ranks) - SHOWN_RANKS} more" if len(ranks) > SHOWN_RANKS else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"
