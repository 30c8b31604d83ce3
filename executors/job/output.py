"""The output of workers, line by line, to the console of the driver and to files; and the driver's own messages.

There is no lock: one thread of a job writes all output of its workers.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol, TextIO

from collectives import override

logger = logging.getLogger(__name__)


# A progress bar ends its lines with a carriage return. A newline may still follow one at the end of the data.
LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")
LONGEST_LINE = 1 << 20
CONSOLES = {"stdout": ("standard output", "stderr"), "stderr": ("standard error", "stdout")}
"""The streams of this process, and for each the other one, which tells of its loss."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_unwritable: list[TextIO] = []
"""The consoles of this process that a write has failed on; any thread may add one."""


class Sink(Protocol):
    """Takes the output of one stream of one worker."""

    def feed(self, data: bytes) -> None:
        """Take the next bytes, never empty."""

    def close(self) -> None:
        """The stream has ended."""


class Sinks(Protocol):
    """The destination of the output of the workers of a job."""

    def sink(self, rank: int, name: str) -> Sink:
        """The sink of the stream ``name``, stdout or stderr. Raises OSError if it cannot be made."""


class Lines:
    """Cuts a stream of bytes into lines. A line longer than a mebibyte is cut, so that memory is bounded.

    ``rest`` is the last line as long as it has no end.
    """

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The lines that ``data`` completes, each with its end."""
        text, start = self.rest + data, 0
        for end in LINE_END.finditer(text, max(0, len(self.rest) - 1)):
            yield text[start : end.end()]
            start = end.end()
        self.rest = text[start:]
        if len(self.rest) > LONGEST_LINE:
            yield from self.flush()

    def flush(self) -> Iterator[bytes]:
        """The last line, where it has no end; it gets a newline."""
        rest, self.rest = self.rest, b""
        if rest:
            yield rest if rest.endswith(b"\r") else rest + b"\n"


class PlainSink:
    """Writes each line as a whole to ``stream``.

    If a stream of this process cannot be written, on a full disk or because its reader is gone, the rest is dropped,
    with one line on the other stream. A user's own stream may raise.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._lines = Lines()

    def feed(self, data: bytes) -> None:
        """Write the lines that are complete. Raises OSError where a user's own stream cannot be written."""
        self._write(self._lines.feed(data))

    def close(self) -> None:
        """Write the rest as a line. Raises OSError where a user's own stream cannot be written."""
        self._write(self._lines.flush())

    def _write(self, lines: Iterator[bytes]) -> None:
        text = "".join(self.prefix() + line.decode("utf-8", "replace") for line in lines)
        if text:
            _write(self._stream, text)

    def prefix(self) -> str:
        """What comes before a line that is written now."""
        return ""


class ConsoleSink(PlainSink):
    """Writes each line as a whole to ``stream``, after the prefix ``[rank]<name>:`` and, if wanted, the time."""

    def __init__(self, rank: int, name: str, stream: TextIO | None, timestamp: bool = False) -> None:
        super().__init__(stream)
        self._prefix = f"[{rank}]<{name}>:"
        self._timestamp = timestamp

    @override
    def prefix(self) -> str:
        return f"{time.asctime() if self._timestamp else ''}{self._prefix}"


class FileSink:
    """Writes the bytes of a worker to the new file ``path``, as they are, until it is closed. Raises OSError.

    If the file cannot be written later, for example on a full disk, a warning says so, and the rest is dropped: the job
    needs it less than its ranks.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    @property
    def is_closed(self) -> bool:
        """Whether the file is closed."""
        return self._file.closed

    def feed(self, data: bytes) -> None:
        """Append ``data``, at once."""
        if self.is_closed:
            return
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            logger.warning("%s cannot be written any more (%s); only the console has the rest", self._file.name, error)
            self.close()

    def close(self) -> None:
        """Close the file. Closing twice does nothing."""
        with suppress(OSError):
            self._file.close()


class TeeSink:
    """Gives everything to several sinks."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks

    def feed(self, data: bytes) -> None:
        """Feed every sink. Raises the errors of the sinks."""
        for sink in self._sinks:
            sink.feed(data)

    def close(self) -> None:
        """Close every sink. Raises the errors of the sinks."""
        for sink in self._sinks:
            sink.close()


class Output:
    """The destination of the output of the ``size`` workers of a job: a context manager, with a sink for each stream.

    Every line goes to the console: ``stdout`` and ``stderr``, or else the streams of this process. Where there is a
    ``directory``, the bytes also go, as they are, to the files ``rank.<rank>/stdout`` and ``stderr`` in it; ranks are
    padded with zeros, so that they sort.
    """

    def __init__(
        self,
        size: int,
        directory: str | Path | None = None,
        timestamp: bool = False,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
    ) -> None:
        self._width = len(str(size - 1))
        self._directory = directory
        self._timestamp = timestamp
        self._streams = {"stdout": stdout, "stderr": stderr}
        self._files: list[FileSink] = []

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.close()

    def sink(self, rank: int, name: str) -> Sink:
        """Raises OSError where the file cannot be made, unless the disk is full."""
        console = ConsoleSink(rank, name, self._streams[name] or getattr(sys, name), self._timestamp)
        if self._directory is None:
            return console
        path = Path(self._directory) / f"rank.{rank:0{self._width}d}" / name
        file = self._file(path)
        return console if file is None else TeeSink(file, console)

    def _file(self, path: Path) -> FileSink | None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = FileSink(path)
        except OSError as error:
            if error.errno not in NO_SPACE:  # the user has named a wrong folder
                raise
            logger.warning("%s cannot be made (%s); only the console has it", path, error)
            return None
        self._files = [*(other for other in self._files if not other.is_closed), file]
        return file


def say(text: str, name: str = "hvdrun") -> None:
    """Write one line of the driver itself, with the prefix ``name``, to standard error."""
    _write(sys.stderr, f"{name}: {text}\n")


def release_consoles() -> None:
    """Let this process end in silence: data that a stream could not write are dropped.

    Python would try once more at exit, complain, and end with a status of its own.
    """
    for stream in _unwritable:
        with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
    _unwritable.clear()


def _write(stream: TextIO | None, text: str) -> None:
    """The streams of this process never end a job; they are None where the shell has closed them. Others may raise."""
    name = next((name for name in CONSOLES if getattr(sys, name) is stream), None)
    if stream is None or any(each is stream for each in _unwritable):
        return
    try:
        _put(stream, text)
    except (OSError, ValueError) as error:  # ValueError: it is closed
        if name is None:
            raise
        _unwritable.append(stream)
        what, other = CONSOLES[name]
        _write(
            getattr(sys, other), f"hvdrun: {what} cannot be written any more ({error}); the ranks go on without it\n"
        )


def _put(stream: TextIO, text: str) -> None:
    encoding = getattr(stream, "encoding", None) or "utf-8"  # a user's own stream may have no encoding
    stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()


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
