"""How a change of variables is noticed: each backend has a way of its own, or none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import keras

__all__ = ["Changes", "changes"]


class Changes(ABC):
    """Watches the variables of one handler."""

    @abstractmethod
    def count(self, variables: Sequence[Any]) -> int:
        """A number that grows with changes of ``variables`` since the last call."""


class _ByVersion(Changes):
    """torch counts the changes of each tensor in place."""

    def count(self, variables: Sequence[Any]) -> int:
        """See :class:`Changes`."""
        return sum([variable.value._version for variable in variables])


class _ByIdentity(Changes):
    """An array of JAX never changes: a changed variable has another one. A step that fails has deleted its inputs."""

    def __init__(self) -> None:
        self._count = 0
        self._seen: list[Any] = []

    def count(self, variables: Sequence[Any]) -> int:
        """See :class:`Changes`."""
        present = [variable._value for variable in variables]  # ``value`` makes an array where Keras has taken it away
        if len(present) != len(self._seen) or any(map(_differ, present, self._seen)):
            self._count += 1
        self._seen = present
        return self._count


def _differ(present: Any, before: Any) -> bool:
    return present is None or present is not before or present.is_deleted()


class _Unknown(Changes):
    """TensorFlow does not tell. The optimizer does, see ``steps``; its iterations tell of one that does not."""

    def count(self, variables: Sequence[Any]) -> int:
        """See :class:`Changes`."""
        return 0


_KINDS: dict[str, type[Changes]] = {"torch": _ByVersion, "jax": _ByIdentity}


def changes() -> Changes:
    """For the backend of Keras."""
    return _KINDS.get(keras.backend.backend(), _Unknown)()
