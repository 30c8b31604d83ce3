"""A function and its arguments, once in the object store for all workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import ObjectRef

from executors.arguments import check_arguments

__all__ = ["Call", "store"]


@dataclass(frozen=True, slots=True)
class Call:
    """``function(*args, **kwargs)``, still to be done."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, function: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> Call:
        """A call with optional arguments. Raises TypeError when it cannot be made."""
        if not callable(function):
            raise TypeError(f"{function!r} is not a function; give a callable, and its arguments separately")
        return cls(function, *check_arguments(args, kwargs))

    @property
    def name(self) -> str:
        """The function as a person calls it."""
        return getattr(self.function, "__qualname__", None) or repr(self.function)

    def __call__(self, *first: object) -> Any:
        return self.function(*first, *self.args, **self.kwargs)


def store(call: Call) -> ObjectRef[Call]:
    """Put ``call`` into the object store, where all workers of a node share one copy of its arrays.

    Raises TypeError that names the function when it cannot be pickled.
    """
    try:
        return ray.put(call)
    except Exception as error:
        reason = error.__cause__ or error
        raise TypeError(
            f"{call.name} cannot be sent to the workers: {_culprit(call)} cannot be pickled ({reason}); create locks, "
            "files and connections inside the function"
        ) from error


def _culprit(call: Call) -> str:
    parts: dict[str, object] = {"the function, or what it refers to,": call.function}
    parts |= {f"argument {index}": value for index, value in enumerate(call.args)}
    parts |= {f"argument {name!r}": value for name, value in call.kwargs.items()}
    return next((name for name, value in parts.items() if not _fits(value)), "it")


def _fits(value: object) -> bool:
    try:
        ray.cloudpickle.dumps(value)
    except Exception:  # noqa: BLE001  pickling runs code of the user
        return False
    return True
