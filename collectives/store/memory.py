"""Stores without a network: one in memory, and a prefix over any other; the rules for keys and counters."""

from __future__ import annotations

import re
import threading
import unicodedata
from collections.abc import Callable, Mapping

from collectives.api import CollectiveTimeoutError, InvalidRequestError, Store

Observer = Callable[[str], object]

_KEY_LIMIT = 1024
_COUNTER = re.compile(rb"-?[0-9]{1,19}")
_COUNTER_RANGE = range(-(1 << 63), 1 << 63)


def check_key(key: str) -> str:
    """Return ``key``; InvalidRequestError unless it is 1 to 1024 bytes of text without control characters."""
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in key):
        raise InvalidRequestError(f"key {key!r} has control characters; use printable text")
    if not 0 < len(key.encode()) <= _KEY_LIMIT:
        raise InvalidRequestError(f"key {key[:40]!r} has {len(key.encode())} bytes, but must have 1 to {_KEY_LIMIT}")
    return key


def parse_counter(text: bytes) -> int:
    """The decimal number in ``text``; InvalidRequestError unless it is a 64-bit integer."""
    if not _COUNTER.fullmatch(text):
        raise InvalidRequestError(f"{text[:40]!r} is not a decimal integer, so it cannot be a counter")
    return _check_counter(int(text))


def _check_counter(value: int) -> int:
    if value not in _COUNTER_RANGE:
        raise InvalidRequestError("a counter cannot leave the range of a signed 64-bit integer")
    return value


class MemoryStore:
    """A :class:`~collectives.api.Store` inside one process, for any number of threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._observers: list[Observer] = []

    def set(self, key: str, value: bytes, timeout: float | None = None) -> None:
        """Create or replace ``key``, at once. Raises InvalidRequestError for a bad key."""
        check_key(key)
        with self._changed:
            self._put(key, bytes(value))

    def set_all(self, values: Mapping[str, bytes]) -> None:
        """Create or replace all keys of ``values``, at once; with a bad key none, and InvalidRequestError."""
        for key in values:
            check_key(key)
        with self._changed:
            for key, value in values.items():
                self.set(key, value)

    def get(self, key: str, timeout: float) -> bytes:
        """Wait for ``key``. Raises CollectiveTimeoutError after ``timeout`` s, InvalidRequestError for a bad key."""
        check_key(key)
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, min(timeout, threading.TIMEOUT_MAX)):
                raise CollectiveTimeoutError(
                    f"key {key!r} was not set within {timeout:g} s; look at the rank that sets it, or raise the timeout"
                )
            return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, atomically. Raises InvalidRequestError, and changes nothing, if ``key`` is no counter."""
        check_key(key)
        with self._changed:
            total = _check_counter(parse_counter(self._values.get(key, b"0")) + amount)
            self._put(key, b"%d" % total)
            return total

    def delete(self, key: str) -> None:
        """Remove ``key`` if it exists; one that ends with "/" stands for all keys that begin with it.

        Raises InvalidRequestError for a bad key.
        """
        check_key(key)
        with self._changed:
            for each in [name for name in self._values if name.startswith(key)] if key.endswith("/") else [key]:
                self._values.pop(each, None)

    def peek(self, key: str) -> bytes | None:
        """The value of ``key`` now, without waiting; None when absent."""
        with self._changed:
            return self._values.get(key)

    def subscribe(self, observer: Observer) -> Callable[[], None]:
        """Call ``observer(key)`` after every change of a value until the returned function is called.

        The call comes on the thread that made the change and holds the store's lock: it must be quick and must not
        use the store. Once the returned function has returned, no call is under way and none will come.
        """
        with self._changed:
            self._observers.append(observer)
        return lambda: self._unsubscribe(observer)

    def _unsubscribe(self, observer: Observer) -> None:
        with self._changed:
            self._observers.remove(observer)

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        self._changed.notify_all()
        for observer in self._observers:
            observer(key)


class PrefixStore:
    """The keys of ``store`` that start with ``prefix/``, seen without it. Raises the errors of ``store``."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = check_key(prefix)

    def set(self, key: str, value: bytes, timeout: float | None = None) -> None:
        """Create or replace ``key`` under the prefix."""
        self._store.set(self._full(key), value, timeout)

    def set_all(self, values: Mapping[str, bytes]) -> None:
        """Create or replace all keys of ``values`` under the prefix, at once."""
        self._store.set_all({self._full(key): value for key, value in values.items()})

    def get(self, key: str, timeout: float) -> bytes:
        """Wait up to ``timeout`` seconds for ``key`` under the prefix."""
        return self._store.get(self._full(key), timeout)

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the counter ``key`` under the prefix."""
        return self._store.add(self._full(key), amount)

    def delete(self, key: str) -> None:
        """Remove ``key`` under the prefix."""
        self._store.delete(self._full(key))

    def _full(self, key: str) -> str:
        return f"{self._prefix}/{check_key(key)}"
