"""Tensors inside dicts, lists and tuples, such as the states of models and optimizers. Shared by all bindings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from collectives import InvalidRequestError
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.ops.objects import broadcast_object, described

T = TypeVar("T")


def remade(value: Any, entries: list[Any]) -> Any:
    """A list or tuple like ``value`` of other entries."""
    return value._make(entries) if hasattr(value, "_make") else type(value)(entries)


def plain(value: Any, entries: list[Any]) -> Any:
    """As :func:`remade`, with plain tuples for named tuples."""
    return tuple(entries) if isinstance(value, tuple) else type(value)(entries)


def mapped(value: Any, change: Callable[[Any], Any], remake: Callable[[Any, list[Any]], Any] = remade) -> Any:
    """``value`` with every leaf of its dicts, lists and tuples changed, in order."""
    if isinstance(value, dict):
        return {key: mapped(entry, change, remake) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return remake(value, [mapped(entry, change, remake) for entry in value])
    return change(value)


def paired(value: Any, other: Any, change: Callable[[Any, Any], Any]) -> Any:
    """``value`` with every leaf replaced by ``change(leaf, partner)``; the partner has the same place in ``other``."""
    if isinstance(value, dict):
        return {key: paired(entry, other[key], change) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return remade(value, [paired(*pair, change) for pair in zip(value, other, strict=True)])
    return change(value, other)


def named(params: Any, tensor_type: type[T], advice: str) -> list[tuple[str, T]]:
    """The tensors of ``params`` with their names: a mapping, (name, tensor) pairs, or tensors, named by position.

    A None is skipped. Mappings are sorted by name, so that all ranks have one order. InvalidRequestError for anything
    else; for an object that has no tensors it ends with ``advice``.
    """
    pairs: list[tuple[Any, Any]]
    if isinstance(params, Mapping):
        pairs = sorted(params.items(), key=lambda pair: str(pair[0]))
    elif isinstance(params, (str, tensor_type)) or not isinstance(params, Iterable):
        raise InvalidRequestError(f"params is a {type(params).__name__}; {advice}")
    else:
        pairs = [_as_pair(number, entry) for number, entry in enumerate(params)]
    return [(name, _require_tensor(name, value, tensor_type)) for name, value in pairs if value is not None]


def _as_pair(number: int, entry: Any) -> tuple[Any, Any]:
    return entry if isinstance(entry, tuple) and len(entry) == 2 else (number, entry)


def _require_tensor(name: Any, value: Any, tensor_type: type[T]) -> T:
    if not isinstance(value, tensor_type):
        raise InvalidRequestError(
            f"params[{name!r}] is a {type(value).__name__}; only tensors are overwritten in place, other values go "
            "through broadcast_object"
        )
    return value


@dataclass(frozen=True)
class _Failure:
    """Why the root has no object to send: other ranks already wait for it. ``error`` stays on the root."""

    text: str
    error: BaseException | None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Failure, (self.text, None)


def broadcast_structure(make: Callable[[], T], subject: str, root_rank: int, name: str, process_set: ProcessSet) -> T:
    """The object that ``make`` returns on the global rank ``root_rank``, where alone it is called.

    It may be code of the user. If it raises, InvalidRequestError on all ranks says that ``subject`` cannot be read.
    """
    structure: Any = _made(make, subject) if basics.rank() == root_rank else None
    structure = broadcast_object(structure, root_rank, name, process_set)
    if isinstance(structure, _Failure):
        raise InvalidRequestError(f"rank {root_rank}: {structure.text}") from structure.error
    result: T = structure
    return result


def _made(make: Callable[[], T], subject: str) -> T | _Failure:
    try:
        return make()
    except Exception as error:  # noqa: BLE001  code of the user: subclasses of optimizers, and hooks
        return _Failure(f"{subject} cannot be read ({described(error)})", error)
