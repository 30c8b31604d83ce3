"""A function with its arguments, as it is sent to the workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from executors.job.arguments import check_arguments

before_loading: list[Callable[[], object]] = []
"""A worker calls these functions before it loads that of a call, whose modules may need them."""


@dataclass(frozen=True, slots=True)
class Call:
    """The call ``function(*args, **kwargs)``, which a worker makes later."""

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
        """The name of the function, for messages."""
        return getattr(self.function, "__qualname__", None) or repr(self.function)

    def __call__(self, *first: object) -> Any:
        return self.function(*first, *self.args, **self.kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _loaded, (_Preparation(), self.function, self.args, self.kwargs)


class _Preparation:
    """The first part of a pickled call, which is loaded before the others."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _prepare, tuple(before_loading)


def _prepare(*functions: Callable[[], object]) -> None:
    for function in functions:
        function()


def _loaded(prepared: object, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    return Call(function, args, kwargs)


def pickle_call(call: Call, dumps: Callable[[object], bytes] = cloudpickle.dumps) -> bytes:
    """``call`` as bytes, for ``pickle.loads``. Raises TypeError that names the object that ``dumps`` cannot pickle."""
    try:
        return dumps(call)
    except Exception as error:
        raise refusal(call, error, dumps) from error


def refusal(call: Call, reason: BaseException, dumps: Callable[[object], object]) -> TypeError:
    """The error that names the part of ``call`` that ``dumps`` cannot pickle, and the ``reason``."""
    return TypeError(
        f"{call.name} cannot be sent to the workers: {_culprit(call, dumps)} cannot be pickled ({reason}); create "
        "locks, files and connections inside the function"
    )


def _culprit(call: Call, dumps: Callable[[object], object]) -> str:
    parts: dict[str, object] = {"the function, or an object that it refers to,": call.function}
    parts |= {f"argument {index}": value for index, value in enumerate(call.args)}
    parts |= {f"argument {name!r}": value for name, value in call.kwargs.items()}
    return next((name for name, value in parts.items() if not _fits(value, dumps)), "it")


def _fits(value: object, dumps: Callable[[object], object]) -> bool:
    try:
        dumps(value)
    except Exception:  # noqa: BLE001  pickling runs code of the user
        return False
    return True
