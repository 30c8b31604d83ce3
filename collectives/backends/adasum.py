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
from collectives.backends.host import HostBackend
from collectives.kernels.reduction import narrow, scale_array, widen
from collectives.kernels.segments import Segments

__all__ = ["adasum"]

HALVES = frozenset({DType.FLOAT16, DType.BFLOAT16})
TINY = float(np.sqrt(np.finfo(np.float64).tiny))
CHUNK = 1 << 16
PIECE = 1 << 22
"""Bytes of one exchange with the partner: two buffers of this size are all that is needed beside the destinations."""

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]
Span = tuple[int, int]


class _Plane:
    """The memory of a long vector's elements from ``start`` on."""

    def __init__(self, arrays: Sequence[Array], start: int) -> None:
        self._elements = Segments(arrays)
        self._start = start

    def parts(self, span: Span) -> list[Array]:
        """The arrays that make up ``span``: views, and at least one, if empty."""
        return self._elements.parts(span[0] - self._start, span[1] - self._start)

    def read(self, start: int, stop: int) -> Array:
        """Not to be written to. Not empty."""
        return self._elements.gather(start - self._start, stop - self._start)

    def write(self, start: int, values: Array) -> None:
        self._elements.write(start - self._start, values)


class _Vector:
    """A long vector in ``dtype.storage`` layout, to be multiplied by ``factor``."""

    def __init__(self, planes: Sequence[_Plane], dtype: DType, factor: float = 1.0) -> None:
        self.planes = planes
        self._dtype = dtype
        self._factor = factor

    def like(self, planes: Sequence[_Plane]) -> _Vector:
        """A vector of the same kind in other memory."""
        return type(self)(planes, self._dtype, self._factor)

    def load(self, start: int, stop: int) -> Array:
        """The numbers that are meant, not to be written to; 16-bit floats as float32. Not empty."""
        piece = self.planes[0].read(start, stop)
        wide = widen(piece, self._dtype) if self._dtype in HALVES else piece
        return wide if self._factor == 1.0 else np.multiply(wide, self._factor)

    def store(self, start: int, values: Array) -> None:
        """Of a vector without a factor."""
        if self._dtype in HALVES:
            rounded = np.empty(values.size, self._dtype.storage)
            narrow(values, rounded, self._dtype)
            values = rounded
        self.planes[0].write(start, values)


class _SplitVector(_Vector):
    """A long vector of float32, whose upper 16 bits lie in one plane and whose lower ones in another."""

    def load(self, start: int, stop: int) -> Array:
        upper, lower = (plane.read(start, stop) for plane in self.planes)
        bits = upper.astype(np.uint32)
        bits <<= 16
        bits |= lower
        return bits.view(np.float32)

    def store(self, start: int, values: Array) -> None:
        bits = values.view(np.uint32)
        self.planes[0].write(start, (bits >> 16).astype(np.uint16))
        self.planes[1].write(start, bits.astype(np.uint16))


@np.errstate(all="ignore")
def adasum(
    backend: HostBackend,
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

    Everything happens in the destinations. What a partner sends lies where those elements were that it has been given;
    so there is room for float32 in place of 16-bit floats, of which a member keeps no more than half.
    """
    if backend.size == 1:
        for source, destination in zip(sources, destinations, strict=True):
            scale_array(source, destination, dtype, prescale * postscale)
        return
    ends = [0, *accumulate(len(source) for source in sources)]
    result = _Vector([_Plane(destinations, 0)], dtype)
    held, room, span, distance = _Vector([_Plane(sources, 0)], dtype, prescale), result, (0, ends[-1]), 1
    while distance < backend.size:
        received, span = _exchange_level(backend, held, room, ends[-1], span, distance)
        lower, upper = (received, held) if backend.rank & distance else (held, received)
        parts = [_inside(tensor, span) for tensor in pairwise(ends)]
        products = _sum_products(backend, [_products(lower, upper, part) for part in parts], distance)
        is_last = 2 * distance == backend.size
        out = result if is_last else _working(result, received, dtype, span) if distance == 1 else held
        for part, product in zip(parts, products, strict=True):
            _merge(out, lower, upper, part, product, postscale if is_last else 1.0)
        held = room = out
        distance *= 2
    _gather(backend, result, ends[-1])


def _working(result: _Vector, received: _Vector, dtype: DType, span: Span) -> _Vector:
    """Where the levels before the last leave what they computed: in float32 at least."""
    if dtype not in HALVES:
        return result
    memory = [vector.planes[0].parts(span) for vector in (result, received)]
    return _SplitVector([_Plane([part.view(np.uint16) for part in parts], span[0]) for parts in memory], DType.FLOAT32)


def _halves(span: Span) -> tuple[Span, Span]:
    middle = span[0] + (span[1] - span[0]) // 2
    return (span[0], middle), (middle, span[1])


def _exchange_level(
    backend: HostBackend, held: _Vector, room: _Vector, total: int, span: Span, distance: int
) -> tuple[_Vector, Span]:
    """Exchange halves of ``span`` with the partner: what it has of the half that stays here, and that half.

    The partner's lies in ``room`` in place of what it was given, of which it may be one element more.
    """
    keep, give = _halves(span) if backend.rank & distance == 0 else _halves(span)[::-1]
    counts, longest = (give[1] - give[0], keep[1] - keep[0]), -(-total // (2 * distance))
    planes = []
    for source, target in zip(held.planes, room.planes, strict=True):
        outgoing, landing = source.parts(give), target.parts(give)
        landing.append(np.empty(1, landing[0].dtype))
        _exchange(backend, backend.rank ^ distance, Segments(outgoing), Segments(landing), counts, longest)
        planes.append(_Plane(landing, keep[0]))
    return held.like(planes), keep


def _exchange(
    backend: HostBackend, partner: int, outgoing: Segments, landing: Segments, counts: tuple[int, int], longest: int
) -> None:
    """Swap piece by piece, because both may be the same memory; as often on all ranks, for which ``longest`` serves."""
    sample = landing.parts(0, 0)[0]
    step = PIECE // sample.itemsize
    sent, received = (np.empty(min(step, longest), sample.dtype) for _ in range(2))
    for start in range(0, longest, step):
        leaving, coming = (sent[: max(0, counts[0] - start)], received[: max(0, counts[1] - start)])
        outgoing.read(start, leaving)
        send, receive = [0] * backend.size, [0] * backend.size
        send[partner], receive[partner] = leaving.nbytes, coming.nbytes
        backend.alltoall_bytes(leaving.view(np.uint8), coming.view(np.uint8), send, receive)
        landing.write(start, coming)


def _inside(tensor: Span, keep: Span) -> Span:
    """The part of ``tensor`` that lies in ``keep``."""
    start, stop = (min(max(end, keep[0]), keep[1]) for end in tensor)
    return start, stop


def _chunks(span: Span) -> Iterator[Span]:
    for start in range(*span, CHUNK):
        yield start, min(start + CHUNK, span[1])


def _products(lower: _Vector, upper: _Vector, span: Span) -> Float64:
    """lower.upper, |lower|^2 and |upper|^2."""
    totals = np.zeros(3)
    for chunk in _chunks(span):
        first, second = lower.load(*chunk).astype(np.float64), upper.load(*chunk).astype(np.float64)
        totals += (first @ second, first @ first, second @ second)
    return totals


def _sum_products(backend: HostBackend, products: Sequence[Float64], distance: int) -> Float64:
    """The products of whole vectors: summed, in rank order, over the ranks that hold parts of the same two."""
    own = np.array(products, np.float64).reshape(-1)
    everybody = np.empty(backend.size * own.size)
    backend.allgather_bytes([own.view(np.uint8)], [everybody.view(np.uint8)], [own.nbytes] * backend.size)
    first = backend.rank & ~(2 * distance - 1)
    total: Float64 = everybody.reshape(backend.size, -1, 3)[first : first + 2 * distance].sum(axis=0)
    return total


def _merge(out: _Vector, lower: _Vector, upper: _Vector, span: Span, products: Float64, scale: float) -> None:
    dot, lower_norm, upper_norm = products
    # The coefficients are float64 scalars of NumPy, which would widen the arrays; Python's floats do not.
    from_lower = float(1.0 - dot / (2.0 * lower_norm)) if lower_norm >= TINY else 1.0
    from_upper = float(1.0 - dot / (2.0 * upper_norm)) if upper_norm >= TINY else 1.0
    for start, stop in _chunks(span):
        total = np.multiply(lower.load(start, stop), from_lower)
        np.add(total, np.multiply(upper.load(start, stop), from_upper), out=total)
        out.store(start, total if scale == 1.0 else np.multiply(total, scale, out=total))


def _gather(backend: HostBackend, result: _Vector, total: int) -> None:
    """Every rank has one span of the result: put all together."""
    spans = [_final_span(total, rank, backend.size) for rank in range(backend.size)]
    parts = [[part.view(np.uint8) for part in result.planes[0].parts(span)] for span in spans]
    counts = [sum([part.size for part in of_rank]) for of_rank in parts]
    backend.allgather_bytes(parts[backend.rank], [part for of_rank in parts for part in of_rank], counts)


def _final_span(total: int, rank: int, size: int) -> Span:
    span, distance = (0, total), 1
    while distance < size:
        span = _halves(span)[rank & distance != 0]
        distance *= 2
    return span
