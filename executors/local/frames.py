"""Pure: messages in a stream of bytes, each after its length."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["Frames"]


class Frames:
    """Cuts a stream of bytes into messages, each after its length in eight bytes."""

    HEADER = 8

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that ``data`` completes."""
        self._buffer += data
        while (end := self._end()) is not None:
            message = bytes(memoryview(self._buffer)[self.HEADER : end])
            del self._buffer[:end]
            yield message

    def _end(self) -> int | None:
        if len(self._buffer) < self.HEADER:
            return None
        end = self.HEADER + int.from_bytes(self._buffer[: self.HEADER], "big")
        return end if len(self._buffer) >= end else None

    @classmethod
    def header(cls, message: bytes) -> bytes:
        """The header that precedes ``message``."""
        return len(message).to_bytes(cls.HEADER, "big")
