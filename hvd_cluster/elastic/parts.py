"""The parts of a state: what a commit copies, what it need not copy, and how the values come from another rank."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from collectives import InvalidRequestError, override
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import global_process_set
from hvd_cluster.ops.objects import described
from hvd_cluster.ops.rank_copies import Bytes, Kept, RowId
from hvd_cluster.ops.structures import broadcast_structure


class Part(ABC):
    """Values of a state that are kept, and sent, in one way.

    *Light* are those that may change at any time, and are small: each commit copies them. *Heavy* are those that
    change only when an optimizer steps, or by hand, such as parameters: few commits copy them. A copy is not changed
    any more, and outlives later ones.
    """

    @abstractmethod
    def light(self) -> Any:
        """A copy of the light values."""

    @abstractmethod
    def put_light(self, light: Any) -> None:
        """Go back to a result of :meth:`light`."""

    def heavy(self, earlier: Any) -> Any:
        """A copy of the heavy values, in the memory of the ``earlier`` copy where that fits."""
        return None

    def put_heavy(self, heavy: Any) -> None:
        """Go back to a result of :meth:`heavy`."""
        return

    def secure(self) -> None:
        """Keep what only this rank has where others find it, for the copy that follows. A collective, if it does so."""
        return

    @property
    def is_complete(self) -> bool:
        """Whether this rank has all heavy values, and no other rank changes them. Otherwise only a copy counts."""
        return True

    @property
    def needs_copies(self) -> bool:
        """Whether each commit makes a copy, because a loss in the next step may leave values of no commit."""
        return False

    def partial(self, heavy: Any) -> Kept | None:
        """The copy in ``heavy``, a result of :meth:`heavy`, if this rank has only some rows of it."""
        return None

    def rows(self) -> Mapping[RowId, Bytes]:
        """The rows of copies that this rank can give to others."""
        return {}

    def included(self) -> Sequence[object]:
        """The objects of other parts, such as parameters, whose values are in the next :meth:`heavy` of this one."""
        return ()

    def leave_out(self, included: Sequence[object]) -> None:
        """Copy none of these objects in the next :meth:`heavy`."""
        return

    def versions(self) -> int:
        """A number that grows with changes of heavy values by hand; those of a step that still runs are waited for."""
        return 0

    @property
    def tells(self) -> bool:
        """Whether :meth:`versions` and the optimizers tell of each change of heavy values."""
        return True

    @property
    def survives(self) -> bool:
        """Whether heavy values are still there after a step whose collective has failed."""
        return True

    def layout(self) -> list[tuple[str, str]]:
        """The entries that all ranks must have alike, each with its description."""
        return []

    @abstractmethod
    def share(self, root_rank: int) -> None:
        """Take the values of the rank ``root_rank``, light and heavy. All ranks call this; that rank sends them."""

    def share_light(self, root_rank: int) -> None:
        """As :meth:`share`, where the heavy values of all ranks are equal."""
        self.share(root_rank)

    def forget(self) -> None:
        """Drop what a cycle that was cut off has left, such as gradients."""
        return

    def begin_world(self) -> None:
        """The number of ranks, or this rank's own number, may be another one from now on."""
        return

    @property
    def keeps_one_copy(self) -> bool:
        """Whether :meth:`light` overwrites its earlier result, so that only the last one can be put back."""
        return False

    @property
    def gives(self) -> bool:
        """Whether this rank can be the one that sends."""
        return True


class Attributes(Part):
    """The plain attributes of a state; ``values`` gives them by name, and ``put`` sets them."""

    def __init__(self, values: Callable[[], Mapping[str, Any]], put: Callable[[Mapping[str, Any]], None]) -> None:
        self._values = values
        self._put = put

    @override
    def light(self) -> dict[str, Any]:
        """InvalidRequestError if an attribute cannot be copied."""
        values: dict[str, Any] = _tried(copy.deepcopy, dict(self._values()), "copied")
        return values

    @override
    def put_light(self, light: Mapping[str, Any]) -> None:
        self._put(copy.deepcopy(light))

    @override
    def layout(self) -> list[tuple[str, str]]:
        return [(name, "an attribute") for name in sorted(self._values())]

    @override
    def share(self, root_rank: int) -> None:
        """InvalidRequestError on all ranks if an attribute cannot be pickled."""
        name = "state.attributes"
        pickled = broadcast_structure(self._pickled, "the state", root_rank, name, global_process_set)
        if basics.rank() != root_rank:
            self._put(cloudpickle.loads(pickled))

    def _pickled(self) -> bytes:
        pickled: bytes = _tried(cloudpickle.dumps, dict(self._values()), "pickled")
        return pickled


def _tried(call: Callable[[Any], Any], values: dict[str, Any], done: str) -> Any:
    """``call(values)``; if that fails, InvalidRequestError with the name of the value that is to blame."""
    try:
        return call(values)
    except Exception as error:
        raise _blamed(call, values, done, error) from error


def _blamed(call: Callable[[Any], Any], values: dict[str, Any], done: str, error: Exception) -> InvalidRequestError:
    for name, value in values.items():
        try:
            call(value)
        except Exception as reason:  # noqa: BLE001  code of the user
            return InvalidRequestError(
                f"state.{name}, a {type(value).__name__}, cannot be {done} ({described(reason)}); keep plain data in "
                "the state, and make locks, files and connections where they are used"
            )
    return InvalidRequestError(f"the attributes of the state cannot be {done} together ({described(error)})")
