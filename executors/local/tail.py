"""The last lines that each rank wrote to standard error."""

from __future__ import annotations

from collections import deque

from executors.local.output import Lines, Sink, Sinks, TeeSink

__all__ = ["Tail", "Tails"]

KEPT_LINES = 200
LONGEST_LINE = 1000


class Tail:
    """Keeps the last lines of a stream, each without its end and cut after a thousand bytes."""

    def __init__(self) -> None:
        self._lines = Lines()
        self._kept: deque[bytes] = deque(maxlen=KEPT_LINES)

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        self._kept.extend(line[:LONGEST_LINE] for line in self._lines.feed(data))

    def close(self) -> None:
        """The stream has ended; its last line may lack an end."""
        self._kept.extend(line[:LONGEST_LINE] for line in self._lines.flush())

    @property
    def text(self) -> tuple[str, ...]:
        """The lines so far."""
        return tuple(line.decode("utf-8", "replace").rstrip() for line in self._kept)


class Tails:
    """Passes the output of the workers of a job on to ``output`` and keeps the last lines of each."""

    def __init__(self, output: Sinks) -> None:
        self._output = output
        self._tails: dict[int, Tail] = {}

    def sink(self, rank: int, name: str) -> Sink:
        """See :class:`executors.local.output.Sinks`."""
        sink = self._output.sink(rank, name)
        if name != "stderr":
            return sink
        self._tails[rank] = Tail()
        return TeeSink(sink, self._tails[rank])

    def last_lines(self, rank: int) -> tuple[str, ...]:
        """The last lines of standard error of ``rank``."""
        return self._tails[rank].text if rank in self._tails else ()
