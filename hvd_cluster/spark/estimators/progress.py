"""The progress of a fit: lines that rank 0 writes to its output, and what the driver makes of them."""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from collectives import override

__all__ = ["FitProgress", "ProgressReporter", "ProgressStream"]

logger = logging.getLogger(__name__)

MARK = "@hvd-cluster-fit "
LEAST_SECONDS = 1.0


@dataclass(frozen=True)
class FitProgress:
    """How far a fit is: ``rows`` of rank 0 in the ``epoch``, of about ``of_rows``; ``loss`` is its average.

    At the end of the epoch, ``done``, the numbers are those of all ranks. ``epoch`` counts from 1.
    """

    epoch: int
    epochs: int
    rows: int
    rows_per_second: float
    loss: float | None
    validation_loss: float | None = None
    done: bool = False

    def text(self) -> str:
        """For a log or a bar."""
        losses = {"loss": self.loss, "validation loss": self.validation_loss}
        shown = "".join(f", {name} {value:.6g}" for name, value in losses.items() if value is not None)
        return f"epoch {self.epoch}/{self.epochs}: {self.rows} rows, {self.rows_per_second:,.0f} rows/s{shown}"


class ProgressReporter:
    """Writes the progress of rank 0 as lines that :class:`ProgressStream` finds in the output of the workers."""

    def __init__(self, enabled: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._enabled = enabled
        self._clock = clock
        self._begin = self._said = clock()

    def begin(self) -> None:
        """An epoch begins."""
        self._begin = self._said = self._clock()

    def seconds(self) -> float:
        """How long the epoch takes so far."""
        return max(self._clock() - self._begin, 1e-9)

    def step(self, epoch: int, epochs: int, rows: int, loss: Callable[[], float | None]) -> None:
        """A step of ``epoch`` has ended; ``loss`` is asked for only where a line is due, at most once a second."""
        now = self._clock()
        if self._enabled and now - self._said >= LEAST_SECONDS:
            self._said = now
            self._say(FitProgress(epoch + 1, epochs, rows, rows / self.seconds(), loss()))

    def end(self, epoch: int, epochs: int, rows: int, loss: float | None, validation_loss: float | None) -> None:
        """``epoch`` of ``epochs`` has ended, with these numbers of all ranks."""
        if self._enabled:
            speed = rows / self.seconds()
            self._say(FitProgress(epoch + 1, epochs, rows, speed, loss, validation_loss, done=True))

    def _say(self, progress: FitProgress) -> None:
        sys.stdout.write(f"{MARK}{json.dumps(asdict(progress))}\n")
        sys.stdout.flush()


class ProgressStream(io.TextIOBase):
    """A text stream for the output of workers: shows the progress in it, and passes on everything else.

    ``inner`` gets the rest, or standard output where it is None.
    """

    def __init__(self, inner: TextIO | None, show: Callable[[FitProgress], None]) -> None:
        super().__init__()
        self._inner = inner
        self._show = show

    @override
    def writable(self) -> bool:
        """Always."""
        return True

    @override
    def write(self, text: str) -> int:
        """Take whole lines. Raises what ``inner`` raises."""
        for line in text.splitlines(keepends=True):
            _, mark, rest = line.partition(MARK)
            if mark and (progress := _parsed(rest)):
                self._show(progress)
            else:
                self._stream.write(line)
        return len(text)

    @override
    def flush(self) -> None:
        """Flush ``inner``."""
        self._stream.flush()

    @property
    def _stream(self) -> TextIO:
        return self._inner or sys.stdout


def _parsed(text: str) -> FitProgress | None:
    try:
        values: Mapping[str, Any] = json.loads(text)
        return FitProgress(**values)
    except (ValueError, TypeError):
        return None


def display() -> Callable[[FitProgress], None]:
    """A bar where tqdm is installed and somebody looks at the terminal or notebook; otherwise lines in the log."""
    return _Bar() if _is_interactive() and importlib.util.find_spec("tqdm") else _log


def _is_interactive() -> bool:
    """Whether this is a notebook, or standard error a terminal."""
    notebook = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return notebook is not None or (sys.stderr is not None and sys.stderr.isatty())


def _log(progress: FitProgress) -> None:
    if progress.done:
        logger.info("%s", progress.text())


class _Bar:
    """A bar with a step for each epoch."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __call__(self, progress: FitProgress) -> None:
        if self._bar is None:
            self._bar = importlib.import_module("tqdm.auto").tqdm(total=progress.epochs, unit="epoch")
        self._bar.set_description_str(progress.text(), refresh=True)
        if progress.done:
            self._bar.update(progress.epoch - self._bar.n)
        if progress.done and progress.epoch == progress.epochs:
            self._bar.close()
