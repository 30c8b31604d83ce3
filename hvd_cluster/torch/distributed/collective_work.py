"""A collective of torch.distributed in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from collectives import Engine, HorovodInternalError, Work
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.graphs.completer import completer
from hvd_cluster.graphs.run import NodeRun


class CollectiveWork(dist.Work):
    """Its ``works`` run on ``engine``; ``finish`` then copies what is not in ``outputs`` yet.

    It is the kernel and the context of a :class:`NodeRun`, with which the ``completer`` ends it where somebody has
    asked for its future.
    """

    step = None
    frame = iteration = 0
    process_set: ProcessSet = global_process_set

    def __init__(
        self, engine: Engine, works: Sequence[Work], finish: Callable[[], None], outputs: Sequence[torch.Tensor]
    ) -> None:
        super().__init__()
        self._engine = engine
        self._works = works
        self._outputs = list(outputs)
        # Owned by this object; held for the copies of one collective, or for an instruction.
        self._lock = threading.Lock()
        self._finish: Callable[[], None] | None = finish
        self._error: BaseException | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    # Work, for torch.

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the outputs are there. Raises the error of the collective.

        ``timeout`` has no effect: that of the group ends what waits too long.
        """
        for work in self._works:
            self._engine.synchronize(work)
        self.finish()
        return True

    def synchronize(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended: the outputs are there, or an error."""
        if not all([self._engine.poll(work) for work in self._works]):
            return False
        if self.exception() is None:
            with suppress(Exception):  # exception() has it now
                self.finish()
        return True

    def is_success(self) -> bool:
        """Whether it has ended without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The error of a collective that has ended."""
        errors = [work.error for work in self._works if work.done and work.error is not None]
        return errors[0] if errors else self._error

    def result(self) -> list[torch.Tensor]:
        """The outputs."""
        return self._outputs

    def source_rank(self) -> int:
        """Only messages have one."""
        return -1

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future with the outputs, or with the error."""
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = torch.futures.Future()
        if completer.runs_here():
            self._end_here()
        else:
            completer.follow(NodeRun(self, self, self._engine, self._works, self._done, _nothing, None))
        return self._future

    def _end_here(self) -> None:
        """In a callback of another future, which keeps the thread that would end this one."""
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001 - the future raises it
            self._error = error
        self._done()

    # The kernel and the context of a run.

    def finish(self, *_: Any) -> None:
        """Copy what is not in the outputs yet, once. The works are done, without an error. Raises that of the copy."""
        with self._lock:
            finish, self._finish = self._finish, None
            try:
                if finish is not None:
                    finish()
            except Exception as error:  # noqa: BLE001 - each call raises it
                self._error = error
            if self._error is not None:
                raise self._error

    def end(self) -> None:
        """Nobody asks for outputs."""

    def report(self, error: BaseException | None = None) -> None:
        """The run ends with ``error``."""
        self._error = error or HorovodInternalError("the collective was abandoned")

    def _done(self) -> None:
        future = self._future
        if future is None:
            return
        if self._error is not None:
            future.set_exception(self._error)  # type: ignore[arg-type]
        else:
            future.set_result(self._outputs)


def _nothing() -> None:
    """No other run waits for the end of this one."""
