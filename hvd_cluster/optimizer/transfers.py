"""The exchange of gradients by compressors: of one gradient alone, or of several in one packed tensor."""

from __future__ import annotations

from collections.abc import Container, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

from collectives.api import HorovodInternalError, InvalidRequestError
from hvd_cluster.objects import described
from hvd_cluster.optimizer.binding import Binding
from hvd_cluster.optimizer.bucket import Bucket, Setup, pack_of
from hvd_cluster.optimizer.gradients import gradient_of

__all__ = ["Transfer", "advance", "transfers"]

P = TypeVar("P")
Tensor: TypeAlias = Any
"""A gradient, or another tensor of the framework."""
Transfer: TypeAlias = Generator[Tensor, Tensor | None, None]
"""Yields a tensor to combine over all ranks, receives the result, and ends when gradients are complete."""


def transfers(bucket: Bucket[P], parameters: Iterable[P], setup: Setup[P], sparse: Container[P]) -> Iterator[Transfer]:
    """The same number of transfers in the same order, for any ``sparse``.

    A transfer raises InvalidRequestError if the compressor fails.
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


def advance(active: Iterable[Transfer], combined: Iterable[Tensor | None]) -> tuple[list[Transfer], list[Tensor]]:
    """The transfers that do not end with these results, and the next tensor of each."""
    unfinished, tensors = [], []
    for transfer, tensor in zip(active, combined, strict=True):
        with suppress(StopIteration):
            tensors.append(transfer.send(tensor))
            unfinished.append(transfer)
    return unfinished, tensors


def _placeholder(binding: Binding[P], parameter: P) -> Transfer:
    yield binding.placeholder(parameter)


def _alone(setup: Setup[P], parameter: P) -> Transfer:
    binding = setup.binding
    gradient = gradient_of(binding, parameter)
    binding.incoming(gradient, (yield from setup.compressors[parameter].rounds(binding.outgoing(gradient))))


def _packed(setup: Setup[P], bucket: Bucket[P], kind: Any, parameters: Sequence[P]) -> Transfer:
    binding = setup.binding
    gradients = [gradient_of(binding, parameter) for parameter in parameters]
    pack = bucket.packs[kind] = binding.pack(gradients, bucket.packs.get(kind))
    pack.spread((yield from setup.compressors[parameters[0]].rounds(pack.tensor)), gradients)


def _guarded(transfer: Transfer, name: str) -> Transfer:
    """``transfer``, in which the compressor may be code of the user. InvalidRequestError if that fails."""
    try:
        yield from transfer
    except HorovodInternalError:  # of a collective in the compressor
        raise
    except Exception as error:
        raise InvalidRequestError(
            f"the compressor of the gradient of {name!r} failed ({described(error)}); correct the compressor"
        ) from error
