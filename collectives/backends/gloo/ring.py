"""The reductions that Gloo's ring computes exactly as :mod:`collectives.kernels.reduction` describes them.

Gloo itself rounds a 16-bit sum at each hop, refuses int16, and drops NaN from MIN and MAX or keeps it, depending on the
place in the ring.
"""

from __future__ import annotations

from collections.abc import Mapping

from collectives.api import DType, ReduceOp

__all__ = ["GLOO_NAMES", "is_exact"]

GLOO_NAMES: Mapping[ReduceOp, str] = {ReduceOp.SUM: "SUM", ReduceOp.PRODUCT: "PRODUCT"}
"""Gloo's names of the reductions, in all of its bindings."""

_DTYPES = frozenset({"uint8", "int8", "int32", "int64", "float32", "float64"})


def is_exact(dtype: DType, op: ReduceOp) -> bool:
    """Whether Gloo's ring may do ``op`` on elements of ``dtype``."""
    return dtype.label in _DTYPES and op in GLOO_NAMES
