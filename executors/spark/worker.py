"""The worker process of one task, from its start to its end, and what the tasks tell each other about the end."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from contextlib import suppress
from types import TracebackType

from collectives.api import CollectiveTimeoutError, HorovodInternalError, PeerLostError
from executors.api import StartTimeoutError
from executors.failure import CAUSE_SECONDS
from executors.local.command import check_command, died
from executors.local.crew import Crew, Ended, Event, Received
from executors.local.function import TEARDOWN_SECONDS
from executors.local.output import ConsoleSink, Sink
from executors.local.python import call_file, launch_call, search_path
from executors.outcome import Outcome
from executors.spark.feeding import Feed
from executors.spark.meeting import Member
from executors.spark.plan import Plan

__all__ = ["Worker"]

# Set once it is clear how the job ends: a rank failed, or all workers ended.
OVER = "launcher/over"
POLL_SECONDS = 50.0
# How often the task of rank 0, waiting for the others, looks whether the driver is gone.
LOOK_SECONDS = 1.0


class Worker:
    """The worker of ``member``: a context manager, at whose end nothing of it is left.

    :meth:`start` starts it, unless :meth:`fail` says before that there is nothing to start. The first failure of a rank
    ends all workers of the job. The block of rank 0, where the rendezvous server is, ends behind all others. Two
    threads belong to it: "hvd-worker" watches the process, and ends with it; "hvd-over" waits for :data:`OVER`, or for
    the end of the server.
    """

    def __init__(self, plan: Plan, member: Member) -> None:
        self._plan = plan
        self._member = member
        self._feed: Feed | None = None
        self._said: Outcome | None = None
        self._failure: Outcome | None = None
        self._lost: Outcome | None = None
        self._up = False
        self._stopped = threading.Event()
        self._wake_reader, self._wake_writer = os.pipe()
        self._watching = threading.Thread(target=self._watch, name="hvd-worker", daemon=True)
        self._listening = threading.Thread(target=self._listen, name="hvd-over", daemon=True)

    def __enter__(self) -> Worker:
        self._listening.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._stop()
        # Bound: the function of the user; abort: _stop(), by a failure anywhere or the loss of the driver, and SIGKILL
        # of this process by Spark, which the guard of the worker notices.
        if self._watching.ident is not None:
            self._watching.join()
        self._report(self._failure or (self._lost if self._said is None else None))
        self._tell(_ended(self._member.slot.rank))
        if self._member.slot.rank == 0:
            self._await_others()
            self._tell(OVER)
        self._listening.join()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    @property
    def outcome(self) -> Outcome | None:
        """How it ended, after the block; None where it was ended because of others."""
        return self._failure or self._said or self._lost

    def start(self, feed: Feed | None = None) -> None:
        """Start the process, which reads from ``feed``; once, inside the block."""
        self._feed = feed
        self._watching.start()

    def stopped(self) -> bool:
        """Whether the worker has no use for anything any more."""
        return self._stopped.is_set() or self._said is not None or not self._watching.is_alive()

    def fail(self, outcome: Outcome) -> None:
        """This rank failed beside its worker: ``outcome`` counts, whatever the worker says about it."""
        self._failure = outcome
        self._tell(OVER)
        self._stop()

    def _stop(self) -> None:
        self._stopped.set()
        os.write(self._wake_writer, b".")

    def _watch(self) -> None:
        try:
            self._run()
        except Exception as error:  # noqa: BLE001  such as a process that cannot be started
            self._said = self._outcome_of(error)
        if self._said is not None and self._said.failed:
            if self._said.consequence:
                # Bound: CAUSE_SECONDS; abort: the cause is heard of.
                self._stopped.wait(CAUSE_SECONDS)
            self._tell(OVER)
        if self._failure is None:
            self._report(self._said)

    def _report(self, outcome: Outcome | None) -> None:
        # Spark says so only when the task ends, which may wait for its input.
        if outcome is not None and outcome.failed and self._member.line is not None:
            self._member.line.report(pickle.dumps(outcome))

    def _run(self) -> None:
        rank, python = self._member.slot.rank, self._plan.executable or sys.executable
        check_command(python, self._environment(), self._member.place.name)
        with call_file(self._plan.call) as file, Crew(self._plan.grace) as crew:
            crew.listen(self._wake_reader, crew.end)
            if self._member.line is not None:
                crew.listen(self._member.line.fileno(), self._stop)
            launch_call(
                lambda command, messages, inherited: crew.launch(
                    rank,
                    command,
                    self._environment(),
                    self._member.line or _Stderr(),
                    messages,
                    (*inherited, *(self._feed.descriptors if self._feed else ())),
                ),
                python,
                file,
                self._member.place.name,
            )
            crew.after(self._plan.start_timeout, lambda: self._check_up(crew))
            for event in crew.events():
                self._heed(crew, event)

    def _heed(self, crew: Crew, event: Event) -> None:
        if isinstance(event, Received) and not event.message:
            self._up = True
        elif isinstance(event, Received):
            outcome: Outcome = pickle.loads(event.message)
            self._said = outcome
            self._wind_up(crew, outcome)
        elif isinstance(event, Ended) and self._said is None and not self._stopped.is_set():
            slot, name = self._member.slot, self._member.place.name
            self._said = self._outcome_of(died(event, " before its function returned", slot.host, name))

    def _wind_up(self, crew: Crew, outcome: Outcome) -> None:
        if not outcome.failed:
            crew.after(TEARDOWN_SECONDS, crew.end)
            return
        if not outcome.consequence:
            self._tell(OVER)
        crew.end(spare=outcome.rank)

    def _check_up(self, crew: Crew) -> None:
        if not self._up and self._said is None:
            seconds = f"{self._plan.start_timeout:g} s"
            where = f"rank {self._member.slot.rank} on {self._member.place.name}"
            text = f"the Python of {where} did not come up within {seconds}; raise start_timeout if the host is slow"
            self._said = self._outcome_of(StartTimeoutError(text))
            crew.end()

    def _listen(self) -> None:
        while True:
            try:
                self._member.store.get(OVER, POLL_SECONDS)
            except CollectiveTimeoutError:
                continue
            except HorovodInternalError as error:
                self._lost = self._loss(error)
            break
        if self._said is None or not self._said.failed:
            self._stop()

    def _loss(self, error: BaseException) -> Outcome:
        slot, name = self._member.slot, self._member.place.name
        text = f"rank {slot.rank} on {name} lost the task of rank 0, or the network to its host ({error})"
        return self._outcome_of(PeerLostError(text))

    def _await_others(self) -> None:
        line = self._member.line
        for rank in range(1, self._plan.size):
            # Bound: the workers of the others end as this one does; abort: the driver hangs up, or Spark kills us.
            while line is None or not line.lost:
                with suppress(CollectiveTimeoutError):
                    self._member.store.get(_ended(rank), LOOK_SECONDS)
                    break

    def _tell(self, key: str) -> None:
        with suppress(HorovodInternalError):  # the server is gone: nobody is left to be told
            self._member.store.set(key, b"")

    def _outcome_of(self, error: BaseException) -> Outcome:
        return Outcome.of(error, self._member.slot.rank, self._member.slot.host, self._member.place.name)

    def _environment(self) -> dict[str, str]:
        feed = self._feed.environment if self._feed else {}
        merged = {**os.environ, **self._member.environment, **self._plan.environment, **feed}
        path = search_path(merged.get("PYTHONPATH"))
        return merged | {"PYTHONPATH": self._plan.search_path(path) if self._plan.search_path else path}


class _Stderr:
    """Where output goes when the driver cannot be reached: into the log of the executor."""

    def sink(self, rank: int, name: str) -> Sink:
        return ConsoleSink(rank, name, sys.stderr)


def _ended(rank: int) -> str:
    return f"launcher/ended/{rank}"
