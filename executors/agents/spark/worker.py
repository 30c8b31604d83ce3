"""The worker process of one task, from its start to its end, and how the tasks coordinate the end of the job."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from contextlib import suppress
from types import TracebackType

from collectives import CollectiveTimeoutError, EndNotes, HorovodInternalError, PeerLostError
from executors.agents.local.processes import check_command
from executors.agents.local.supervisor import TEARDOWN_SECONDS, Ended, Event, MessageReceived, Supervisor, died
from executors.agents.local.task import call_file, launch_call, search_path
from executors.agents.spark.plan import Feed, Plan
from executors.agents.spark.rendezvous import TaskMember
from executors.api import StartTimeoutError
from executors.driver.outcome import Outcome
from executors.failures import CAUSE_SECONDS
from executors.job.output import ConsoleSink, Sink

# The key that is set when the end of the job is decided: a rank failed, or all workers ended.
OVER = "launcher/over"
POLL_SECONDS = 50.0
# While the task of rank 0 waits for the others, it checks the driver this often.
LOOK_SECONDS = 1.0


class TaskWorker:
    """The worker of ``member``: a context manager. When the block ends, nothing of the worker is left.

    :meth:`start` starts the process; :meth:`fail` reports a failure of the task beside it. The first failure of a rank
    ends all workers of the job. The block of rank 0 ends last, because the rendezvous server is there. Two threads
    belong to it: "hvd-worker" watches the process and ends with it; "hvd-over" waits for :data:`OVER` or for the end of
    the server.
    """

    def __init__(self, plan: Plan, member: TaskMember) -> None:
        self._plan = plan
        self._member = member
        self._feed: Feed | None = None
        self._reported: Outcome | None = None
        self._failure: Outcome | None = None
        self._lost_server: Outcome | None = None
        self._started = False
        self._stopped = threading.Event()
        self._wake_reader, self._wake_writer = os.pipe()
        self._watcher = threading.Thread(target=self._watch, name="hvd-worker", daemon=True)
        self._end_waiter = threading.Thread(target=self._await_end, name="hvd-over", daemon=True)

    def __enter__(self) -> TaskWorker:
        self._end_waiter.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._stop()
        # Bound: the duration of the user's function; abort: _stop(), after a failure anywhere or the loss of the
        # driver, and SIGKILL of this process by Spark, which the guard of the worker notices.
        if self._watcher.ident is not None:
            self._watcher.join()
        self._report(self._failure or (self._lost_server if self._reported is None else None))
        self._publish(_ended(self._member.slot.rank))
        if self._member.slot.rank == 0:
            self._await_others()
            self._publish(OVER)
        self._end_waiter.join()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    @property
    def outcome(self) -> Outcome | None:
        """The outcome, after the block; None if the worker was ended because of another rank."""
        return self._failure or self._reported or self._lost_server

    def start(self, feed: Feed | None = None) -> None:
        """Start the process, which reads from ``feed``; once, inside the block."""
        self._feed = feed
        self._watcher.start()

    def stopped(self) -> bool:
        """Whether the worker has ended or is about to end, so that it needs no more rows."""
        return self._stopped.is_set() or self._reported is not None or not self._watcher.is_alive()

    def fail(self, outcome: Outcome) -> None:
        """Report a failure of the task itself. ``outcome`` replaces the outcome of the worker."""
        self._failure = outcome
        self._publish(OVER)
        self._stop()

    def _stop(self) -> None:
        self._stopped.set()
        os.write(self._wake_writer, b".")

    def _watch(self) -> None:
        try:
            self._run()
        except Exception as error:  # noqa: BLE001  such as a process that cannot start
            self._reported = self._outcome_of(error)
        if self._reported is not None and self._reported.failed:
            if self._reported.consequence:
                # Bound: CAUSE_SECONDS; abort: the failure that caused this one is reported.
                self._stopped.wait(CAUSE_SECONDS)
            self._publish(OVER)
        if self._failure is None:
            self._report(self._reported)

    def _report(self, outcome: Outcome | None) -> None:
        # Spark reports it only when the task ends, and the task may have to wait for its input.
        if outcome is not None and outcome.failed and self._member.connection is not None:
            self._member.connection.report(pickle.dumps(outcome))

    def _run(self) -> None:
        rank, python = self._member.slot.rank, self._plan.executable or sys.executable
        check_command(python, self._environment(), self._member.location.name)
        with call_file(self._plan.call) as file, Supervisor(self._plan.grace) as supervisor:
            supervisor.listen(self._wake_reader, supervisor.end)
            if self._member.connection is not None:
                supervisor.listen(self._member.connection.fileno(), self._stop)
            launch_call(
                lambda command, messages, inherited: supervisor.launch(
                    rank,
                    command,
                    self._environment(),
                    self._member.connection or _Stderr(),
                    messages,
                    (*inherited, *(self._feed.descriptors if self._feed else ())),
                ),
                python,
                file,
                self._member.location.name,
            )
            supervisor.after(self._plan.start_timeout, lambda: self._check_up(supervisor))
            for event in supervisor.events():
                self._handle(supervisor, event)

    def _handle(self, supervisor: Supervisor, event: Event) -> None:
        if isinstance(event, MessageReceived) and not event.message:
            self._started = True
        elif isinstance(event, MessageReceived):
            outcome: Outcome = pickle.loads(event.message)
            self._reported = outcome
            self._finish(supervisor, outcome)
        elif isinstance(event, Ended) and self._reported is None and not self._stopped.is_set():
            slot, name = self._member.slot, self._member.location.name
            self._reported = self._outcome_of(died(event, " before its function returned", slot.host, name))

    def _finish(self, supervisor: Supervisor, outcome: Outcome) -> None:
        if not outcome.failed:
            self._note_end()
            supervisor.after(TEARDOWN_SECONDS, supervisor.end)
            return
        if not outcome.consequence:
            self._publish(OVER)
        supervisor.end(spare=outcome.rank)

    def _note_end(self) -> None:
        """Let ranks that wait for this one in init() hear that it will not come."""
        slot, name = self._member.slot, self._member.location.name
        with suppress(HorovodInternalError):  # the server is gone, so no rank waits
            EndNotes(self._member.store, self._member.environment["HOROVOD_JOB_ID"]).leave(slot.rank, name, "returned")

    def _check_up(self, supervisor: Supervisor) -> None:
        if not self._started and self._reported is None:
            seconds = f"{self._plan.start_timeout:g} s"
            where = f"rank {self._member.slot.rank} on {self._member.location.name}"
            text = f"the Python of {where} did not come up within {seconds}; raise start_timeout if the host is slow"
            self._reported = self._outcome_of(StartTimeoutError(text))
            supervisor.end()

    def _await_end(self) -> None:
        while True:
            try:
                self._member.store.get(OVER, POLL_SECONDS)
            except CollectiveTimeoutError:
                continue
            except HorovodInternalError as error:
                self._lost_server = self._loss(error)
            break
        if self._reported is None or not self._reported.failed:
            self._stop()

    def _loss(self, error: BaseException) -> Outcome:
        slot, name = self._member.slot, self._member.location.name
        text = f"rank {slot.rank} on {name} lost the task of rank 0, or the network to its host ({error})"
        return self._outcome_of(PeerLostError(text))

    def _await_others(self) -> None:
        connection = self._member.connection
        for rank in range(1, self._plan.size):
            # Bound: the other workers end as this one does; abort: the driver disconnects, or Spark kills this process.
            while connection is None or not connection.lost:
                with suppress(CollectiveTimeoutError):
                    self._member.store.get(_ended(rank), LOOK_SECONDS)
                    break

    def _publish(self, key: str) -> None:
        with suppress(HorovodInternalError):  # the server is gone, so no task waits for the key
            self._member.store.set(key, b"")

    def _outcome_of(self, error: BaseException) -> Outcome:
        return Outcome.of(error, self._member.slot.rank, self._member.slot.host, self._member.location.name)

    def _environment(self) -> dict[str, str]:
        feed = self._feed.environment if self._feed else {}
        merged = {**os.environ, **self._member.environment, **self._plan.environment, **feed}
        path = search_path(merged.get("PYTHONPATH"))
        return merged | {"PYTHONPATH": self._plan.search_path(path) if self._plan.search_path else path}


class _Stderr:
    """The destination of output when the driver cannot be reached: the log of the executor."""

    def sink(self, rank: int, name: str) -> Sink:
        return ConsoleSink(rank, name, sys.stderr)


def _ended(rank: int) -> str:
    return f"launcher/ended/{rank}"
