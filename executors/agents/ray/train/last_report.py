"""The last report of a worker to Ray Train, which a job whose workers are replaced must not lose.

Ray Train leaves reports out while a worker is missing, and forgets those that it has not taken of all workers yet. The
next report counts, but after the last one there is none.
"""

from __future__ import annotations

import inspect
import logging
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train import Checkpoint, UserCallback

# Ray Train has no public names for these.
# Ray Train lifts it itself where it replaces a worker, but has no public name for that.
from ray.train.v2._internal.execution.context import TrainContext, get_train_context

from collectives import override
from executors.agents.ray.train.succession import Delivered
from executors.job.worlds import LastReport

logger = logging.getLogger(__name__)


LOOK_S = 0.5
ARGUMENTS = inspect.signature(TrainContext.report)


def digest(metrics: object) -> str:
    """A short text that differs where ``metrics`` do."""
    return blake2b(repr(metrics).encode(), digest_size=16).hexdigest()


class Deliveries(UserCallback):
    """Tells ``listener``, in the process of Ray Train's controller, of each report that all workers have made."""

    listener: Callable[[Delivered], None] | None = None
    """Of the process: Ray Train unpickles callback and backend one by one, so nothing else is common to both."""

    @override
    def after_report(self, run_context: object, metrics: Sequence[object], checkpoint: Checkpoint | None) -> None:
        if Deliveries.listener is not None:
            path = "" if checkpoint is None else checkpoint.path
            Deliveries.listener(Delivered(tuple(map(digest, metrics)), path))


class ReportKeeper:
    """In the block, keeps the arguments of the last call of :func:`ray.train.report` in this worker.

    If Ray Train has left it out, also a copy of its checkpoint: the caller may delete that. A copy is in the folder for
    temporary files until the next report, or the end of the block.
    """

    def __init__(self) -> None:
        self._context = get_train_context()
        self._report = self._context.report
        self._given: dict[str, Any] | None = None
        self._is_left_out = False
        self._folder = ""

    def __enter__(self) -> ReportKeeper:
        self._context.report = self._note  # type: ignore[method-assign]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._context.report
        _remove(self._folder)

    def last(self) -> str:
        """The text of the last report, "" before the first one; returns when Ray Train has fetched it.

        If that never comes, Ray Train ends this process.
        """
        self._await_fetch()
        if self._given is None:
            return ""
        checkpoint = self._persisted()
        path = "" if checkpoint is None else checkpoint.path
        return LastReport(digest(self._given["metrics"]), path, self._is_left_out).encode()

    @property
    def metrics(self) -> Any:
        """Those of the last report; None before the first one."""
        return None if self._given is None else self._given["metrics"]

    def repeat(self, metrics: Any) -> None:
        """Make the last report again; one of ``metrics`` where there was none."""
        given = dict(self._given or {"metrics": metrics})
        if self._given is not None and not self._is_left_out:
            given["checkpoint"] = self._persisted()
        self._note(**given)

    def _note(self, *args: Any, **kwargs: Any) -> None:
        given = dict(ARGUMENTS.bind(self._context, *args, **kwargs).arguments)
        del given["self"]
        before = self._context.report_call_index
        self._report(**given)
        self._keep(given, self._context.report_call_index == before)

    def _keep(self, given: dict[str, Any], is_left_out: bool) -> None:
        """A repetition that was left out, too, has the copy as its checkpoint: copy that before it goes."""
        folder, self._folder = self._folder, ""
        if is_left_out and given.get("checkpoint") is not None:
            given["checkpoint"] = self._copy(given["checkpoint"])
            given["delete_local_checkpoint_after_upload"] = False
        self._given, self._is_left_out = given, is_left_out
        _remove(folder)

    def _copy(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """A copy of a checkpoint in a folder of this host; others stay."""
        if not Path(checkpoint.path).exists():
            return checkpoint
        self._folder = tempfile.mkdtemp(prefix="hvd-report-")
        try:
            shutil.copytree(checkpoint.path, self._folder, dirs_exist_ok=True)
        except OSError as error:
            logger.warning("the checkpoint of the last report could not be kept, and may be lost: %s", error)
            return None
        return Checkpoint.from_directory(self._folder)

    def _persisted(self) -> Checkpoint | None:
        """The checkpoint as Ray Train has stored it, if this worker gave one and Ray Train has taken it."""
        has_one = self._given is not None and self._given.get("checkpoint") is not None
        return self._context.checkpoint if has_one and not self._is_left_out else None

    def _await_fetch(self) -> None:
        context, results = self._context, self._context.get_result_queue()
        # Bound: none, see last(); abort: the end of this process.
        with context.report_order_condition:
            while context.current_report_index < context.report_call_index:
                context.report_order_condition.wait(LOOK_S)
        with results.all_tasks_done:
            while results.unfinished_tasks:
                results.all_tasks_done.wait(LOOK_S)


def _remove(folder: str) -> None:
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


TICK_S = 1.0
ANSWER_S = 30.0


class BarrierGuard:
    """In the block, workers do not wait at the barrier while ``is_cut_off()``: the collectives of this one have ended.

    Another worker may be lost, or wait for this one in the next world. Reports that are skipped so are only told by a
    warning of Ray Train. Owns the daemon thread "hvd-barrier", which ends with the block.
    """

    def __init__(self, is_cut_off: Callable[[], bool]) -> None:
        self._is_cut_off = is_cut_off
        self._barrier = get_train_context().get_synchronization_actor()
        self._stopped = threading.Event()
        # Owner: this object; bound: none, it watches; abort: the end of the block.
        self._thread = threading.Thread(target=self._run, name="hvd-barrier", daemon=True)

    def __enter__(self) -> BarrierGuard:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join(ANSWER_S)

    def _run(self) -> None:
        while not self._stopped.wait(TICK_S):
            if self._is_cut_off():
                with suppress(RayError):
                    ray.get(self._barrier.reset.remote(), timeout=ANSWER_S)
