"""The gradients of a bucket as they were when it was sent."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeAlias, TypeVar

from collectives.api import HorovodInternalError, InvalidRequestError
from hvd_cluster.gradients.binding import Binding
from hvd_cluster.gradients.bucket import Bucket, Setup, pack_of
from hvd_cluster.gradients.gradients import Gradients
from hvd_cluster.ops.objects import described

P = TypeVar("P")
Tensor: TypeAlias = Any
"""A gradient, or another tensor of the framework."""


class Originals(Generic[P]):
    """Until :meth:`release` each gradient of a bucket stays what it was, and a change of it can be seen.

    With ``is_watched`` False nobody asks for changes, so gradients that travel as a copy are not kept.
    """

    def __init__(self, binding: Binding[P], is_watched: bool) -> None:
        self._binding = binding
        self._is_watched = is_watched
        self._kept: dict[P, tuple[Tensor, Tensor]] = {}

    def outgoing(self, parameter: P, tensor: Tensor) -> Tensor:
        """The tensor that travels for ``tensor``, a gradient or its dense copy: never the memory of ``tensor``."""
        if tensor is not self._binding.gradient(parameter):
            self.watch(parameter)
            return tensor
        held = self._binding.hold(tensor)
        self._kept[parameter] = tensor, held
        return held

    def watch(self, parameter: P) -> None:
        """The gradient of ``parameter`` is about to be copied."""
        if self._is_watched:
            gradient = self._binding.gradient(parameter)
            self._kept[parameter] = gradient, self._binding.hold(gradient)

    def have_changed(self) -> bool:
        """Whether a gradient was replaced, or its elements have changed."""
        gradient, is_unchanged = self._binding.gradient, self._binding.is_unchanged
        return not all(
            gradient(parameter) is sent and is_unchanged(sent, held) for parameter, (sent, held) in self._kept.items()
        )

    def release(self) -> None:
        """The gradients may change now."""
        self._kept.clear()


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
