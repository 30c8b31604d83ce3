"""The optimizer of which each rank updates a shard: its part of the parameters, with the state of that part only."""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple

import torch

from collectives import HorovodInternalError, InvalidRequestError, override
from hvd_cluster.core import basics
from hvd_cluster.ops.objects import allgather_object, described, gather_object
from hvd_cluster.ops.rank_copies import Bytes, Kept, Packed, RankCopies, RowId
from hvd_cluster.ops.refused_calls import refuse
from hvd_cluster.ops.structures import mapped
from hvd_cluster.torch.optimizer.gradient_optimizer import HookedOptimizer
from hvd_cluster.torch.optimizer.inventory import Names
from hvd_cluster.torch.optimizer.rows import ParameterPart, Portions
from hvd_cluster.torch.optimizer.shard import (
    NAME,
    ParameterShard,
    StatePart,
    check,
    cut_state,
    is_element_wise,
    joined_states,
    own_memory,
    packed_tensor,
    require_shapes,
    unpacked_tensor,
)

State = dict[Any, Any]
LISTS = ("params", "param_names")
"""The lists of a group that have an entry for each parameter."""
SCATTERED_BYTES = 1 << 26
"""The most bytes of gradients that more than two ranks reduce-scatter: the engine sends so many in one batch.

In a smaller part of them, few ranks would combine the elements of all.
"""
logger = logging.getLogger(__name__)


Values = Sequence[tuple[Any, Sequence[StatePart]]]
"""By rank, the bytes of its part of the parameters, or None, and its parts of the state."""


class KeptState(NamedTuple):
    """A ``copy`` of the parts of ``shard`` on all ranks after so many ``steps``; ``others`` belong to no parameter.

    It has the values of parameters, too, unless each rank has got all of them: ``included``.
    """

    steps: int
    copy: Kept
    shard: ParameterShard
    others: State
    included: Sequence[torch.Tensor]

    def read(self) -> Values:
        """The parts of all ranks, in memory that may be overwritten later. InvalidRequestError if this lacks some."""
        return [mapped(each, unpacked_tensor) for each in self.copy.values()]

    def restored(self, values: Values) -> State:
        """Give the parameters that are included their ``values``; the full state, by parameter.

        The parameters lie in memory of this rank.
        """
        if self.included:
            self.shard.load([memory for memory, _ in values])
        return {**joined_states(self.shard.parameters, [parts for _, parts in values]), **self.others}


class ShardedOptimizer(HookedOptimizer):
    """The first base of a wrapped optimizer's class, with ``sharded``; the second is the class of the optimizer.

    ``synchronize()`` combines gradients as without ``sharded``, so ``.grad`` is whole on all ranks. A ``step()``
    without it reduce-scatters those of ``_division``, and then removes them. ``state`` has the parameters of the
    optimizer as keys before the first step, and after that the pieces of this rank.
    """

    _shard: ParameterShard | None
    _is_spread: bool

    @override
    def _distribute(self, names: Names, passes: int, options: Any) -> None:
        check(self, self._kind)
        self._shard, self._is_spread = None, False
        self._division: Mapping[torch.Tensor, Portions] = {}
        self._scattered: Sequence[torch.Tensor] = ()
        self._copies: RankCopies | None = None
        self._kept: KeptState | None = None
        self._expects_commits = self._copies_next = False
        self._marks: Sequence[tuple[int, int]] = ()
        self._follows_combination = self._has_warned_of_change = False
        self._versions: list[int] = []
        self._steps = 0
        super()._distribute(names, passes, options)

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As in HookedOptimizer. The closure sees all parameters, so it runs before the step of the shard.

        InvalidRequestError in ``skip_synchronize()`` without ``synchronize()``: the ranks have different gradients.
        """
        self._follows_combination = closure is None and not (self._skip or self._combined_for_step)
        if closure is None:
            self._require_combined()
            return super().step()
        loss = self._evaluate(closure)
        self._combined_for_step = True
        super().step()
        return loss

    step.hooked = True  # type: ignore[attr-defined]

    def _require_combined(self) -> None:
        if self._skip and not (self._synchronized or self._combined_for_step) and self._has_company():
            raise InvalidRequestError(
                "step() was called in skip_synchronize() before the gradients were combined, so the parts of the "
                "parameters would follow different gradients; call synchronize() before"
            )

    @override
    def _combine_for_update(self) -> None:
        """Hooks of the step see whole gradients. All ranks have the same hooks."""
        shard = self._shard
        divided = shard is not None and not self._optimizer_step_pre_hooks and shard.divides(self._parameters())
        self._combiner.division = self._division if divided else {}
        try:
            self.synchronize()
            self._scattered = list(self._combiner.division)
        finally:
            self._combiner.division = {}

    @override
    def _update(self, closure: Callable[[], Any] | None = None) -> Any:
        if not self._has_company():
            self._own_parts()  # an error, if there is state of an earlier world
            return super()._update(closure)
        shard = self._present_shard()
        meets = shard.is_shared and bool(self._optimizer_step_pre_hooks or not self._follows_combination)
        end = self._present_copies().first_call if self._copies_next else shard.end
        next_call = shard.READY if meets else end
        try:
            self._warn_of_change(shard)
            self._run_hooks(self._optimizer_step_pre_hooks)
            if meets:
                shard.meet(shard.READY[1])  # the script of another rank may still read its parameters
            next_call = end
            self._take_state(shard)
            with self._reduced_to(shard):
                result = super()._update(closure)
            packed = self._packed_parts(shard) if self._copies_next else None
        except HorovodInternalError:
            raise
        except Exception as error:
            problem = InvalidRequestError(f"the step of this rank failed ({described(error)})")
            refuse(problem, *next_call, self._options.process_set, None)
            raise
        if packed is not None:
            self._keep(packed, shard, self._steps + 1)
        shard.publish()
        self._steps += 1
        self._copies_next = False
        self._marks = self._present_marks()
        self._versions = [parameter._version for parameter in shard.parameters]
        self._run_hooks(self._optimizer_step_post_hooks)
        return result

    def _run_hooks(self, hooks: Mapping[int, Callable[..., Any]]) -> None:
        """Those of the script see all parameters, before the step or after it."""
        for hook in list(hooks.values()):
            hook(self, (self,), {})

    def _warn_of_change(self, shard: ParameterShard) -> None:
        if not shard.is_shared or self._has_warned_of_change or len(self._versions) != len(shard.parameters):
            return
        for parameter, version in zip(shard.parameters, self._versions, strict=True):
            if parameter._version != version:
                self._has_warned_of_change = True
                logger.warning(
                    "the parameter %r was changed in place between two steps, and all ranks of this host share it. "
                    "That is right for values that all ranks set alike; p.mul_(0.5) would count once for each rank. "
                    'sharded="rank" gives each rank its own. This is said once',
                    self._parameter_names[parameter],
                )
                return

    def _has_company(self) -> bool:
        process_set = self._options.process_set
        return bool(process_set.included()) and (process_set.size() or 1) > 1

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def unshare_parameters(self) -> None:
        """Give this rank memory of its own for all parameters, for other optimizers, when this one has done its work.

        Otherwise the parameters stay in the memory that the ranks of the host share.
        """
        own_memory(self._parameters())

    # The shard.

    def _present_shard(self) -> ParameterShard:
        """The shard of the parameters that the optimizer has now; a collective if it is another one than before."""
        parameters, shard = self._parameters(), self._shard
        if shard is None or not shard.divides(parameters):
            self.unite()
            names, options = self._parameter_names, self._options
            shard = ParameterShard(parameters, names, is_element_wise(self._kind), options.sharded, options.process_set)
            self._shard, self._copies, self._kept, self._versions = shard, None, None, []
            told = allgather_object(self._expectations(shard), f"{NAME}.expectations", options.process_set)
            self._copies_next, scatters = (all(expectations) for expectations in zip(*told, strict=True))
            self._divide(shard, scatters)
        shard.take_back()
        return shard

    def _expectations(self, shard: ParameterShard) -> tuple[bool, bool]:
        """Whether this rank expects commits, and whether a reduce-scatter is faster here than an allreduce.

        The latter is so where no gradient can travel during backward, and each rank has a part of each batch.
        """
        engine, ranks = basics.engine(), self._options.process_set.size() or 1
        is_balanced = ranks == 2 or shard.nbytes <= SCATTERED_BYTES
        return self._expects_commits, engine.patient and is_balanced and shard.is_on_one_host

    def _divide(self, shard: ParameterShard, scatters: bool) -> None:
        """From the next step on, gradients are reduce-scattered, if this ``scatters``."""
        lone = self._combiner.lone() if scatters else []
        self._division = {parameter: shard.portions(parameter) for parameter in lone}
        self._combiner.sends_ahead = not scatters

    def _take_state(self, shard: ParameterShard) -> None:
        """Keep this rank's part of the state that has parameters as keys; empty ones came by a look at ``state``."""
        whole = shard.whole if self._is_spread else ()
        given = [each for each in shard.parameters if each in self.state and each not in whole]
        self._is_spread = True
        if not given:
            return
        self._require_shapes()
        pieces: dict[torch.Tensor, list[ParameterPart]] = defaultdict(list)
        for piece in shard.pieces:
            pieces[piece.parameter].append(piece)
        for parameter in given:
            state = self.state.pop(parameter)
            if state:
                self.state.update({piece.tensor: cut_state(state, piece) for piece in pieces[parameter]})

    def _require_shapes(self) -> None:
        if is_element_wise(self._kind):
            for parameter, name in self._parameter_names.items():
                require_shapes(self.state.get(parameter, {}), parameter, name)

    @property
    def _kind(self) -> type[torch.optim.Optimizer]:
        kind: type[torch.optim.Optimizer] = type(self).__bases__[1]
        return kind

    @contextmanager
    def _reduced_to(self, shard: ParameterShard) -> Iterator[None]:
        """Inside, the parameters of the optimizer are the pieces of ``shard``, and it has no hooks."""
        groups = self.param_groups
        hooks = self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks
        pieces = {piece.parameter: piece for piece in shard.pieces}
        try:
            for piece in shard.pieces:
                piece.take_gradient(self._options.sparse_as_dense)
            self.param_groups = [_reduced(group, pieces) for group in groups]
            self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
            yield
        finally:
            self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = hooks
            reduced, self.param_groups = self.param_groups, groups
            for group, changed in zip(groups, reduced, strict=True):
                group.update({key: value for key, value in changed.items() if key not in LISTS})
            for piece in shard.pieces:
                piece.drop_gradient()
            for parameter in self._scattered:
                parameter.grad = None
            self._scattered = ()

    # The state of all.

    def _own_parts(self) -> list[StatePart]:
        """The parts of the state on this rank; InvalidRequestError if the other ranks with the rest are gone."""
        shard = self._shard
        if shard is None or not self._is_spread:
            return []
        if not (basics.is_initialized() and shard.engine is basics.engine()):
            raise InvalidRequestError(
                "the state of the optimizer lies in shards on the ranks of a world that has ended; call "
                "load_state_dict() with a full state, or make the optimizer anew"
            )
        places = {parameter: place for place, parameter in enumerate(shard.parameters)}
        return [
            StatePart(places[piece.parameter], piece.start, piece.stop, mapped(state, _on_host))
            for piece in shard.pieces
            if (state := self.state.get(piece.tensor))
        ]

    def _joined(self, gathered: Sequence[Sequence[StatePart]]) -> State:
        """The state by parameter; entries that belong to no parameter are those of this rank."""
        parameters = [] if self._shard is None else self._shard.parameters
        return {**joined_states(parameters, gathered), **self._others()}

    def _others(self) -> State:
        return {key: value for key, value in self.state.items() if not isinstance(key, torch.Tensor)}

    def _gathered(self) -> Sequence[Sequence[StatePart]]:
        return allgather_object(self._own_parts(), f"{NAME}.state", self._options.process_set)

    def unite(self) -> None:
        """Let each rank have the full state, by parameter, if it lies in shards. A collective then."""
        if self._is_spread:
            whole = self._joined(self._gathered())
            self._hold(whole)
        self._shard = None

    def _hold(self, state: State) -> None:
        """``state`` has parameters as keys."""
        self.state.clear()
        self.state.update(state)
        self._is_spread = False

    @property
    def is_spread(self) -> bool:
        """Whether this rank has its part of the state only."""
        return self._is_spread

    @property
    def is_divided(self) -> bool:
        """Whether other ranks update parts of the parameters: they may do so before this rank has made a step."""
        return self._is_spread or self._shard is not None

    def expect_commits(self) -> None:
        """An elastic state has this optimizer from now on: it will call :meth:`keep_parts` for its commits."""
        self._expects_commits = True

    def keep_parts(self) -> None:
        """For a commit, keep a copy of the state where each rank finds all of it, also when others are lost.

        A collective, if the state is spread. A step after a commit makes the copy already; it is made again where the
        script has changed values since on some rank. Raises as ``RankCopies.keep``. If a rank is lost here, a copy of
        this rank that nothing has changed counts: all ranks have ended its step.
        """
        shard = self._shard
        if shard is None or not self._is_spread:
            return
        kept = self._kept
        is_kept = kept is not None and kept.steps == self._steps and list(self._marks) == self._present_marks()
        try:
            told = allgather_object(is_kept, f"{NAME}.is_kept", self._options.process_set)
        except HorovodInternalError:
            if not is_kept:
                raise
            return
        if not all(told):
            self._keep(self._packed_parts(shard), shard, self._steps)
            self._marks = self._present_marks()
        self._copies_next = True  # there will probably be a commit after the next step, too

    def _present_marks(self) -> list[tuple[int, int]]:
        """They change with each change of parameters and state by hand."""
        states = [each for state in self.state.values() if isinstance(state, dict) for each in state.values()]
        tensors = [each for each in (*self._parameters(), *states) if isinstance(each, torch.Tensor)]
        return [(id(each), each._version) for each in tensors]

    def _present_copies(self) -> RankCopies:
        if self._copies is None:
            self._copies = RankCopies(f"{NAME}.copies", self._options.process_set, self._options.redundancy)
        return self._copies

    def _packed_parts(self, shard: ParameterShard) -> Packed:
        memory = shard.own_memory if self._present_copies().is_on_one_host else None
        return Packed.of(mapped((memory, self._own_parts()), packed_tensor))

    def _keep(self, packed: Packed, shard: ParameterShard, steps: int) -> None:
        self._kept = None  # a copy that is in no commit may be overwritten
        copy = self._present_copies().keep(packed)
        included = shard.parameters if packed.value[0] is not None else ()
        self._kept = KeptState(steps, copy, shard, deepcopy(self._others()), included)

    def kept_rows(self) -> Mapping[RowId, Bytes]:
        """The parts of ranks, of this world or the last one, of which this rank keeps copies."""
        return {} if self._copies is None else self._copies.rows()

    @property
    def kept_state(self) -> KeptState:
        """The copy that :meth:`keep_parts` has made of the present state."""
        if self._kept is None or self._kept.steps != self._steps:
            raise InvalidRequestError(
                "a sharded optimizer that has made steps has its state in parts; make the elastic state before the "
                "first step, or call optimizer.load_state_dict(optimizer.state_dict()) on all ranks before"
            )
        return self._kept

    def release(self) -> None:
        """This rank is about to get the full state: end the present division, whatever other ranks have."""
        self.unshare_parameters()
        self._shard, self._copies, self._kept, self._is_spread = None, None, None, False
        self._copies_next = False

    def give_way(self, root_rank: int) -> None:
        """All ranks are about to take the state of ``root_rank``: let that rank have all of it. A collective."""
        process_set = self._options.process_set
        if not self._has_company() or root_rank not in (process_set.ranks or ()):
            return
        spread = allgather_object(self._is_spread, f"{NAME}.is_spread", process_set)
        if all(spread):
            self.unite()
        elif spread[(process_set.ranks or []).index(root_rank)]:
            raise InvalidRequestError(
                "the state lies in shards, and the part of some rank is gone, because it has loaded another state; "
                f"load that on rank {root_rank}, which sends it, or on all ranks"
            )
        elif self._is_spread:
            self._hold({})

    @override
    def state_dict(self) -> dict[str, Any]:
        """The full state, in the format of the wrapped optimizer, on every rank.

        After the first step this is a collective: all ranks call it. See :func:`full_state_dict` for one rank only.
        """
        return self._with_state(self._joined(self._gathered())) if self._is_spread else super().state_dict()

    def state_dict_on(self, root_rank: int) -> dict[str, Any] | None:
        """The full state on the global rank ``root_rank``, None on the others. A collective after the first step."""
        process_set = self._options.process_set
        if root_rank not in (process_set.ranks or [root_rank]):
            raise InvalidRequestError(f"root_rank={root_rank} is not one of the ranks {process_set.ranks}; give one")
        if not self._is_spread:
            return super().state_dict() if basics.rank() == root_rank else None
        gathered = gather_object(self._own_parts(), root_rank, f"{NAME}.state", process_set)
        return None if gathered is None else self._with_state(self._joined(gathered))

    def _with_state(self, state: State) -> dict[str, Any]:
        own = self.state
        self.state = defaultdict(dict, state)
        try:
            return super().state_dict()
        finally:
            self.state = own

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a full state; each rank keeps its part from the next step on. All ranks load the same one.

        InvalidRequestError for that of another model, and the errors of the wrapped optimizer; then nothing changes.
        """
        before = self.state, [dict(group) for group in self.param_groups], self._is_spread
        self.state, self._is_spread, self._kept = defaultdict(dict), False, None
        try:
            super().load_state_dict(state_dict)
            self._require_shapes()
        except BaseException:
            self.state, self.param_groups, self._is_spread = before
            raise


def _reduced(group: dict[str, Any], pieces: Mapping[torch.Tensor, ParameterPart]) -> dict[str, Any]:
    """``group`` with the parts in ``pieces``; those of a parameter, such as its name, go with it."""
    places = [place for place, parameter in enumerate(group["params"]) if parameter in pieces]
    lists = {key: [group[key][place] for place in places] for key in LISTS if key in group}
    return {**group, **lists, "params": [pieces[parameter].tensor for parameter in lists["params"]]}


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value
