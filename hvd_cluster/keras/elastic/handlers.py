"""How models and optimizers of Keras are kept and sent."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from collectives import override
from hvd_cluster.core import basics
from hvd_cluster.elastic.handlers import SnapshotHandler
from hvd_cluster.keras import variables
from hvd_cluster.keras.elastic.changes import changes
from hvd_cluster.keras.optimizer.distributed import Distributed
from hvd_cluster.keras.optimizer.passes import Passes

Copies = dict[int, npt.NDArray[Any]]
"""By the position of the variable."""

_IDLE = -1
"""In the place of a position: the number of idle passes."""


class VariablesHandler(SnapshotHandler):
    """For an object with variables, some of which are heavy: those that change in steps only."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._changes = changes()

    @property
    @abstractmethod
    def name(self) -> str:
        """The first part of the names of its broadcasts."""

    @abstractmethod
    def variables(self) -> Sequence[Any]:
        """All of them, in one order."""

    @abstractmethod
    def is_heavy(self, variable: Any) -> bool:
        """Whether it changes in steps only."""

    def _numbered(self, heavy: bool) -> list[tuple[int, Any]]:
        return [pair for pair in enumerate(self.variables()) if self.is_heavy(pair[1]) is heavy]

    @override
    def light(self) -> Copies:
        return {number: variables.copied(each) for number, each in self._numbered(heavy=False)}

    @override
    def put_light(self, light: Copies) -> None:
        self._put(light)

    @override
    def heavy(self, earlier: Copies | None) -> Copies:
        earlier = earlier or {}
        return {number: variables.copied(each, earlier.get(number)) for number, each in self._numbered(heavy=True)}

    @override
    def put_heavy(self, heavy: Copies) -> None:
        self._put(heavy)

    def _put(self, copies: Copies) -> None:
        for number, variable in enumerate(self.variables()):
            if number in copies:
                variables.put(variable, copies[number])

    @override
    def versions(self) -> int:
        return self._changes.count([variable for _, variable in self._numbered(heavy=True)])

    @property
    @override
    def tells(self) -> bool:
        return self._changes.tells

    @property
    @override
    def survives(self) -> bool:
        return self._changes.survive()

    @override
    def layout(self) -> list[tuple[str, str]]:
        """Without the names of variables: Keras numbers them through the life of a process."""
        return [
            (f"{self.name} variable {number}", variables.description(each))
            for number, each in enumerate(self.variables())
        ]

    @override
    def share(self, root_rank: int) -> None:
        variables.broadcast(self.variables(), root_rank, f"state.{self.name}")

    @override
    def share_light(self, root_rank: int) -> None:
        light = [variable for _, variable in self._numbered(heavy=False)]
        variables.broadcast(light, root_rank, f"state.{self.name}.light")


class ModelHandler(VariablesHandler):
    """For models: trainable variables are heavy; moving averages and seeds, which a forward pass changes, are light.

    Seeds stay those of their rank: ranks drop other units.
    """

    value: keras.Model

    def __init__(self, value: keras.Model) -> None:
        super().__init__(value)
        self._seeds: list[tuple[Any, npt.NDArray[Any]]] = []

    @property
    @override
    def name(self) -> str:
        return "model"

    @override
    def variables(self) -> Sequence[Any]:
        """Without those of metrics."""
        metrics = {id(variable) for variable in self.value.metrics_variables}
        return [variable for variable in self.value.variables if id(variable) not in metrics]

    @override
    def is_heavy(self, variable: Any) -> bool:
        return bool(variable.trainable)

    @override
    def light(self) -> Copies:
        numbered, shared = self._numbered(heavy=False), self._shared()
        light = {number: variables.copied(each) for number, each in numbered}
        self._seeds = [(each, light[number]) for number, each in numbered if id(each) not in shared]
        return light

    def _shared(self) -> set[int]:
        return {id(variable) for variable in self.value.weights}

    @override
    def share(self, root_rank: int) -> None:
        """A rank that gets a state goes back to its own seeds of the last commit."""
        shared = self._shared()
        own = [variable for variable in self.variables() if id(variable) in shared]
        variables.broadcast(own, root_rank, f"state.{self.name}")
        self._put_seeds(root_rank)

    @override
    def share_light(self, root_rank: int) -> None:
        shared = self._shared()
        own = [variable for _, variable in self._numbered(heavy=False) if id(variable) in shared]
        variables.broadcast(own, root_rank, f"state.{self.name}.light")
        self._put_seeds(root_rank)

    def _put_seeds(self, root_rank: int) -> None:
        if basics.rank() != root_rank:
            for variable, copy in self._seeds:
                variables.put(variable, copy)


class OptimizerHandler(VariablesHandler):
    """For optimizers, wrapped or not: single numbers such as the learning rate are light, arrays are heavy."""

    value: keras.optimizers.Optimizer

    @property
    @override
    def name(self) -> str:
        return type(self.value).__name__

    @override
    def variables(self) -> Sequence[Any]:
        found: Sequence[Any] = self.value.variables
        return found

    @override
    def is_heavy(self, variable: Any) -> bool:
        return len(variable.shape) > 0

    @override
    def forget(self) -> None:
        """Gradients that ``backward_passes_per_step`` has added up on this rank are dropped."""
        if self._passes is not None:
            self._passes.clear()

    @override
    def light(self) -> Copies:
        passes = self._passes
        return super().light() if passes is None else {**super().light(), _IDLE: np.array(passes.idle)}

    @override
    def put_light(self, light: Copies) -> None:
        super().put_light(light)
        if self._passes is not None and _IDLE in light:
            self._passes.idle = int(light[_IDLE])

    @override
    def versions(self) -> int:
        """A pass that only adds up gradients is an iteration, but no change."""
        steps = 0
        if keras.backend.backend() == "tensorflow":
            iterations = int(variables.view(self._inner._iterations))
            steps = iterations - (0 if self._passes is None else self._passes.idle)
        return super().versions() + steps

    @property
    def _inner(self) -> Any:
        """The optimizer that counts: ``compile()`` may have put a LossScaleOptimizer around it."""
        return getattr(self.value, "inner_optimizer", self.value)

    @property
    def _passes(self) -> Passes | None:
        found = (each._exchange.passes for each in (self.value, self._inner) if isinstance(each, Distributed))
        return next(found, None)
