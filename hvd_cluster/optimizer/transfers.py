"""The exchange of gradients by compressors: of one gradient alone, or of several in one packed tensor."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

from collectives.api import HorovodInternalError, InvalidRequestError
from hvd_cluster.objects import described
from hvd_cluster.optimizer.binding import Binding
from hvd_cluster.optimizer.bucket import Bucket, Setup, pack_of
from hvd_cluster.optimizer.gradients import Gradients
from hvd_cluster.optimizer.originals import Originals

__all__ = ["Transfer", "advance", "transfers"]

P = TypeVar("P")
Tensor: TypeAlias = Any
"""A gradient, or another tensor of the framework."""
Transfer: TypeAlias = Generator[Tensor, Tensor | None, None]
"""Yields a tensor to combine over all ranks, receives the result, and ends when gradients are complete."""


def transfers(
    bucket: Bucket[P], gradients: Gradients[P], setup: Setup[P], originals: Originals[P] | None = None
) -> Iterator[Transfer]:
    """The same number of transfers in the same order, for any gradients that are sparse.

    Gradients may change at once, or with ``originals`` after the first round of all of them. A transfer raises
    InvalidRequestError if the compressor fails.
    """
    binding, sparse = setup.binding, gradients.agreed
    packs: dict[Any, list[P]] = {}
    for parameter in gradients.members:
        kind = pack_of(binding, setup.compressors[parameter], gradients.of(parameter))
        if kind is not None:
            packs.setdefault(kind, []).append(parameter)
        else:
            is_sparse = parameter in sparse
            alone = _placeholder(binding, parameter) if is_sparse else _alone(setup, parameter, gradients, originals)
            yield _guarded(alone, setup.names[parameter])
    for kind, members in packs.items():
        dense = [parameter for parameter in members if parameter not in sparse]
        if not dense:
            yield _placeholder(binding, members[0])
        elif len(dense) == 1:
            yield _guarded(_alone(setup, dense[0], gradients, originals), setup.names[dense[0]])
        else:
            packed = _packed(setup, bucket, kind, dense, gradients, originals)
            yield _guarded(packed, setup.names[dense[0]])


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


def _alone(setup: Setup[P], parameter: P, gradients: Gradients[P], originals: Originals[P] | None) -> Transfer:
    binding, compressor, gradient = setup.binding, setup.compressors[parameter], gradients.of(parameter)
    if originals is None:
        rounds = compressor.rounds(binding.outgoing(gradient))
    else:
        rounds = compressor.rounds_beside(originals.outgoing(parameter, gradient), gradient)
    binding.incoming(gradient, (yield from rounds))


def _packed(
    setup: Setup[P],
    bucket: Bucket[P],
    kind: Any,
    parameters: Sequence[P],
    gradients: Gradients[P],
    originals: Originals[P] | None,
) -> Transfer:
    members = [gradients.of(parameter) for parameter in parameters]
    if originals is not None:
        for parameter in parameters:
            originals.watch(parameter)
    pack = bucket.packs[kind] = setup.binding.pack(members, bucket.packs.get(kind))
    pack.spread((yield from setup.compressors[parameters[0]].rounds(pack.tensor)), members)


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
