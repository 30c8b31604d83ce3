"""Seeds of the generators of random numbers: another one on each rank, and the same ones in each run."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from operator import index

import numpy as np

from collectives import InvalidRequestError
from hvd_cluster.core import basics

_RANGE = 2**32
_ODD = 0x9E3779B1
"""A product with an odd number is another one for each rank, modulo a power of two."""


def seed_of(seed: int, rank: int | None) -> int:
    """The seed of a rank, below 2**32, another one for each rank; ``seed`` itself for None.

    With seed + rank, rank 1 of a run would repeat rank 0 of the run with the next seed. InvalidRequestError unless
    ``seed`` is an integer from 0 to 2**32 - 1, which is what NumPy takes.
    """
    try:
        number = index(seed)
    except TypeError:
        number = -1
    if not 0 <= number < _RANGE:
        raise InvalidRequestError(f"set_seed(seed={seed!r}) must be an integer from 0 to {_RANGE - 1}")
    if rank is None:
        return number
    mixed = int.from_bytes(hashlib.sha256(str(number).encode()).digest()[:4], "little")
    return (mixed + rank * _ODD) % _RANGE


def set_seed(seed: int, same: bool, framework: Callable[[int], object]) -> int:
    """Seed ``random``, NumPy and, by a call of ``framework``, a framework. Returns the seed of this rank.

    NotInitializedError before ``init()``, unless the seed is the ``same`` on all ranks.
    """
    own = seed_of(seed, None if same else basics.rank())
    random.seed(own)
    np.random.seed(own)
    framework(own)
    return own
