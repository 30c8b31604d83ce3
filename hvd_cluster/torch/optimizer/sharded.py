"""The optimizer of which each rank updates a shard: its part of the parameters, with the state of that part only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from collectives import InvalidRequestError, Operation, override
from hvd_cluster.core import basics
from hvd_cluster.ops.objects import allgather_object, described, gather_object
from hvd_cluster.ops.refusals import refuse
from hvd_cluster.torch.optimizer.gradient_optimizer import HookedOptimizer
from hvd_cluster.torch.optimizer.inventory import Names
from hvd_cluster.torch.optimizer.shard import (
    NAME,
    Piece,
    Shard,
    StatePart,
    check,
    cut_state,
    is_element_wise,
    joined_state,
    require_shapes,
)

State = dict[torch.Tensor, Any]


class ShardedOptimizer(HookedOptimizer):
    """The first base of a wrapped optimizer's class, with ``sharded``; the second is the class of the optimizer.

    Gradients are combined as without ``sharded``, so ``.grad`` is whole on all ranks. ``state`` has the parameters of
    the optimizer as keys before the first step, and after that the pieces of this rank.
    """

    _shard: Shard | None

    @override
    def _distribute(self, names: Names, passes: int, options: Any) -> None:
        check(self)
        self._shard = None
        super()._distribute(names, passes, options)

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As in HookedOptimizer. The closure sees all parameters, so it runs before the step of the shard."""
        if closure is None:
            return super().step()
        loss = self._evaluate(closure)
        self._combined_for_step = True
        super().step()
        return loss

    step.hooked = True  # type: ignore[attr-defined]

    @override
    def _update(self, closure: Callable[[], Any] | None = None) -> Any:
        if not self._has_company():
            return super()._update(closure)
        shard = self._present_shard()
        try:
            self._take_state(shard)
            with self._reduced_to(shard):
                result = super()._update(closure)
        except Exception as error:
            problem = InvalidRequestError(f"the step of this rank failed ({described(error)})")
            refuse(problem, Operation.ALLGATHER, NAME, self._options.process_set, None)
            raise
        shard.publish()
        return result

    def _has_company(self) -> bool:
        process_set = self._options.process_set
        return bool(process_set.included()) and (process_set.size() or 1) > 1

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    # The shard.

    def _present_shard(self) -> Shard:
        """The shard of the parameters that the optimizer has now; a collective if it is another one than before."""
        parameters, shard = self._parameters(), self._shard
        if shard is None or shard.engine is not basics.engine() or not shard.fits(parameters):
            self.unite()
            names, options = self._parameter_names, self._options
            shard = Shard(parameters, names, is_element_wise(self._kind), options.sharded, options.process_set)
            self._shard = shard
        return shard

    def _take_state(self, shard: Shard) -> None:
        """Keep this rank's part of the state that has parameters as keys."""
        given = [parameter for parameter in shard.parameters if parameter in self.state]
        if not given:
            return
        self._require_shapes()
        pieces: dict[torch.Tensor, list[Piece]] = defaultdict(list)
        for piece in shard.pieces:
            pieces[piece.parameter].append(piece)
        for parameter in given:
            state = self.state.pop(parameter)
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
    def _reduced_to(self, shard: Shard) -> Iterator[None]:
        """Inside, the parameters of the optimizer are the pieces of ``shard``."""
        groups = self.param_groups
        places = {parameter: place for place, group in enumerate(groups) for parameter in group["params"]}
        pieces: dict[int, list[torch.Tensor]] = defaultdict(list)
        for piece in shard.pieces:
            piece.take_gradient(self._options.sparse_as_dense)
            pieces[places[piece.parameter]].append(piece.tensor)
        reduced = {place: {**groups[place], "params": tensors} for place, tensors in sorted(pieces.items())}
        self.param_groups = list(reduced.values())
        try:
            yield
        finally:
            self.param_groups = groups
            for place, group in reduced.items():
                groups[place].update({key: value for key, value in group.items() if key != "params"})
            for piece in shard.pieces:
                piece.tensor.grad = None

    # The state of all.

    def _own_parts(self) -> list[StatePart]:
        """What this rank has of the state; InvalidRequestError if the other ranks with the rest are gone."""
        shard = self._shard
        if shard is None:
            return []
        places = {parameter: place for place, parameter in enumerate(shard.parameters)}
        parts = [
            StatePart(places[piece.parameter], piece.start, piece.stop, self.state[piece.tensor])
            for piece in shard.pieces
            if piece.tensor in self.state
        ]
        if parts and shard.engine is not basics.engine():
            raise InvalidRequestError(
                "the state of the optimizer lies in shards on the ranks of a world that has ended; call "
                "load_state_dict() with a full state, or make the optimizer anew"
            )
        return parts

    def _is_spread(self) -> bool:
        """Whether the state lies in shards; then its own keys are no parameters."""
        return self._shard is not None and not any(parameter in self.state for parameter in self._parameters())

    def _joined(self, gathered: Sequence[Sequence[StatePart]]) -> State:
        assert self._shard is not None
        parts: dict[int, list[StatePart]] = defaultdict(list)
        for part in [part for each in gathered for part in each]:
            parts[part.number].append(part)
        parameters = self._shard.parameters
        return {parameters[index]: joined_state(parameters[index], found) for index, found in sorted(parts.items())}

    def unite(self) -> None:
        """Let each rank have the full state, by parameter, if it lies in shards. A collective then."""
        if self._shard is not None and self._is_spread():
            whole = self._joined(allgather_object(self._own_parts(), f"{NAME}.state", self._options.process_set))
            self.state.clear()
            self.state.update(whole)
        self._shard = None

    @override
    def state_dict(self) -> dict[str, Any]:
        """The full state, in the format of the wrapped optimizer, on every rank.

        After the first step this is a collective: all ranks call it. See :func:`full_state_dict` for one rank only.
        """
        if not (self._has_company() and self._is_spread()):
            return super().state_dict()
        return self._with_state(self._joined(allgather_object(self._own_parts(), f"{NAME}.state", self._set)))

    def state_dict_on(self, root_rank: int) -> dict[str, Any] | None:
        """The full state on the global rank ``root_rank``, None on the others. A collective after the first step."""
        if not (self._has_company() and self._is_spread()):
            return super().state_dict() if basics.rank() == root_rank else None
        gathered = gather_object(self._own_parts(), root_rank, f"{NAME}.state", self._set)
        return None if gathered is None else self._with_state(self._joined(gathered))

    @property
    def _set(self) -> Any:
        return self._options.process_set

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
        own = self.state
        self.state = defaultdict(dict)
        try:
            super().load_state_dict(state_dict)
            self._require_shapes()
        except BaseException:
            self.state = own
            raise
