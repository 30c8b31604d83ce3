"""Saving and loading on all ranks: rank 0 has the files, and all ranks get the same result, or the same error.

Rank 0 reads, too, and sends the bytes to the others: ranks on other hosts may not see its folder, or see an older state
of it, and a shared file system serves one reader and not all of them.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import index
from typing import Any, TypeAlias, TypeVar

from collectives import InvalidRequestError
from hvd_cluster.core import basics
from hvd_cluster.ops.objects import broadcast_object, described
from hvd_cluster.storage.folders import CheckpointError, Data, open_folder
from hvd_cluster.storage.series import MODES, Note, Series

logger = logging.getLogger(__name__)

T = TypeVar("T")
Place: TypeAlias = "str | os.PathLike[str]"
TIMEOUT = 600.0
"""Seconds: the longest time in which a checkpoint is written in the background."""


class Writer:
    """Runs one work at a time in the background, for one caller: each call first waits for the work before.

    The thread is owned by this object, lives for one work, and ends with it. The end of the script waits for it, and so
    does each call, for a bounded time.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Run ``work()`` from now on. Nothing else runs, because :meth:`wait` was called before."""
        self._thread = threading.Thread(target=self._run, args=(work,), name="hvd-checkpoint", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  raised by the next call
            self._error = error
            logger.error("a checkpoint was not written: %s", described(error))

    def wait(self, timeout: float) -> None:
        """Wait until nothing runs. Raises the error of the work, once; CheckpointError after ``timeout`` seconds."""
        self.settle(timeout)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def settle(self, timeout: float) -> None:
        """As :meth:`wait`, without the error of the work."""
        if self._thread is None:
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise CheckpointError(
                f"the checkpoint before is still being written after {timeout:g} s: look whether its storage answers, "
                "or give a longer timeout"
            )
        self._thread = None

    def end(self) -> None:
        """Wait at the end of the script, for :data:`TIMEOUT` seconds; what is not written then is lost."""
        try:
            self.settle(TIMEOUT)
        except CheckpointError as error:
            logger.error("the script ends without its last checkpoint: %s", error)


_writer = Writer()
atexit.register(_writer.end)


@dataclass(frozen=True)
class Checkpoint:
    """The ``step``, ``epoch``, ``metric`` and ``extra`` that were saved with a checkpoint, None where there were none.

    ``path`` is that of the file on rank 0.
    """

    step: int
    epoch: int | None
    metric: float | None
    extra: Any
    path: str


def save(
    folder: Place,
    encode: Callable[[], Data],
    kind: str,
    suffix: str,
    *,
    note: Callable[[], Note],
    keep: int | None,
    background: bool,
    timeout: float,
    storage_options: Mapping[str, Any] | None,
) -> None:
    """Write a checkpoint of a binding, ``kind``. All ranks call it; rank 0 alone calls ``encode`` and ``note``.

    Raises the same error on all ranks: InvalidRequestError for arguments, CheckpointError if the checkpoint, or the one
    before it in the background, cannot be written.
    """

    def begin() -> None:
        _writer.wait(timeout)
        told, series = note(), Series(open_folder(folder, storage_options))
        if keep is not None and (not isinstance(keep, int) or keep < 1):
            raise InvalidRequestError(
                f"keep={keep!r} must be an integer of at least 1, or None to keep all checkpoints"
            )
        data = encode()

        def work() -> None:
            series.add(data, kind, suffix, told, keep)

        _writer.start(work) if background else work()

    on_root(begin, "checkpoint.save", timeout)


def noted(step: int, epoch: int | None, metric: Any, mode: str, extra: Any = None) -> Note:
    """The arguments, checked. InvalidRequestError for one that is wrong; ``extra`` is data that JSON can have."""
    if mode not in MODES:
        raise InvalidRequestError(f"mode={mode!r} must be 'min' if a smaller metric is better, or 'max'")
    try:
        json.dumps(extra)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"extra={extra!r} must be data that JSON can have ({error})") from error
    try:
        return Note(_natural(step), None if epoch is None else index(epoch), _number(metric), mode, extra)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"step={step!r}, epoch={epoch!r} and metric={metric!r} must be an integer of at least 0, an integer and a "
            "number; epoch and metric may be None"
        ) from error


def _natural(step: int) -> int:
    if index(step) < 0:
        raise ValueError(step)
    return index(step)


def _number(metric: Any) -> float | None:
    return None if metric is None else float(metric)


def load(
    folder: Place,
    which: str | int,
    kind: str,
    *,
    missing_ok: bool,
    timeout: float,
    storage_options: Mapping[str, Any] | None,
) -> tuple[Checkpoint, bytes] | None:
    """The checkpoint, and its data, on all ranks; None with ``missing_ok`` where there is none.

    Raises the same error on all ranks: CheckpointError if there is no such checkpoint, if its data are not those that
    were written, or are those of another binding.
    """

    def read() -> tuple[Checkpoint, bytes] | None:
        _writer.wait(timeout)
        series = Series(open_folder(folder, storage_options))
        manifest = series.find(which if isinstance(which, str) else index(which), missing_ok)
        if manifest is None:
            return None
        path, told = series.path(manifest), manifest.note
        if manifest.kind != kind:
            raise CheckpointError(
                f"{path} was written by hvd_cluster.{manifest.kind}; load it there, not by hvd_cluster.{kind}"
            )
        return Checkpoint(told.step, told.epoch, told.metric, told.extra, path), series.read(manifest)

    return on_root(read, "checkpoint.load", timeout)


def wait(timeout: float = TIMEOUT) -> None:
    """Wait until rank 0 has written the checkpoint that is in the background. All ranks call it.

    Raises on all ranks: CheckpointError if it was not written, or is still being written after ``timeout`` seconds.
    """
    on_root(lambda: _writer.wait(timeout), "checkpoint.wait", timeout)


def on_root(call: Callable[[], T], name: str, timeout: float = TIMEOUT) -> T:
    """``call()`` of rank 0, which alone calls it. All ranks get its result, or its error: see :func:`_shown`.

    Another rank, which was rank 0 in an earlier world, first ends what it writes. A newcomer of an elastic job, which
    reaches no other rank yet, calls nothing, and gets None.
    """
    outcome: tuple[Any, Exception | None] = (None, None)
    if basics.rank() == 0:
        outcome = _outcome(call)
    else:
        _outcome(lambda: _writer.settle(timeout))
    result, error = broadcast_object(outcome, 0, name)
    if error is not None:
        raise error
    value: T = result
    return value


def _outcome(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return call(), None
    except Exception as error:  # noqa: BLE001  of the storage, or of the user's model; raised on all ranks
        shown = _shown(error)
        shown.__cause__ = None if shown is error else error
        return None, shown


def _shown(error: Exception) -> Exception:
    """InvalidRequestError and CheckpointError as they are, which pickle can send, and CheckpointError for others."""
    if isinstance(error, CheckpointError | InvalidRequestError | ImportError):
        return error
    if isinstance(error, OSError):
        return CheckpointError(
            f"rank 0 cannot use the storage of the checkpoint ({described(error)}); look whether the folder is there, "
            "may be written, and has room"
        )
    return CheckpointError(f"rank 0 cannot make or read the checkpoint ({described(error)})")
