"""Combines the gradients of a list that is known at once: of a tape, or of a step of a Keras optimizer.

A framework may only build a graph here, or trace a function, whose tensors have no values yet. So nothing depends on
values, and the ranks exchange nothing but gradients: buckets follow from the variables, and a variable without a
gradient on this rank takes part with zeros, because it may have one elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol, TypeAlias

from collectives import InvalidRequestError, MismatchError, ReduceOp
from hvd_cluster.comparison.models import Model
from hvd_cluster.comparison.rosters import Roster, roster_of, static_name
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.gradients.buckets import SMALL_BYTES
from hvd_cluster.gradients.compression import compressed, require_compressor
from hvd_cluster.gradients.options import Options, check
from hvd_cluster.gradients.targets import ListBucket, Target, buckets, model_of
from hvd_cluster.ops.arguments import Reduction, require_sparse_op

Tensor: TypeAlias = Any
"""A gradient, or another tensor of the framework."""


class Shipment(NamedTuple):
    """Tensors that travel under one name: as a group, unless ``is_alone``.

    Where nothing travels yet, because a graph is built, the ``name`` is a static one, and ``roster`` has the one in
    flight. All ranks give the same ``tag``.
    """

    name: str
    tensors: Sequence[Tensor]
    roster: Roster | None = None
    tag: int = 0

    @property
    def is_alone(self) -> bool:
        """Whether it is one tensor."""
        return len(self.tensors) == 1


class ListBinding(Protocol):
    """The operations that a framework provides."""

    def is_deferred(self) -> bool:
        """Whether a graph is built now, so that gradients travel later, perhaps in several worlds."""
        return False

    def kind(self, gradient: Tensor) -> Hashable:
        """Only gradients of one kind can be packed together."""
        return gradient.dtype, gradient.device

    def is_sparse(self, gradient: Tensor) -> bool:
        """Whether ``gradient`` has some rows of the variable only."""
        return False

    def to_dense(self, gradient: Tensor, target: Target) -> Tensor:
        """A sparse gradient as a dense one, in the shape of ``target``."""
        return gradient

    def zeros(self, target: Target, like: Tensor | None) -> Tensor:
        """A gradient of zeros, on the device of ``like``, another gradient; None if there is none."""

    def reshape(self, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        """``tensor`` in another shape; -1 stands for the rest."""
        return tensor.reshape(shape)

    def concatenate(self, tensors: Sequence[Tensor]) -> Tensor:
        """One vector of several."""

    def split(self, packed: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """The parts of a vector, of these sizes."""

    def pack(self, gradients: Sequence[Tensor]) -> Tensor:
        """One vector with the elements of all."""
        return self.concatenate([self.reshape(gradient, (-1,)) for gradient in gradients])

    def unpack(self, packed: Tensor, targets: Sequence[Target]) -> Sequence[Tensor]:
        """The parts of ``packed``, in the shapes of ``targets``."""
        shapes = [target.shape or () for target in targets]  # those of packed gradients are known
        parts = self.split(packed, [prod(shape) for shape in shapes])
        return [self.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]

    def allreduce(
        self, shipments: Sequence[Shipment], process_set: ProcessSet, how: Reduction
    ) -> Sequence[Sequence[Tensor]]:
        """The combined tensors of each shipment. The given ones may be overwritten.

        Raises the errors of an allreduce, where the framework raises at once.
        """

    def comparing(self) -> AbstractContextManager[None]:
        """Around an exchange of the ranks about their models: the framework's error takes the place of the engine's."""
        return nullcontext()

    def engine_error(self, error: Exception) -> BaseException | None:
        """The engine's error for which an ``error`` of :meth:`allreduce` stands."""
        return error

    def gather(
        self, gradient: Tensor, name: str, op: ReduceOp, process_set: ProcessSet, roster: Roster | None
    ) -> Tensor:
        """The sum or the average of sparse gradients: the rows of all ranks. ``name``: as in :class:`Shipment`."""
        raise InvalidRequestError(f"the gradient {name!r} is not sparse")

    def share(self, gradient: Tensor, process_set: ProcessSet) -> Tensor:
        """``gradient`` divided by the size of ``process_set``."""


def by_shipment(tensors: Iterable[Tensor], shipments: Sequence[Shipment]) -> list[list[Tensor]]:
    """The combined ``tensors`` of all shipments, as a list for each."""
    remaining = iter(tensors)
    return [[next(remaining) for _ in shipment.tensors] for shipment in shipments]


@dataclass(frozen=True, slots=True)
class _Parcel:
    """The tensor that travels for the gradients at some positions, and what decompression needs."""

    positions: Sequence[int]
    tensor: Tensor
    context: Any


@dataclass(frozen=True, slots=True)
class _Plan:
    """The ``buckets`` of ``targets``. ``is_deferred``: they are for a graph, and have static names there."""

    targets: Sequence[Target]
    buckets: Sequence[ListBucket]
    model: Model
    roster: Roster
    is_deferred: bool

    @property
    def static_roster(self) -> Roster | None:
        return self.roster if self.is_deferred else None

    def name(self, static: str) -> str:
        """The name of a shipment."""
        return static if self.is_deferred else self.roster.name_in_flight(static)

    def place(self, position: int, left_out: Collection[int]) -> int:
        """The position of a target among those that travel."""
        return sum(target.key not in left_out for target in self.targets[:position])


KEPT_PLANS = 64
_plans: dict[Hashable, _Plan] = {}
"""The latest ones of this process."""


class ListCombiner:
    """Combines lists of gradients over all ranks by ``options``.

    The gradients of local variables stay those of this rank, divided by the size of the process set if
    ``scales_local``: then all gradients belong to the average of the ranks' losses.
    """

    def __init__(self, binding: ListBinding, options: Options, scales_local: bool = True) -> None:
        """Raises as :func:`check`, and InvalidRequestError for a compressor that keeps state."""
        check(options)
        require_compressor(options.compression)
        self.options = options
        self._binding = binding
        self._scales_local = scales_local
        self._local: dict[int, Any] = {}
        self._planned: _Plan | None = None

    def copy(self) -> ListCombiner:
        """For another optimizer, with the same options and local variables; raises as the constructor."""
        result = ListCombiner(self._binding, self.options, self._scales_local)
        result._local.update(self._local)
        return result

    def keep_local(self, variable: Any) -> None:
        """From now on the gradient of ``variable`` is not combined. The ranks agree on such variables."""
        self._local[id(variable)] = variable
        self._planned = None

    def is_local(self, variable: Any) -> bool:
        """Whether the gradient of ``variable`` is not combined."""
        return id(variable) in self._local

    @property
    def has_company(self) -> bool:
        """Whether this rank combines anything with others, or may do so later, when it runs the same graph again."""
        is_joined = basics.size() > 1 or basics.worlds() is not None
        return is_joined and bool(self.options.process_set.included())

    def combine(self, gradients: Sequence[Tensor | None], targets: Sequence[Target]) -> list[Tensor | None]:
        """The combined gradients of ``targets``, in this order.

        A gradient of None becomes that of the other ranks, or zeros, unless this rank is alone or not a member.
        InvalidRequestError for sparse gradients with Adasum, and if the compressor fails.
        """
        results = list(gradients)
        if not self.has_company:
            return results
        plan = self._plan(targets)
        dense = dict(self._dense(results, targets, plan))
        contents = [(bucket.name, list(self._parcels(bucket, dense, targets))) for bucket in plan.buckets]
        self._send([(plan.name(name), parcels) for name, parcels in contents if parcels], targets, results, plan)
        return results

    def _plan(self, targets: Sequence[Target]) -> _Plan:
        """The buckets of ``targets``; the ranks compare these the first time in a world, unless a graph is built."""
        is_deferred = self._binding.is_deferred()
        plan = self._planned
        if plan is None or plan.is_deferred is not is_deferred or plan.targets != targets:
            plan = self._planned = self._known_plan(targets, is_deferred)
        if not (is_deferred or plan.roster.is_entered(basics.engine())):
            with self._binding.comparing():
                plan.roster.enter(plan.model)
        return plan

    def _known_plan(self, targets: Sequence[Target], is_deferred: bool) -> _Plan:
        """A script may make a tape in each step: then the plan is that of an earlier one."""
        groups, process_set = self.options.groups, self.options.process_set
        if self._local or isinstance(groups, Sequence):
            return self._new_plan(targets, is_deferred)
        key = process_set.process_set_id, groups, is_deferred, *[target.key for target in targets]
        plan = _plans.get(key)
        if plan is None or plan.targets != targets or not plan.roster.is_of(process_set):
            if len(_plans) >= KEPT_PLANS:
                _plans.clear()
            plan = _plans[key] = self._new_plan(targets, is_deferred)
        return plan

    def _new_plan(self, targets: Sequence[Target], is_deferred: bool) -> _Plan:
        groups, local = self.options.groups, self._local
        model = model_of(targets, groups, local)
        roster = roster_of(model, self.options.process_set, is_deferred)
        return _Plan(targets, buckets(targets, groups, local), model, roster, is_deferred)

    def _dense(
        self, results: list[Tensor | None], targets: Sequence[Target], plan: _Plan
    ) -> Iterator[tuple[int, Tensor]]:
        """The gradients that travel in buckets, by position. The others are replaced by their ``results``."""
        like = next((gradient for gradient in results if gradient is not None), None)
        for position, target in enumerate(targets):
            gradient = results[position]
            if target.key in self._local:
                results[position] = self._of_local(gradient)
            elif gradient is None:
                yield position, self._binding.zeros(target, like)
            elif not self._binding.is_sparse(gradient):
                yield position, gradient
            elif self.options.sparse_as_dense:
                yield position, self._binding.to_dense(gradient, target)
            else:
                results[position] = self._gathered(gradient, plan.place(position, self._local), plan)

    def _of_local(self, gradient: Tensor | None) -> Tensor | None:
        is_scaled = self._scales_local and gradient is not None
        return self._binding.share(gradient, self.options.process_set) if is_scaled else gradient

    def _gathered(self, gradient: Tensor, place: int, plan: _Plan) -> Tensor:
        require_sparse_op(self.options.op, False)
        name, options = plan.name(static_name([place])), self.options
        return self._binding.gather(gradient, name, options.op, options.process_set, plan.static_roster)

    def _parcels(self, bucket: ListBucket, dense: Mapping[int, Tensor], targets: Sequence[Target]) -> Iterator[_Parcel]:
        packs: defaultdict[Hashable, list[int]] = defaultdict(list)
        for position in bucket.positions:
            if position in dense:
                can_share = self._can_share(targets[position])
                packs[self._binding.kind(dense[position]) if can_share else (position,)].append(position)
        for positions in packs.values():
            members = [dense[position] for position in positions]
            tensor = members[0] if len(members) == 1 else self._binding.pack(members)
            yield _Parcel(positions, *compressed(self.options.compression, tensor))

    def _can_share(self, target: Target) -> bool:
        """Whether the gradient may be a part of a larger tensor. Adasum weighs each tensor by its own norm."""
        options = self.options
        is_small = target.bytes is not None and target.bytes <= SMALL_BYTES
        return is_small and options.op is not ReduceOp.ADASUM and getattr(options.compression, "elementwise", False)

    def _send(
        self,
        contents: Sequence[tuple[str, Sequence[_Parcel]]],
        targets: Sequence[Target],
        results: list[Tensor | None],
        plan: _Plan,
    ) -> None:
        combined = self._exchanged([(name, [parcel.tensor for parcel in parcels]) for name, parcels in contents], plan)
        for (_, parcels), tensors in zip(contents, combined, strict=True):
            for parcel, tensor in zip(parcels, tensors, strict=True):
                received = self.options.compression.decompress(tensor, parcel.context)
                self._put(received, parcel.positions, targets, results)

    def _exchanged(self, contents: Sequence[tuple[str, Sequence[Tensor]]], plan: _Plan) -> Sequence[Sequence[Tensor]]:
        tag = 0 if plan.is_deferred else plan.roster.tag(plan.model)
        shipments = [Shipment(name, tensors, plan.static_roster, tag) for name, tensors in contents]
        try:
            return self._binding.allreduce(shipments, self.options.process_set, self.options.reduction)
        except Exception as error:
            cause = self._binding.engine_error(error)
            if plan.is_deferred or not isinstance(cause, MismatchError) or cause.property != "tag":
                raise
        with self._binding.comparing():
            plan.roster.compare_again(plan.model)
        return self._exchanged(contents, plan)

    def _put(
        self, received: Tensor, positions: Sequence[int], targets: Sequence[Target], results: list[Tensor | None]
    ) -> None:
        members = [targets[position] for position in positions]
        parts = [received] if len(members) == 1 else self._binding.unpack(received, members)
        for position, part in zip(positions, parts, strict=True):
            results[position] = part
