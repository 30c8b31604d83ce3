"""Runs trials, and watches over this rank while it waits in one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from collectives.api import Topology
from collectives.control.base import Channel
from collectives.engine.commands import Commands
from collectives.engine.deciders.base import Trial
from collectives.engine.ends import Ends
from collectives.engine.link import FLUSH_SECONDS
from collectives.engine.lookout import Lookout
from collectives.engine.runner import Runner
from collectives.engine.work import Work
from collectives.planning.waiting import Pending, Waiting

__all__ = ["Trials"]


class Trials:
    """Runs one trial at a time. Until it is known whether all ranks run it, this rank does nothing else.

    So each wait sends what is unsent, lets ``lookout`` report the missing ranks, ends a shutdown that takes too long,
    notices ``commands``, and calls ``attend``, which returns whether there are messages for later. For the thread that
    drives.
    """

    def __init__(
        self,
        topology: Topology,
        channel: Channel,
        runner: Runner,
        lookout: Lookout,
        ends: Ends,
        commands: Commands,
        attend: Callable[[], bool],
    ) -> None:
        self._topology = topology
        self._channel = channel
        self._runner = runner
        self._lookout = lookout
        self._ends = ends
        self._commands = commands
        self._attend = attend
        self._trial: Trial | None = None
        self._since: float | None = None

    def attempt(self, trial: Trial, works: Sequence[Sequence[Work]] | None = None) -> bool:
        """Run ``trial`` if all ranks do so now; return whether they do. ``works`` are those of its batches, or None."""
        self._trial, self._since = trial, None
        try:
            return self._runner.attempt(trial, self._wait, works)
        finally:
            self._trial = None  # it refers to the works, and so to the users' tensors

    def _wait(self, absent: Sequence[int]) -> bool:
        """See :data:`Meanwhile`."""
        now = time.monotonic()
        if self._channel.has_unsent:
            self._channel.flush(FLUSH_SECONDS)
        overdue = self._ends.ending.overdue(now, absent)
        if overdue is not None:
            self._ends.fail(overdue)
        fatal = self._lookout.report(self._waiting(absent, now), now)
        if fatal is not None:
            self._ends.break_off(fatal)
        return self._attend() or bool(self._commands)

    def _waiting(self, absent: Sequence[int], now: float) -> Pending:
        if self._trial is None or not absent:
            return {}
        if self._since is None:
            self._since = now
        present = tuple(rank for rank in range(self._topology.size) if rank not in absent)
        waiting = Waiting(self._since, tuple(absent), present)
        return {response.request.key: waiting for batch in self._trial.batches for response in batch}
