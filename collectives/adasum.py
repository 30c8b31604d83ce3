"""Adasum: combine gradients by how much they agree, over any backend.

Orthogonal vectors are added, parallel ones averaged, and everything between interpolates: for two vectors a and b::

    adasum(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b

More than two combine pairwise, in a tree. The exchange is vector-halving, distance-doubling: at each level a rank and
its partner split what they hold, so that each rank moves 2 S (n - 1) / n bytes in all and computes as little.

Source: Maleki, Musuvathi, Mytkowicz, Saarikivi, Xu, Eksarevskiy, Ekanayake, Barsoum, "Scaling Distributed Training with
Adaptive Summation", MLSys 2021, section 4 and algorithm 1 (https://arxiv.org/abs/2006.02924).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives.api import DType
from collectives.backends.base import Backend
from collectives.reduction import narrow, widen

__all__ = ["adasum"]

HALVES = frozenset({DType.FLOAT16, DType.BFLOAT16})
TINY = float(np.sqrt(np.finfo(np.float64).tiny))
CHUNK = 1 << 16

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]
Span = tuple[int, int]


@np.errstate(all="ignore")
def adasum(
    backend: Backend,
    sources: Sequence[Array],
    destinations: Sequence[Array],
    dtype: DType,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> None:
    """destinations[i] = postscale * adasum of the members' prescale * sources[i], for each i on its own.

    Flat arrays of floats in ``dtype.storage`` layout; the number of members is a power of two.
    ``destinations[i]`` may be ``sources[i]``. 16-bit floats are computed in float32; dot products and norms in float64.
    All members get the same bits. Raises what the backend raises.
    """
    vector = _pack(sources, dtype, prescale)
    ends = [0, *accumulate(len(source) for source in sources)]
    span, distance = (0, len(vector)), 1
    while distance < backend.size:
        span = _combine_level(backend, vector, list(pairwise(ends)), span, distance)
        distance *= 2
    _gather(backend, vector)
    if postscale != 1.0:
        np.multiply(vector, postscale, out=vector)
    for destination, (start, stop) in zip(destinations, pairwise(ends), strict=True):
        _unpack(vector[start:stop], destination, dtype)


def _pack(sources: Sequence[Array], dtype: DType, prescale: float) -> Array:
    wide = [widen(source, dtype) if dtype in HALVES else source for source in sources]
    vector = np.concatenate(wide)
    if prescale != 1.0:
        np.multiply(vector, prescale, out=vector)
    return vector


def _unpack(result: Array, destination: Array, dtype: DType) -> None:
    if dtype in HALVES:
        narrow(result, destination, dtype)
    else:
        destination[:] = result


def _halves(span: Span) -> tuple[Span, Span]:
    middle = span[0] + (span[1] - span[0]) // 2
    return (span[0], middle), (middle, span[1])


def _combine_level(backend: Backend, vector: Array, tensors: Sequence[Span], span: Span, distance: int) -> Span:
    """Exchange halves of ``span`` with the partner, combine the half that stays here, and return it."""
    is_lower = backend.rank & distance == 0
    keep, give = _halves(span) if is_lower else _halves(span)[::-1]
    received = _exchange(backend, backend.rank ^ distance, vector[slice(*give)], keep[1] - keep[0])
    mine = vector[slice(*keep)]
    lower, upper = (mine, received) if is_lower else (received, mine)
    parts = [_inside(tensor, keep) for tensor in tensors]
    products = _sum_products(backend, [_products(lower[a:b], upper[a:b]) for a, b in parts], distance)
    for (start, stop), product in zip(parts, products, strict=True):
        _merge(mine[start:stop], lower[start:stop], upper[start:stop], product)
    return keep


def _inside(tensor: Span, keep: Span) -> Span:
    """The part of ``tensor`` that lies in ``keep``, counted from its start."""
    start, stop = (min(max(end, keep[0]), keep[1]) - keep[0] for end in tensor)
    return start, stop


def _exchange(backend: Backend, partner: int, outgoing: Array, count: int) -> Array:
    incoming = np.empty(count, outgoing.dtype)
    send, receive = [0] * backend.size, [0] * backend.size
    send[partner], receive[partner] = outgoing.nbytes, incoming.nbytes
    backend.alltoall(outgoing.view(np.uint8), incoming.view(np.uint8), send, receive)
    return incoming


def _products(lower: Array, upper: Array) -> Float64:
    """lower.upper, |lower|^2 and |upper|^2."""
    totals = np.zeros(3)
    for first, second in _in_float64(lower, upper):
        totals += (first @ second, first @ first, second @ second)
    return totals


def _in_float64(lower: Array, upper: Array) -> Iterator[tuple[Float64, Float64]]:
    for start in range(0, len(lower), CHUNK):
        piece = slice(start, start + CHUNK)
        yield lower[piece].astype(np.float64), upper[piece].astype(np.float64)


def _sum_products(backend: Backend, products: Sequence[Float64], distance: int) -> Float64:
    """The products of whole vectors: summed, in rank order, over the ranks that hold parts of the same two."""
    own = np.array(products, np.float64).reshape(-1)
    everybody = np.empty(backend.size * own.size)
    backend.allgather([own.view(np.uint8)], [everybody.view(np.uint8)], [own.nbytes] * backend.size)
    first = backend.rank & ~(2 * distance - 1)
    total: Float64 = everybody.reshape(backend.size, -1, 3)[first : first + 2 * distance].sum(axis=0)
    return total


def _merge(out: Array, lower: Array, upper: Array, products: Float64) -> None:
    dot, lower_norm, upper_norm = products
    # The coefficients are float64 scalars of NumPy, which would widen the arrays; Python's floats do not.
    from_lower = float(1.0 - dot / (2.0 * lower_norm)) if lower_norm >= TINY else 1.0
    from_upper = float(1.0 - dot / (2.0 * upper_norm)) if upper_norm >= TINY else 1.0
    first = np.multiply(lower, from_lower)
    np.add(first, np.multiply(upper, from_upper), out=out)


def _gather(backend: Backend, vector: Array) -> None:
    """Every rank has one span of the result: put all together."""
    spans = [_final_span(len(vector), rank, backend.size) for rank in range(backend.size)]
    parts = [vector[slice(*span)].view(np.uint8) for span in spans]
    backend.allgather([parts[backend.rank]], parts, [part.nbytes for part in parts])


def _final_span(total: int, rank: int, size: int) -> Span:
    span, distance = (0, total), 1
    while distance < size:
        span = _halves(span)[rank & distance != 0]
        distance *= 2
    return span
