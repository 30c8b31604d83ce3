"""How a change of variables is noticed: each backend has a way of its own, or none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import keras

__all__ = ["Changes", "changes"]


class Changes(ABC):
    """Watches the variables of one handler.

    ``tells``: whether it notices each change, also one by hand.
    """

    tells = True

    @abstractmethod
    def count(self, variables: Sequence[Any]) -> int:
        """A number that grows with changes of ``variables`` since the last call."""

    def survive(self) -> bool:
        """Whether the variables that were counted last are still there after a step whose collective has failed."""
        return True


class _ByVersion(Changes):
    """torch counts the changes of each tensor in place."""

    def count(self, variables: Sequence[Any]) -> int:
        """See :class:`Changes`."""
        return sum([variable.value._version for variable in variables])


class _Unknown(Changes):
    """TensorFlow does not tell. The optimizer does, see ``steps``; its iterations tell of one that does not."""

    tells = False

    def count(self, variables: Sequence[Any]) -> int:
        """See :class:`Changes`."""
        return 0


def changes() -> Changes:
    """For the backend of Keras."""
    backend = keras.backend.backend()
    if backend == "jax":
        from hvd_cluster.keras.elastic.on_jax import ByIdentity

        return ByIdentity()
    return _ByVersion() if backend == "torch" else _Unknown()
