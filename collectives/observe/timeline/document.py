"""The file of a timeline: a JSON array, complete after every write."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from collectives.observe.locked_file import LockedFile
from collectives.observe.timeline.records import MICROSECONDS, PID, Record, TraceRow, quoted

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
END = b"\n]\n"
METADATA = b'"ph":"M"'
LARGEST_WRITE = 1 << 16
READ_BYTES = 1 << 16
FIRST_RANK_PID, FIRST_TENSOR_PID = 1_000_000, 2_000_000
"""The process ids of the first rows; that of the job is below, and that of a row above the numbers of its lanes.

Perfetto takes lane 0 of a process as that whose number is the id of the process.
"""


class DocumentError(Exception):
    """The file cannot be written."""


class DocumentInUseError(DocumentError):
    """Another process writes the file."""


class NoDocumentError(DocumentError):
    """Rank 0 records nothing; if it was asked to, it has logged why."""


class Document:
    """Owns the file at ``path``, which it replaces, or continues if it ``resumes`` a timeline.

    ``start`` is when its times begin, in microseconds since the epoch: now, or at ``begun``, in seconds, if that is in
    the past; or as in the file that it continues. ``origin`` is the same moment on the monotonic clock of this process;
    a file that a process of this host began keeps it, because the other clock may have been set since. A reader finds a
    JSON array at any time but that of a write. A write that fails leaves the array as it was before. Raises
    DocumentError, here and in :meth:`write`. For one thread. A file that goes on is read, which takes some seconds for
    gigabytes; ``file`` is what :func:`opened` returned for it.
    """

    def __init__(
        self, path: str, resumes: bool = False, begun: float = math.inf, file: LockedFile | None = None
    ) -> None:
        self.path = path
        now = time.time()
        self.start = int(min(now, begun) * MICROSECONDS)
        self.origin = time.monotonic() - (now - self.start / MICROSECONDS)
        self._pids: dict[TraceRow, str] = {}
        self._tensors = 0
        self._file = file or opened(path)
        self._end = 0
        self._is_resumed = False
        try:
            if not (resumes and self._resume()):
                os.ftruncate(self._file.descriptor, 0)
                self._append("[\n", _head(self.start, self.origin))
        except OSError as error:
            self._file.close()
            raise DocumentError(_explained(path, error)) from error

    def _resume(self) -> bool:
        """Go on behind the last whole record; False if the file is no timeline."""
        with open(self.path, "rb") as file:
            if file.readline() != b"[\n":
                return False
            for line in _lines_with(METADATA, file):
                with suppress(ValueError, LookupError, TypeError):  # a part of a record, or of another program
                    self._remember(json.loads(line.rstrip(b",\n")))
            size = file.tell()
            file.seek(max(0, size - LARGEST_WRITE))
            tail = file.read()
        last = tail.rfind(END if tail.endswith(END) else b",\n")
        if last < 0 or not self._is_resumed:
            return False
        self._end = size - len(tail) + last
        self._end_array()
        return True

    def _remember(self, record: dict[str, Any]) -> None:
        pid, args = record["pid"], record["args"]
        if "start_time_since_epoch_in_micros" in args:
            self._go_on_from(args)
        elif record["name"] == "process_name":
            row = TraceRow(args["name"], pid - FIRST_RANK_PID if pid < FIRST_TENSOR_PID else -1)
            self._pids[row] = str(pid)
            self._tensors += row.is_tensor

    def _go_on_from(self, head: dict[str, Any]) -> None:
        begun, origin = head["start_time_since_epoch_in_micros"], head.get("origin")
        self.origin += (begun - self.start) / MICROSECONDS
        if isinstance(origin, float) and head.get("boot") == _boot() != "":
            self.origin = origin
        self.start, self._is_resumed = begun, True

    def write(self, records: Iterable[Record]) -> None:
        """Append ``records``."""
        lines: list[str] = []
        for row, text in records:
            pid = self._pids.get(row)
            if pid is None:
                pid = self._introduce(row, lines)
            lines.append(text.replace(PID, pid))
        try:
            for piece in _pieces(lines):
                self._append(",\n", piece)
        except OSError as error:
            raise DocumentError(_explained(self.path, error)) from error

    def _introduce(self, row: TraceRow, lines: list[str]) -> str:
        pid = FIRST_TENSOR_PID + self._tensors if row.is_tensor else FIRST_RANK_PID + row.rank
        self._tensors += row.is_tensor
        lines += _metadata(pid, row.name)
        self._pids[row] = str(pid)
        return str(pid)

    def _append(self, separator: str, lines: list[str]) -> None:
        data = (separator + ",\n".join(lines)).encode()
        try:
            self._write_at(self._end, data + END)
        except OSError:
            self._end_array()
            raise
        self._end += len(data)

    def _end_array(self) -> None:
        """Close the array behind the last record, and cut off what follows."""
        if self._end:
            self._write_at(self._end, END)  # first: a full disk may not give a place that was cut off again
        os.ftruncate(self._file.descriptor, self._end and self._end + len(END))

    def _write_at(self, place: int, data: bytes) -> None:
        while data:
            written = os.pwrite(self._file.descriptor, data, place)
            data, place = data[written:], place + written

    def close(self) -> None:
        """Release the file, which is complete. Idempotent."""
        self._file.close()

    def disown(self) -> None:
        """In a forked child: close this copy of the descriptor; the lock stays with the parent."""
        self._file.disown()


def opened(path: str) -> LockedFile:
    """The file at ``path``, with its lock. Raises DocumentError."""
    try:
        return LockedFile(path)
    except BlockingIOError as error:
        text = f"another job writes a timeline to {path!r}; give each job a file of its own"
        raise DocumentInUseError(text) from error
    except (OSError, ValueError) as error:
        raise DocumentError(_explained(path, error)) from error


def _explained(path: str, error: Exception) -> str:
    reason = getattr(error, "strerror", None) or str(error)
    return f"the timeline cannot be written to {path!r}: {reason}; give a file where this user may write, with space"


def _boot() -> str:
    """Which start of this host it is: processes of one have one monotonic clock."""
    with suppress(OSError):
        return BOOT_ID.read_text().strip()
    return ""


def _head(start: int, origin: float) -> list[str]:
    args = quoted({"start_time_since_epoch_in_micros": start, "origin": origin, "boot": _boot()})
    return [
        f'{{"pid":0,"ph":"M","name":"process_name","args":{args}}}',
        '{"pid":0,"ph":"M","name":"process_sort_index","args":{"sort_index":0}}',
    ]


def _metadata(pid: int, name: str) -> list[str]:
    return [
        f'{{"pid":{pid},"ph":"M","name":"process_name","args":{quoted({"name": name})}}}',
        f'{{"pid":{pid},"ph":"M","name":"process_sort_index","args":{{"sort_index":{pid}}}}}',
    ]


def _lines_with(mark: bytes, file: IO[bytes]) -> Iterator[bytes]:
    """The lines of the rest of ``file`` that contain ``mark``: few of the millions that a long training has."""
    rest = b""
    while block := file.read(READ_BYTES):
        whole, _, rest = (rest + block).rpartition(b"\n")
        yield from _marked(whole, mark)
    yield from _marked(rest, mark)


def _marked(lines: bytes, mark: bytes) -> Iterator[bytes]:
    place = lines.find(mark)
    while place >= 0:
        begin, end = lines.rfind(b"\n", 0, place) + 1, lines.find(b"\n", place)
        end = len(lines) if end < 0 else end
        yield lines[begin:end]
        place = lines.find(mark, end)


def _pieces(lines: list[str]) -> Iterable[list[str]]:
    """``lines`` in pieces for one write each."""
    piece: list[str] = []
    size = 0
    for line in lines:
        if size + len(line) > LARGEST_WRITE and piece:
            yield piece
            piece, size = [], 0
        piece.append(line)
        size += len(line)
    if piece:
        yield piece
