"""One elastic job on Spark: each task of a plain stage is the agent of one slot; slots come and go with executors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

from collectives.settings import ENVIRONMENT_SECRET
from executors.agents.hosts.agent_server import AgentConnection, AgentServer
from executors.agents.hosts.messages import (
    SAME_VERSIONS,
    AgentFailed,
    AgentLaunch,
    AgentLeave,
    AgentStop,
    Begin,
    EndAll,
    FromAgent,
    Kill,
    Wrote,
)
from executors.agents.hosts.run import FunctionOutcomes
from executors.agents.local.output import Output, SinkTable, Tails
from executors.agents.local.supervisor import Ended, MessageReceived, longest_end
from executors.agents.local.work import CallWork
from executors.agents.spark.broadcasts import PickledCall
from executors.agents.spark.elastic_task import DriverAddress, TaskSlot, machine_of, run_agent
from executors.agents.spark.plan import SparkOptions
from executors.agents.spark.session import Session, reason
from executors.agents.spark.stage import Stage, StageFinished
from executors.api import ExecutorError, number_of, worker_id
from executors.dashboard.dashboard import Dashboard
from executors.driver.driver import Driver
from executors.job.environment import interface_variables
from executors.job.job import Job
from executors.job.loop import Loop
from executors.membership import Limits
from executors.membership.failures import Failure, FailureKind

logger = logging.getLogger(__name__)

SCHEMA = "slot string"
DRAIN_LOOK_SECONDS = 1.0
# Tasks of one stage start one after the other; later ones lack slots.
SETTLE_SECONDS = 5.0
SHOWN = 16


def run_elastic_on_spark(
    session: Session, frame: Any, call: PickledCall, limits: Limits, output: Output, options: SparkOptions
) -> list[object]:
    """Run ``call`` on workers within ``limits``, one beside each partition of ``frame``; the values by rank.

    ``frame`` has as many partitions as there may be workers. If ``options`` have a feeder, it feeds the workers.
    The ranks are those of the world in which the first worker was done. Raises the exception of a worker as itself,
    with a RemoteError as its cause; WorkerError if the job cannot go on after a loss; ExecutorError for too few
    workers, or an error of Spark.
    """
    with ElasticSparkJob(session, frame, call, limits, output, options) as job:
        job.run()
    return job.outcomes.values(job.driver.order)


class ElasticSparkJob:
    """The agents of the driver of one job, and its loop: a context manager that leaves no task behind."""

    def __init__(
        self, session: Session, frame: Any, call: PickledCall, limits: Limits, output: Output, options: SparkOptions
    ) -> None:
        bound, self._reached = session.addresses()
        self._session = session
        self._frame = frame
        self._limits = limits
        self._options = options
        self._broadcasts = call.broadcasts
        self._work = CallWork(call.data, options.executable, None, options.search_path)
        self._job = Job(limits.size, bound)
        self._dashboard = Dashboard(self._job, options.dashboard, "hvd_cluster")
        self._loop = Loop()
        self._switchboard = AgentServer(bound, self._job.secret, self)
        self._output = output
        self._links: dict[str, AgentConnection] = {}
        self._refused: dict[str, AgentConnection] = {}
        self._workers: dict[int, str] = {}
        self._leaving: set[str] = set()
        self._stages: list[Stage] = []
        # By stage: the partitions that Spark takes for computed, because a surplus task of them has ended.
        self._released: list[set[int]] = []
        self._has_begun = False
        self._error: ExecutorError | None = None
        self._has_ended = False
        self._stack = ExitStack()
        self.outcomes = FunctionOutcomes()

    def __enter__(self) -> ElasticSparkJob:
        with ExitStack() as stack:
            stack.enter_context(self._output)
            stack.enter_context(self._job)
            stack.enter_context(self._dashboard)
            self._tails = Tails(self._dashboard.watched(self._output))
            self._sinks = SinkTable(self._tails)
            stack.enter_context(self._switchboard)
            self.driver = Driver(self._limits, self._job, self, self._options.start_timeout, machine=machine_of)
            stack.callback(self.driver.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)
        self._sinks.close()

    def run(self) -> None:
        """Return when every worker has ended and none will be started. Raises the failure, if there was one."""
        with ExitStack() as self._entered:
            self._begin_stage()
            self._changed()
            self._look_for_notices()
            self._loop.run(self._is_over)
            for link in self._links.values():
                link.send(AgentLeave())
            for link in self._refused.values():
                link.close()
        if self._error is not None:
            raise self._error
        self.driver.check()

    def _begin_stage(self) -> None:
        """Let Spark start a task for each partition."""
        address = DriverAddress(self._reached, self._switchboard.port, self._job.secret)
        number, feeder, broadcasts = len(self._stages), self._options.feeder, self._broadcasts

        def task(batches: Iterator[Any]) -> Iterator[Any]:
            return run_agent(address, number, feeder, batches, broadcasts)

        stage = Stage(self._session, self._frame.mapInArrow(task, SCHEMA).toArrow, self._finished)
        self._released.append(set())
        self._stages.append(self._entered.enter_context(stage))

    def _is_over(self) -> bool:
        return self._error is not None or (self.driver.is_over and not self._workers)

    # Agents.

    def start(self, worker: str, host: str, environment: Mapping[str, str]) -> None:
        number = number_of(worker)
        given = {
            **interface_variables(self._options.nics),
            **environment,
            **self._dashboard.variables(),
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": self._reached[0],
            **self._options.environment,
        }
        del given[ENVIRONMENT_SECRET]  # the agent knows it
        self._workers[number] = host
        self._send(host, AgentLaunch(number, given))
        if not self._has_begun:
            self._has_begun = True
            self.after(SETTLE_SECONDS, self._tell_of_missing)

    def _tell_of_missing(self) -> None:
        missing = sorted(set(range(self._limits.most)) - self._present() - _partitions(self._refused))
        if missing and self._options.feeder is not None and not self.driver.is_over:
            logger.warning(
                "%d of %d partitions of the DataFrame have no task yet (%s): their rows are not trained until Spark "
                "has a slot for it",
                len(missing),
                self._limits.most,
                ", ".join(map(str, missing[:SHOWN])) + (", ..." if len(missing) > SHOWN else ""),
            )

    def stop(self, worker: str) -> None:
        self._tell(worker, AgentStop(number_of(worker)))

    def kill(self, worker: str) -> None:
        self._tell(worker, Kill(number_of(worker)))

    def end(self, spare: str | None = None) -> None:
        for link in self._links.values():
            link.send(EndAll(None if spare is None else number_of(spare)))
        self.after(longest_end(self._options.grace), self._give_up_workers)

    def _give_up_workers(self) -> None:
        """The agents whose workers have not ended in time count as lost."""
        for slot in set(self._workers.values()) & self._links.keys():
            self._links[slot].close()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self._loop.after(seconds, action)

    def soon(self, action: Callable[[], None]) -> None:
        self._loop.soon(action)

    def _tell(self, worker: str, message: AgentStop | Kill) -> None:
        if number_of(worker) in self._workers:
            self._send(self._workers[number_of(worker)], message)

    def _send(self, slot: str, message: AgentLaunch | AgentStop | Kill) -> None:
        if slot in self._links:
            self._links[slot].send(message)

    # In the thread of the switchboard, and of Spark.

    def connected(self, link: AgentConnection) -> None:
        self.soon(partial(self._connected, link))

    def received(self, link: AgentConnection, message: FromAgent) -> None:
        self.soon(partial(self._received, message))

    def disconnected(self, link: AgentConnection, text: str) -> None:
        self.soon(partial(self._disconnected, link.hello.host))

    def _finished(self, end: StageFinished) -> None:
        self.soon(partial(self._spark_ended, end))

    # In the loop.

    def _connected(self, link: AgentConnection) -> None:
        if link.hello.mismatch:
            self._refuse(link, f"{link.hello.mismatch}; {SAME_VERSIONS}")
            return
        link.send(Begin(self._work, 1, self._options.grace))
        if self._is_surplus(TaskSlot.of(link.hello.host)):
            link.send(AgentLeave())
        else:
            self._links[link.hello.host] = link
            self._changed()

    def _refuse(self, link: AgentConnection, text: str) -> None:
        """Leave the task without work. It must not fail, because Spark would start it again on the same executor, and
        end the job after some failures.
        """
        slot = link.hello.host
        rows = "" if self._options.feeder is None else "; the rows of its partition are not trained"
        told = f"host {slot} cannot be used: {text}{rows}"
        self._refused[slot] = link
        self.driver.host_unusable(slot, text)
        if not self.driver.members and len(self._refused) > self._limits.most - self._limits.least:
            self._fail(told)
        else:
            logger.warning(told)

    def _is_surplus(self, slot: TaskSlot) -> bool:
        """Whether the task of ``slot`` may end, because another one of its partition lives.

        After the loss of an executor with rows that others need, Spark begins the stage again with all of its tasks,
        while those on other executors still run. The last task must not end, because Spark would then end all.
        """
        released = self._released[slot.stage]
        if slot.partition not in self._present() or len(released | {slot.partition}) == self._limits.most:
            return False
        released.add(slot.partition)
        return True

    def _present(self) -> set[int]:
        """The partitions that have a task."""
        return _partitions(self._links.keys() - self._leaving)

    def _received(self, message: FromAgent) -> None:
        if isinstance(message, Wrote):
            self._sinks.write(message.number, message.stream, message.data)
        elif isinstance(message, AgentFailed):
            self._workers.pop(message.number, None)
            self.driver.failed(worker_id(message.number), Failure(FailureKind.EXIT, message.text, has_begun=False))
        elif isinstance(message, MessageReceived):
            self.outcomes.received(self, message.rank, message.message)
        elif isinstance(message, Ended):
            self._ended(message)

    def _ended(self, event: Ended) -> None:
        self._workers.pop(event.rank, None)
        failure = self.outcomes.failure(event.rank, event.code, self._tails.last_lines(event.rank))
        if failure is None:
            self.driver.done(worker_id(event.rank))
        else:
            self.driver.failed(worker_id(event.rank), failure)

    def _disconnected(self, slot: str) -> None:
        if self._refused.pop(slot, None) is not None:
            self.driver.host_unusable(slot, None)
        if self._links.pop(slot, None) is None:
            return
        self._workers = {number: place for number, place in self._workers.items() if place != slot}
        if not self.driver.is_over:
            text = "its task was lost: Spark lost the executor, or killed it"
            self.driver.host_lost(slot, text, lambda worker: self.outcomes.has_returned(number_of(worker)))
            self._changed()
            partition = TaskSlot.of(slot).partition
            if partition in self._released[-1] and partition not in self._present():
                self._begin_stage()  # Spark would not start a successor

    def _changed(self) -> None:
        """One task of each partition is a slot."""
        slots = {TaskSlot.of(name).partition: name for name in reversed(self._links) if name not in self._leaving}
        self.driver.found(dict.fromkeys(reversed(slots.values()), 1))

    def _spark_ended(self, end: StageFinished) -> None:
        if self.driver.is_over:
            return
        text = "all tasks ended" if end.error is None else reason(str(end.error))
        if end.error is None and not self._has_begun and self._options.feeder is not None:
            text = "the DataFrame has no rows"
        logger.debug("Spark ended the stage", exc_info=end.error)
        self._fail(
            f"Spark ended the elastic job: {text}; Spark starts a lost task again up to spark.task.maxFailures times, "
            "and all tasks of a stage, when an executor with their rows is lost, up to "
            "spark.stage.maxConsecutiveAttempts times"
        )

    def _fail(self, text: str) -> None:
        self._error = self._error or ExecutorError(text)
        self.end()

    def _look_for_notices(self) -> None:
        """Let the workers of executors that Spark decommissions hand over."""
        tasks = set().union(*(stage.leaving() for stage in self._stages))
        # An executor that leaves does not come back, also when Spark fails to name it once.
        leaving = {slot for slot in self._links if slot in self._leaving or TaskSlot.of(slot).task in tasks}
        if leaving != self._leaving:
            self._leaving = leaving
            self._changed()
        self._loop.after(DRAIN_LOOK_SECONDS, self._look_for_notices)


def _partitions(slots: Iterable[str]) -> set[int]:
    return {TaskSlot.of(slot).partition for slot in slots}
