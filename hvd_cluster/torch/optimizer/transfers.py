"""From ``.grad`` to the tensors that travel, and back.

torch can share the memory of two tensors until one of them is written to, by whatever name or view: the writer gets a
copy then. So to hold a gradient costs no copy, to see that nobody has written to it costs no comparison, and whoever
writes to it does not disturb its way.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import is_
from typing import Any, TypeAlias

import torch

from collectives import EngineError, HorovodInternalError, InvalidRequestError
from hvd_cluster.core import memory
from hvd_cluster.gradients.buckets import SMALL_BYTES
from hvd_cluster.gradients.compression import GradientCompressor
from hvd_cluster.gradients.duplicate_names import Claim
from hvd_cluster.gradients.layout import ABSENT, DENSE, FROZEN
from hvd_cluster.gradients.options import Options
from hvd_cluster.ops.objects import described
from hvd_cluster.ops.submission import Operand
from hvd_cluster.torch.tensors import as_input, in_place, output, shared_buffer, to_buffer

logger = logging.getLogger(__name__)

_native: Any = torch._C  # which is not annotated in full
_NEEDED = [(torch, "_lazy_clone"), (_native, "_is_cow_tensor"), (_native, "_data_address")]
CAN_HOLD = all(hasattr(owner, name) for owner, name in _NEEDED)
"""Whether torch has the functions that this module needs, which are no part of its public API."""
if not CAN_HOLD:
    logger.warning("torch %s cannot share memory until it is written to: gradients travel in step()", torch.__version__)


def _sharers(tensor: torch.Tensor) -> int:
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def _owners(gradient: torch.Tensor) -> int:
    """The parameters that have the very same tensor as their gradient, and its Python object."""
    count: int = gradient._use_count() if hasattr(gradient, "_use_count") else 0
    return count


_ALONE = _sharers(torch.empty(1))
_OWN = _owners(torch.empty(1)) + 1


def is_shared(gradient: torch.Tensor) -> bool:
    """Whether other tensors use the memory: a user's flat buffer, or autograd's, which two parameters may share."""
    return _sharers(gradient) > _ALONE or _owners(gradient) > _OWN


def is_held(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` may share its memory with another one until one of them is written to."""
    return CAN_HOLD and bool(_native._is_cow_tensor(tensor))


def address(tensor: torch.Tensor) -> int:
    """Where the elements begin; to ask a tensor itself counts as writing to it."""
    if not CAN_HOLD:
        return tensor.data_ptr()
    base: int = _native._data_address(tensor)
    return base + int(tensor.storage_offset()) * tensor.element_size()


def hold(gradient: torch.Tensor) -> torch.Tensor:
    """A tensor that keeps the present elements of ``gradient``. Needs CAN_HOLD, and to be called without autograd."""
    if not is_shared(gradient):  # otherwise the first writer would copy all of the shared memory
        try:
            return torch._lazy_clone(gradient)
        except RuntimeError:  # memory that torch did not allocate
            pass
    return torch._lazy_clone(gradient.clone())


def is_unchanged(gradient: torch.Tensor, held: torch.Tensor) -> bool:
    """Whether ``gradient`` has the elements of ``held``: a function may have asked to write, and changed nothing."""
    if gradient.shape != held.shape or gradient.dtype is not held.dtype:
        return False
    if is_held(gradient) and address(gradient) == address(held) and gradient.stride() == held.stride():
        return True
    return torch.equal(gradient, held) or bool(((gradient == held) | (gradient.isnan() & held.isnan())).all())


class Spares:
    """The memory of large gradients that have got other memory, for the next results.

    A result that a compressor makes is no spare, so no more gradients are kept than results were taken.
    """

    def __init__(self) -> None:
        self._unused: dict[Any, list[torch.Tensor]] = {}
        self._taken: Counter[Any] = Counter()

    def give(self, gradient: torch.Tensor) -> None:
        """``gradient`` is about to get other memory. On a GPU torch keeps unused memory itself."""
        kind = gradient.shape, gradient.dtype
        if gradient.is_cpu and self._taken[kind]:
            self._taken[kind] -= 1
            self._unused.setdefault(kind, []).append(gradient.detach())

    def _take(self, held: torch.Tensor) -> torch.Tensor:
        kind, spares = (held.shape, held.dtype), None
        if held.is_cpu and held.numel() * held.element_size() >= memory.MINIMUM:
            self._taken[kind] += 1
            spares = self._unused.get(kind)
        return spares.pop() if spares else torch.empty_like(held, memory_format=torch.contiguous_format)

    def operand(self, tensor: torch.Tensor) -> Operand:
        """For an allreduce in place; if ``tensor`` is held, the result is another tensor."""
        if not (isinstance(tensor, torch.Tensor) and is_held(tensor)):
            return in_place(tensor)
        source = as_input(tensor)
        if not is_held(source):  # a copy, in the order of elements
            return in_place(source)
        return Operand(shared_buffer(source, address(source)), to_buffer(self._take(source)), output)

    def take_in(self, gradient: torch.Tensor, combined: torch.Tensor) -> None:
        """The gradient, which the user may hold, takes the memory of ``combined`` where that fits."""
        if address(combined) == address(gradient):
            return
        is_plain = gradient.is_contiguous() and combined.is_contiguous() and combined.dtype is gradient.dtype
        if is_plain and not is_shared(gradient):
            if is_held(gradient):
                self.give(gradient)
            gradient.data = combined.view(gradient.shape)
        else:
            gradient.copy_(combined.reshape(gradient.shape))


class Pack:
    """One row of memory for gradients of ``shapes``, of one type.

    ``tensor`` is the row, and ``pieces`` are views of it in the shapes of the gradients.
    """

    __slots__ = ("pieces", "shapes", "tensor")

    def __init__(self, gradients: Sequence[torch.Tensor]) -> None:
        first, count = gradients[0], sum([gradient.numel() for gradient in gradients])
        self.shapes = [gradient.shape for gradient in gradients]
        self.tensor = torch.empty(count, dtype=first.dtype, device=first.device)
        self.pieces = _views(self.tensor, gradients)

    def spread(self, combined: torch.Tensor, gradients: Sequence[torch.Tensor]) -> None:
        """Copy ``combined``, which may be the row itself, into ``gradients``."""
        pieces = self.pieces if combined is self.tensor else _views(combined, gradients)
        torch._foreach_copy_(list(gradients), pieces)


def _views(row: torch.Tensor, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Consecutive pieces of ``row`` in the shapes of ``gradients``."""
    pieces = torch.split(row, [gradient.numel() for gradient in gradients])
    return [piece.view(gradient.shape) for piece, gradient in zip(pieces, gradients, strict=True)]


class Bucket:
    """Parameters with gradients that are sent together, when all of them are ready.

    ``is_group``: it always travels as a group, also with one tensor on a rank that does not train the others: groups of
    different lengths are an error, whereas a group and a single tensor would wait for each other.
    ``label``: its name, by those of its parameters.
    ``sparse``: the parameters with gradients that are sparse on all ranks -> the number of sparse dimensions.
    ``packs``: memory for small gradients of each kind; each step reuses it, because fresh pages are slow.
    """

    __slots__ = ("is_group", "label", "packs", "parameters", "sparse")

    def __init__(
        self, parameters: Sequence[torch.Tensor], compressors: Mapping[torch.Tensor, GradientCompressor]
    ) -> None:
        self.parameters = tuple(parameters)
        kinds = [pack_of(compressors[parameter], parameter) for parameter in parameters]
        self.is_group = len({kind for kind in kinds if kind is not None}) + kinds.count(None) > 1
        self.label = ""
        self.sparse: dict[torch.Tensor, int] = {}
        self.packs: dict[Any, Pack] = {}


def pack_of(compressor: GradientCompressor, tensor: torch.Tensor) -> Any:
    """The kind of the pack in which ``tensor``, a gradient, travels; None if it travels alone.

    Small gradients of one kind share a pack, if the compressor allows it.
    """
    is_small = tensor.numel() * tensor.element_size() <= SMALL_BYTES
    return (tensor.dtype, tensor.device) if is_small and compressor.elementwise else None


@dataclass(frozen=True)
class Setup:
    """The values that all reductions of one optimizer share."""

    names: Mapping[torch.Tensor, str]
    compressors: Mapping[torch.Tensor, GradientCompressor]
    options: Options
    claim: Claim
    spares: Spares


def is_same_list(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Whether two lists have the same tensors, whose ``==`` compares elements."""
    return len(one) == len(other) and all(map(is_, one, other))


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    """The gradient of ``parameter``; EngineError if it is gone."""
    gradient = parameter.grad
    if gradient is None:
        raise EngineError("a gradient was removed while it was in flight; keep .grad until step() has returned")
    return gradient


class Gradients:
    """The gradients of ``members`` of ``bucket``. Members without one, the ``absent`` ones, get one of zeros.

    ``agreed`` has the gradients that the ranks agreed to be sparse, and their numbers of sparse dimensions. With
    ``as_dense`` gradients that are sparse have a dense copy until :meth:`restore`.
    """

    def __init__(self, bucket: Bucket, members: Sequence[torch.Tensor], as_dense: bool) -> None:
        self.members = members
        self.absent = {parameter for parameter in members if parameter.grad is None}
        for parameter in self.absent:
            parameter.grad = torch.zeros_like(parameter)
        self._dense: dict[torch.Tensor, torch.Tensor] = {}
        if bucket.sparse:
            self._sparsify(bucket.sparse)
        self._from_sparse = self._densify(bucket) if as_dense else {}
        self.agreed: dict[torch.Tensor, int] = {} if as_dense else bucket.sparse

    def _densify(self, bucket: Bucket) -> dict[torch.Tensor, int]:
        """Make dense copies of sparse gradients; returns the number of sparse dimensions of each."""
        gradients = {each: self.of(each) for each in self.members}
        self._dense = {each: gradient.to_dense() for each, gradient in gradients.items() if gradient.is_sparse}
        sparse = {each: gradients[each].sparse_dim() for each in self._dense}
        bucket.sparse.update(sparse)
        return sparse

    def _sparsify(self, dimensions: Mapping[torch.Tensor, int]) -> None:
        for parameter in self.members:
            if parameter in dimensions and not self.of(parameter).is_sparse:
                parameter.grad = self.of(parameter).to_sparse(dimensions[parameter])

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The gradient of ``parameter``, or its dense copy; EngineError if it is gone."""
        dense = self._dense.get(parameter) if self._dense else None
        return gradient_of(parameter) if dense is None else dense

    def has_unknown(self) -> bool:
        """Whether a gradient is sparse, and the ranks have not agreed on that."""
        return any([self.of(each).is_sparse and each not in self.agreed for each in self.members])

    def agree(self, sparse: Mapping[torch.Tensor, int]) -> None:
        """The gradients of ``sparse`` are sparse on all ranks that have one."""
        self.agreed.update(sparse)
        self._sparsify({parameter: sparse[parameter] for parameter in self.absent & sparse.keys()})

    def restore(self) -> None:
        """Make the combined gradients sparse again that became dense."""
        if self._from_sparse:
            self._sparsify(self._from_sparse)

    def entry(self, parameter: torch.Tensor) -> tuple[int, int, int]:
        """That of a layout, see :mod:`hvd_cluster.gradients.layout`."""
        if not any(parameter is member for member in self.members):
            kind = FROZEN
        elif parameter in self.absent:
            kind = ABSENT
        else:
            gradient = self.of(parameter)
            kind = gradient.sparse_dim() if gradient.is_sparse else DENSE
        return kind, parameter.numel(), int(parameter in self.agreed)


class Originals:
    """Until :meth:`release` each gradient of a bucket stays what it was, and a change of it can be seen.

    With ``is_watched`` False nobody asks for changes, so gradients that travel as a copy are not kept.
    """

    def __init__(self, is_watched: bool) -> None:
        self._is_watched = is_watched
        self._kept: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def outgoing(self, parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that travels for ``tensor``, a gradient or its dense copy: never the memory of ``tensor``."""
        if tensor is not parameter.grad:
            self.watch(parameter)
            return tensor
        held = hold(_elements(tensor))
        self._kept.append((parameter, tensor, held))
        return held

    def watch(self, parameter: torch.Tensor) -> None:
        """The gradient of ``parameter`` is about to be copied."""
        if self._is_watched:
            gradient = gradient_of(parameter)
            self._kept.append((parameter, gradient, hold(_elements(gradient))))

    def have_changed(self) -> bool:
        """Whether a gradient was replaced, or its elements have changed."""
        return not all(
            parameter.grad is sent and is_unchanged(_elements(sent), held) for parameter, sent, held in self._kept
        )

    def release(self) -> None:
        """The gradients may change now."""
        self._kept.clear()


def _elements(gradient: torch.Tensor) -> torch.Tensor:
    """Those that are stored: of a sparse gradient its values."""
    return gradient._values() if gradient.is_sparse else gradient


Transfer: TypeAlias = Generator[torch.Tensor, Any, None]
"""Yields a tensor to combine over all ranks, receives the result, and ends when gradients are complete."""


def transfers(
    bucket: Bucket, gradients: Gradients, setup: Setup, originals: Originals | None = None
) -> Iterator[Transfer]:
    """The same number of transfers in the same order, for any gradients that are sparse.

    Gradients may change at once, or with ``originals`` after the first round of all of them. A transfer raises
    InvalidRequestError if the compressor fails.
    """
    sparse, compressors = gradients.agreed, setup.compressors
    packs: dict[Any, list[torch.Tensor]] = {}
    for parameter in gradients.members:
        kind = pack_of(compressors[parameter], gradients.of(parameter))
        if kind is not None:
            packs.setdefault(kind, []).append(parameter)
        elif parameter in sparse:
            yield _placeholder(parameter)
        else:
            yield _guarded(_alone(setup, parameter, gradients, originals), setup.names[parameter])
    for kind, members in packs.items():
        dense = [parameter for parameter in members if parameter not in sparse] if sparse else members
        if not dense:
            yield _placeholder(members[0])
        elif len(dense) == 1:
            yield _guarded(_alone(setup, dense[0], gradients, originals), setup.names[dense[0]])
        else:
            packed = _packed(setup, bucket, kind, dense, gradients, originals)
            yield _guarded(packed, setup.names[dense[0]])


def advance(
    active: Iterable[Transfer], combined: Iterable[torch.Tensor | None]
) -> tuple[list[Transfer], list[torch.Tensor]]:
    """The transfers that do not end with these results, and the next tensor of each."""
    unfinished, tensors = [], []
    for transfer, tensor in zip(active, combined, strict=True):
        with suppress(StopIteration):
            tensors.append(transfer.send(tensor))
            unfinished.append(transfer)
    return unfinished, tensors


def _placeholder(parameter: torch.Tensor) -> Transfer:
    """An empty tensor of a shape that neither a gradient of ``parameter`` nor a pack has."""
    yield parameter.new_empty((0,) * (parameter.dim() + 1))


def _alone(setup: Setup, parameter: torch.Tensor, gradients: Gradients, originals: Originals | None) -> Transfer:
    compressor, gradient = setup.compressors[parameter], gradients.of(parameter)
    if compressor.is_identity:
        combined = yield _own(gradient) if originals is None else originals.outgoing(parameter, gradient)
    elif originals is None:
        combined = yield from compressor.rounds(_own(gradient))
    else:
        combined = yield from compressor.rounds_beside(originals.outgoing(parameter, gradient), gradient)
    setup.spares.take_in(gradient, combined)


def _own(gradient: torch.Tensor) -> torch.Tensor:
    """The tensor that travels for ``gradient``: itself, or a copy where others use its memory."""
    return gradient.clone() if is_shared(gradient) else gradient


def _packed(
    setup: Setup,
    bucket: Bucket,
    kind: Any,
    parameters: Sequence[torch.Tensor],
    gradients: Gradients,
    originals: Originals | None,
) -> Transfer:
    members = [gradients.of(parameter) for parameter in parameters]
    if originals is not None:
        for parameter in parameters:
            originals.watch(parameter)
    pack = bucket.packs[kind] = _pack(members, bucket.packs.get(kind))
    compressor = setup.compressors[parameters[0]]
    combined = (yield pack.tensor) if compressor.is_identity else (yield from compressor.rounds(pack.tensor))
    pack.spread(combined, members)


def _pack(gradients: Sequence[torch.Tensor], earlier: Pack | None) -> Pack:
    """A copy of ``gradients`` in one row: that of ``earlier`` if it fits."""
    is_fit = earlier is not None and earlier.shapes == [gradient.shape for gradient in gradients]
    pack = earlier if earlier is not None and is_fit else Pack(gradients)
    torch._foreach_copy_(pack.pieces, list(gradients))
    return pack


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
