"""The sinks of workers whose output arrives in messages."""

from __future__ import annotations

from executors.local.output import Sink, Sinks

__all__ = ["SinkTable"]


class SinkTable:
    """Makes the sink of a stream with its first data, and closes it with its end."""

    def __init__(self, output: Sinks) -> None:
        self._output = output
        self._sinks: dict[tuple[int, str], Sink] = {}

    def close(self) -> None:
        """Write what the workers have left unfinished."""
        while self._sinks:
            self._sinks.popitem()[1].close()

    def write(self, number: int, stream: str, data: bytes) -> None:
        """Give ``data`` of a ``stream`` of worker ``number`` to its sink; none: the stream has ended."""
        key = number, stream
        if key not in self._sinks:
            self._sinks[key] = self._output.sink(*key)
        if data:
            self._sinks[key].feed(data)
        else:
            self._sinks.pop(key).close()
