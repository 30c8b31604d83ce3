"""States some of whose values have handlers, such as models; and the handlers that need no framework."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from collectives import override
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import global_process_set
from hvd_cluster.elastic.parts import Part
from hvd_cluster.elastic.sampler import ElasticPartition
from hvd_cluster.elastic.state import ObjectState
from hvd_cluster.ops.objects import broadcast_object
from hvd_cluster.ops.structures import broadcast_structure


class StateHandler(Part):
    """Keeps and sends one ``value`` of a state. Write your own as a subclass with :meth:`save` and its two opposites.

    Such a handler has one copy, which each commit makes again, and sends its value from rank 0.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    @abstractmethod
    def save(self) -> None:
        """Keep the present value."""

    @abstractmethod
    def restore(self) -> None:
        """Go back to the value that was kept last."""

    @abstractmethod
    def sync(self) -> None:
        """Give all ranks the value of rank 0."""

    def set_value(self, value: Any) -> None:
        """From now on this is the value; it is kept at once."""
        self.value = value
        self.save()

    def require_replaceable(self) -> None:
        """InvalidRequestError if the last commit needs this value, so that no other one can take its place now."""
        return

    @override
    def light(self) -> Any:
        self.save()

    @override
    def put_light(self, light: Any) -> None:
        self.restore()

    @override
    def share(self, root_rank: int) -> None:
        self.sync()

    @property
    @override
    def keeps_one_copy(self) -> bool:
        return True

    @property
    @override
    def gives(self) -> bool:
        return basics.rank() == 0


class SnapshotHandler(StateHandler):
    """A handler whose copies are values, and which sends from any rank."""

    _saved: tuple[Any, Any] | None = None

    @override
    def save(self) -> None:
        self._saved = self.light(), self.heavy(None)

    def restore(self) -> None:
        """Nothing happens before the first :meth:`save`."""
        if self._saved is not None:
            light, heavy = self._saved
            self.put_heavy(heavy)
            self.put_light(light)

    @override
    def sync(self) -> None:
        self.share(root_rank=0)

    def set_value(self, value: Any) -> None:
        """The state makes the copy."""
        self.value, self._saved = value, None

    @abstractmethod
    @override
    def light(self) -> Any:
        pass

    @abstractmethod
    @override
    def put_light(self, light: Any) -> None:
        pass

    @abstractmethod
    @override
    def share(self, root_rank: int) -> None:
        pass

    def share_structure(self, noun: str, root_rank: int) -> None:
        """Take the light values of the rank ``root_rank``, which messages call by ``noun``."""
        light = broadcast_structure(self.light, f"the {noun}", root_rank, f"state.{noun}", global_process_set)
        if basics.rank() != root_rank:
            self.put_light(light)

    @property
    @override
    def keeps_one_copy(self) -> bool:
        return False

    @property
    @override
    def gives(self) -> bool:
        return True


class StateDictHandler(SnapshotHandler):
    """For small values with ``state_dict`` and ``load_state_dict``, such as schedulers of learning rates."""

    @override
    def light(self) -> Any:
        return copy.deepcopy(self.value.state_dict())

    @override
    def put_light(self, light: Any) -> None:
        self.value.load_state_dict(copy.deepcopy(light))

    @override
    def share(self, root_rank: int) -> None:
        kind = type(self.value).__name__
        state = broadcast_structure(
            self.value.state_dict, f"the state of the {kind}", root_rank, f"state.{kind}", global_process_set
        )
        if basics.rank() != root_rank:
            self.value.load_state_dict(state)


class EpochHandler(SnapshotHandler):
    """For samplers with ``epoch`` and ``set_epoch``, such as DistributedSampler: the loader keeps the object."""

    @override
    def light(self) -> int:
        epoch: int = self.value.epoch
        return epoch

    @override
    def put_light(self, light: int) -> None:
        self.value.set_epoch(light)

    @override
    def share(self, root_rank: int) -> None:
        self.share_structure("epoch", root_rank)


class SamplerStateHandler(StateDictHandler):
    """For samplers, whose share of the samples depends on the ranks."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        _mark(value)

    @override
    def set_value(self, value: Any) -> None:
        super().set_value(value)
        _mark(value)

    @override
    def begin_world(self) -> None:
        reset = getattr(self.value, "reset", None)
        if reset is not None:
            reset()


def _mark(sampler: Any) -> None:
    if isinstance(sampler, ElasticPartition):
        sampler.is_in_state = True


Registry: TypeAlias = Sequence[tuple[type, Callable[[Any], StateHandler]]]
"""Types of values, each with its handler; the first that fits is taken."""


class HandledState(ObjectState):
    """An :class:`ObjectState` whose values have a handler if the ``registry`` has one for their type.

    A new value that is assigned to an attribute takes the place of the old one, also in the last commit.
    """

    def __init__(self, registry: Registry, get_rank: Callable[[], int] = basics.rank, **kwargs: Any) -> None:
        self._handlers: dict[str, StateHandler] = {}
        self._registry = tuple(registry)
        super().__init__(broadcast_object, get_rank, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        """A value of a state gets a new object: its handler, too."""
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is not None and handler.value is not value:
            handler.require_replaceable()
        super().__setattr__(name, value)
        if name in self.__dict__.get("_names", ()):
            self._handle(name, value)

    def _handle(self, name: str, value: Any) -> None:
        handler = self._handlers.get(name)
        make = next((make for kind, make in self._registry if isinstance(value, kind)), None)
        if handler is None and make is None:
            return
        if make is None:
            del self._handlers[name]
        elif type(handler) is not make or handler is None:
            self._handlers[name] = make(value)
        elif handler.value is not value:
            handler.set_value(value)
        else:
            return
        self._snapshots.replaced(name, "")

    def _values(self) -> Mapping[str, Any]:
        return {name: value for name, value in super()._values().items() if name not in self._handlers}

    def _parts(self) -> Mapping[str, Part]:
        return {"": self._attributes, **dict(sorted(self._handlers.items()))}


class VariableChanges(ABC):
    """Notices changes of the variables of one handler, in the way of a framework.

    ``tells``: whether it notices each change, also one by hand.
    """

    tells = True

    @abstractmethod
    def count(self, variables: Sequence[Any]) -> int:
        """A number that grows with changes of ``variables`` since the last call."""

    def survive(self) -> bool:
        """Whether the variables that were counted last are still there after a step whose collective has failed."""
        return True
