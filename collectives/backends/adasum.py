"""Adasum: combine gradients by how much they agree, over any backend and any device.

Orthogonal vectors are added, parallel ones averaged, and everything between interpolates: for two vectors a and b::

    adasum(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b

More than two combine pairwise, in a tree. The exchange is vector-halving, distance-doubling: at each level a rank and
its partner split their data, so that each rank moves 2 S (n - 1) / n bytes in all and computes on as many.

Source: Maleki, Musuvathi, Mytkowicz, Saarikivi, Xu, Eksarevskiy, Ekanayake, Barsoum, "Scaling Distributed Training with
Adaptive Summation", MLSys 2021, section 4 and algorithm 1 (https://arxiv.org/abs/2006.02924).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import sqrt

from collectives.api import DType
from collectives.backends.base import Backend
from collectives.backends.completion import Completion
from collectives.backends.memory import Floats, Memory
from collectives.buffers import Buffer
from collectives.kernels.segments import Plane, Span, runs

HALVES = frozenset({DType.FLOAT16, DType.BFLOAT16})
TINY = sqrt(sys.float_info.min)
PIECE = 1 << 22
"""Bytes of one exchange with the partner: the algorithm needs two buffers of this size beside the destinations."""

Products = tuple[float, float, float]


class _Vector:
    """A long vector of floats, to be multiplied by ``factor``; two planes are the halves of float32."""

    def __init__(self, planes: Sequence[Plane], factor: float = 1.0) -> None:
        self.planes = planes
        self.factor = factor

    def floats(self, span: Span, factor: float = 1.0) -> Floats:
        """``factor`` times the floats of ``span``, which lies in one buffer of each plane."""
        return Floats(tuple(plane.part(span) for plane in self.planes), self.factor * factor)


def adasum(
    backend: Backend,
    sources: Sequence[Buffer],
    destinations: Sequence[Buffer],
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Completion:
    """destinations[i] = postscale * adasum of the members' prescale * sources[i], for each i on its own.

    Buffers of one dtype of floats; the number of members is a power of two. ``destinations[i]`` may be ``sources[i]``.
    16-bit floats are computed in float32; dot products and norms in float64. All members get the same bits. Raises what
    the backend raises. Waits for the products of each level; the rest may be over later.

    All work happens in the destinations. The elements from a partner replace those that were sent to it. So there is
    room for float32 in place of 16-bit floats, because a member keeps no more than half of them.
    """
    size = backend.group.size
    sources, destinations = _flat(sources), _flat(destinations)
    if size == 1:
        for source, destination in zip(sources, destinations, strict=True):
            backend.memory.scale(source, destination, prescale * postscale)
        return backend.memory.fence()
    ends = [0, *accumulate(source.count for source in sources)]
    result = _Vector([Plane(destinations, 0)])
    held, room, span, distance = _Vector([Plane(sources, 0)], prescale), result, (0, ends[-1]), 1
    while distance < size:
        received, span = _exchange_level(backend, held, room, ends[-1], span, distance)
        lower, upper = (received, held) if backend.group.position & distance else (held, received)
        parts = [_inside(tensor, span) for tensor in pairwise(ends)]
        products = _sum_products(backend, [_products(backend.memory, lower, upper, part) for part in parts], distance)
        is_last = 2 * distance == size
        out = result if is_last else _working(result, received, span) if distance == 1 else held
        for part, product in zip(parts, products, strict=True):
            _merge(backend.memory, out, lower, upper, part, product, postscale if is_last else 1.0)
        held = room = _Vector(out.planes)
        distance *= 2
    return _gather(backend, destinations, ends[-1])


def _flat(buffers: Sequence[Buffer]) -> list[Buffer]:
    return [buffer.part(0, buffer.count) for buffer in buffers]


def _working(result: _Vector, received: _Vector, span: Span) -> _Vector:
    """The memory for the results of the levels before the last: in float32 at least."""
    memory = [vector.planes[0].parts(span) for vector in (result, received)]
    if memory[0][0].dtype not in HALVES:
        return result
    return _Vector([Plane([part.cast(DType.INT16) for part in parts], span[0]) for parts in memory])


def _halves(span: Span) -> tuple[Span, Span]:
    middle = span[0] + (span[1] - span[0]) // 2
    return (span[0], middle), (middle, span[1])


def _exchange_level(
    backend: Backend, held: _Vector, room: _Vector, total: int, span: Span, distance: int
) -> tuple[_Vector, Span]:
    """Exchange halves of ``span`` with the partner; returns its elements of the half kept here, and that half.

    The partner's elements replace, in ``room``, those that were sent to it; there may be one more of them.
    """
    position = backend.group.position
    keep, give = _halves(span) if position & distance == 0 else _halves(span)[::-1]
    longest = -(-total // (2 * distance))
    planes = []
    for source, target in zip(held.planes, room.planes, strict=True):
        landing = target.parts(give)
        landing.append(backend.memory.empty(landing[0].dtype, (1,)))
        plane = Plane(landing, keep[0])
        _exchange(backend, position ^ distance, (source, give), (plane, keep), longest)
        planes.append(plane)
    return _Vector(planes, held.factor), keep


def _exchange(
    backend: Backend, partner: int, outgoing: tuple[Plane, Span], incoming: tuple[Plane, Span], longest: int
) -> None:
    """Swap in pieces, because both may be the same memory; ``longest`` makes their number equal on all ranks."""
    (source, give), (target, keep) = outgoing, incoming
    dtype, size = target.parts((keep[0], keep[0]))[0].dtype, backend.group.size
    step = PIECE // dtype.itemsize
    sent, received = (backend.memory.empty(dtype, (min(step, longest),)) for _ in range(2))
    for start in range(0, longest, step):
        leaving, coming = _clip(give, start, step), _clip(keep, start, step)
        _copy_out(backend.memory, source, leaving, sent)
        send, receive = [0] * size, [0] * size
        send[partner], receive[partner] = (_length(span) * dtype.itemsize for span in (leaving, coming))
        backend.alltoall(sent.part(0, _length(leaving)), received.part(0, _length(coming)), send, receive)
        _copy_in(backend.memory, received, target, coming)


def _copy_out(memory: Memory, plane: Plane, span: Span, target: Buffer) -> None:
    """Copy the elements of ``span`` to the beginning of ``target``."""
    for start, stop in runs(span, plane.cuts(span)):
        memory.copy(plane.part((start, stop)), target.part(start - span[0], stop - span[0]))


def _copy_in(memory: Memory, source: Buffer, plane: Plane, span: Span) -> None:
    """Copy the beginning of ``source`` to ``span``."""
    for start, stop in runs(span, plane.cuts(span)):
        memory.copy(source.part(start - span[0], stop - span[0]), plane.part((start, stop)))


def _length(span: Span) -> int:
    return span[1] - span[0]


def _clip(span: Span, start: int, step: int) -> Span:
    """At most ``step`` elements of ``span``, from its element number ``start`` on."""
    first = min(span[0] + start, span[1])
    return first, min(first + step, span[1])


def _inside(tensor: Span, keep: Span) -> Span:
    """The part of ``tensor`` that lies in ``keep``."""
    start, stop = (min(max(end, keep[0]), keep[1]) for end in tensor)
    return start, stop


def _common_runs(span: Span, *vectors: _Vector) -> Iterator[Span]:
    """``span`` in runs that lie in one buffer of each plane of each vector."""
    return runs(span, [cut for vector in vectors for plane in vector.planes for cut in plane.cuts(span)])


def _products(memory: Memory, lower: _Vector, upper: _Vector, span: Span) -> Products:
    """lower.upper, |lower|^2 and |upper|^2."""
    found = [memory.products(lower.floats(run), upper.floats(run)) for run in _common_runs(span, lower, upper)]
    dot, lower_norm, upper_norm = (sum(numbers) for numbers in zip(*found, strict=True)) if found else (0.0, 0.0, 0.0)
    return dot, lower_norm, upper_norm


def _sum_products(backend: Backend, products: Sequence[Products], distance: int) -> list[Products]:
    """The products of whole vectors: summed, in rank order, over the ranks that hold parts of the same two."""
    size, memory = backend.group.size, backend.memory
    own = memory.store([number for of_tensor in products for number in of_tensor])
    everybody = memory.empty(DType.FLOAT64, (size * own.count,))
    backend.allgather([own], [everybody], [own.nbytes] * size)
    numbers = memory.load(everybody)
    first = backend.group.position & ~(2 * distance - 1)
    rows = [numbers[member * own.count : (member + 1) * own.count] for member in range(first, first + 2 * distance)]
    totals = [sum(of_members) for of_members in zip(*rows, strict=True)]
    return [(totals[place], totals[place + 1], totals[place + 2]) for place in range(0, own.count, 3)]


def _merge(
    memory: Memory, out: _Vector, lower: _Vector, upper: _Vector, span: Span, products: Products, scale: float
) -> None:
    dot, lower_norm, upper_norm = products
    from_lower = 1.0 - dot / (2.0 * lower_norm) if lower_norm >= TINY else 1.0
    from_upper = 1.0 - dot / (2.0 * upper_norm) if upper_norm >= TINY else 1.0
    for run in _common_runs(span, out, lower, upper):
        memory.combine(out.floats(run), lower.floats(run, from_lower * scale), upper.floats(run, from_upper * scale))


def _gather(backend: Backend, result: Sequence[Buffer], total: int) -> Completion:
    """Every rank has one span of the result: join all spans."""
    group, plane = backend.group, Plane(result, 0)
    parts = [plane.parts(_final_span(total, position, group.size)) for position in range(group.size)]
    counts = [sum([part.nbytes for part in of_rank]) for of_rank in parts]
    return backend.allgather(parts[group.position], [part for of_rank in parts for part in of_rank], counts)


def _final_span(total: int, position: int, size: int) -> Span:
    span, distance = (0, total), 1
    while distance < size:
        span = _halves(span)[position & distance != 0]
        distance *= 2
    return span
