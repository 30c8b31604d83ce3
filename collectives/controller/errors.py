"""Pure: how an error of the engine travels to the other ranks. One table: the classes, and the data of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from collectives.api import (
    CollectiveTimeoutError,
    EngineError,
    HorovodInternalError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    RefusedCallError,
    SettingsError,
    ShutDownError,
)


@dataclass(frozen=True, slots=True)
class ErrorData:
    """An error in a form that msgpack carries: the name of its class, its text, and its data."""

    kind: str
    text: str
    details: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class _Codec:
    """``pack`` reads the data of an error; ``unpack`` makes the error from its text and data."""

    pack: Callable[[Any], tuple[Any, ...]]
    unpack: Callable[..., HorovodInternalError]


def _text_only(kind: Callable[[str], HorovodInternalError]) -> _Codec:
    return _Codec(lambda error: (), kind)


def _mismatch(kind: type[MismatchError]) -> _Codec:
    return _Codec(
        lambda error: (error.tensor, error.property, list(error.values.items())),
        lambda text, tensor, property, values: kind(text, tensor, property, dict(map(tuple, values))),
    )


_CODECS: dict[type[HorovodInternalError], _Codec] = {
    HorovodInternalError: _text_only(HorovodInternalError),
    MismatchError: _mismatch(MismatchError),
    RefusedCallError: _mismatch(RefusedCallError),
    PeerLostError: _Codec(lambda error: (error.ranks, error.hosts, error.has_ended), PeerLostError),
    CollectiveTimeoutError: _Codec(lambda error: (error.ranks,), CollectiveTimeoutError),
    ShutDownError: _text_only(ShutDownError),
    NotInitializedError: _text_only(NotInitializedError),
    EngineError: _text_only(EngineError),
}
_KINDS = {kind.__name__: codec for kind, codec in _CODECS.items()}


def for_other_ranks(error: BaseException, who: str = "a rank") -> HorovodInternalError:
    """The error for the other ranks when ``who`` ends with ``error``."""
    if isinstance(error, HorovodInternalError):
        return error
    if isinstance(error, Exception):
        text = str(error) if isinstance(error, SettingsError) else f"unexpected {type(error).__name__}: {error}"
        failure = EngineError(f"{who}: {text}")
        failure.__cause__ = error
        return failure
    return ShutDownError(f"{who} was interrupted by {type(error).__name__}")


def pack(error: HorovodInternalError) -> ErrorData:
    """The data of ``error``; a class without a codec travels as its nearest base that has one."""
    kind = next(base for base in type(error).__mro__ if base in _CODECS)
    return ErrorData(kind.__name__, str(error), _CODECS[kind].pack(error))


def unpack(data: ErrorData) -> HorovodInternalError:
    """The error that ``data`` describes; a HorovodInternalError where this version does not know its class."""
    codec = _KINDS.get(data.kind)
    return HorovodInternalError(data.text) if codec is None else codec.unpack(data.text, *data.details)
