"""The ways of gradients through their compressors: alone, or packed with others into one tensor."""

from __future__ import annotations

from collections.abc import Container, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

from collectives.api import HorovodInternalError, InvalidRequestError
from hvd_cluster.objects import described
from hvd_cluster.optimizer.binding import Binding
from hvd_cluster.optimizer.bucket import Bucket, Setup, pack_of
from hvd_cluster.optimizer.gradients import gradient_of

__all__ = ["Journey", "go_on", "journeys"]

P = TypeVar("P")
Tensor: TypeAlias = Any
"""A gradient, or another tensor of the framework."""
Journey: TypeAlias = Generator[Tensor, Tensor | None, None]
"""Yields a tensor to combine over all ranks, receives the result, and ends when gradients are complete."""


def journeys(bucket: Bucket[P], parameters: Iterable[P], setup: Setup[P], sparse: Container[P]) -> Iterator[Journey]:
    """The same number of journeys in the same order, for any ``sparse``.

    A journey raises InvalidRequestError if the compressor fails.
    """
    binding = setup.binding
    packs: dict[Any, list[P]] = {}
    for parameter in parameters:
        kind = pack_of(binding, setup.compressors[parameter], gradient_of(binding, parameter))
        if kind is not None:
            packs.setdefault(kind, []).append(parameter)
        else:
            alone = _placeholder(binding, parameter) if parameter in sparse else _alone(setup, parameter)
            yield _guarded(alone, setup.names[parameter])
    for kind, members in packs.items():
        dense = [parameter for parameter in members if parameter not in sparse]
        if not dense:
            yield _placeholder(binding, members[0])
        elif len(dense) == 1:
            yield _guarded(_alone(setup, dense[0]), setup.names[dense[0]])
        else:
            yield _guarded(_packed(setup, bucket, kind, dense), setup.names[dense[0]])


def go_on(travelling: Iterable[Journey], combined: Iterable[Tensor | None]) -> tuple[list[Journey], list[Tensor]]:
    """The journeys that do not end with these results, and the next tensor of each."""
    going, tensors = [], []
    for journey, tensor in zip(travelling, combined, strict=True):
        with suppress(StopIteration):
            tensors.append(journey.send(tensor))
            going.append(journey)
    return going, tensors


def _placeholder(binding: Binding[P], parameter: P) -> Journey:
    yield binding.placeholder(parameter)


def _alone(setup: Setup[P], parameter: P) -> Journey:
    binding = setup.binding
    gradient = gradient_of(binding, parameter)
    binding.incoming(gradient, (yield from setup.compressors[parameter].rounds(binding.outgoing(gradient))))


def _packed(setup: Setup[P], bucket: Bucket[P], kind: Any, parameters: Sequence[P]) -> Journey:
    binding = setup.binding
    gradients = [gradient_of(binding, parameter) for parameter in parameters]
    pack = bucket.packs[kind] = binding.pack(gradients, bucket.packs.get(kind))
    pack.spread((yield from setup.compressors[parameters[0]].rounds(pack.tensor)), gradients)


def _guarded(journey: Journey, name: str) -> Journey:
    """``journey``, in which the compressor may be code of the user. InvalidRequestError if that fails."""
    try:
        yield from journey
    except HorovodInternalError:  # of a collective in the compressor
        raise
    except Exception as error:
        raise InvalidRequestError(
            f"the compressor of the gradient of {name!r} failed ({described(error)}); correct the compressor"
        ) from error
