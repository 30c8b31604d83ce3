"""One elastic job on Spark: each task of a plain stage is the agent of one slot; slots come and go with executors."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from collectives import ENVIRONMENT_SECRET, override
from executors.agents.hosts.agent_server import AgentConnection, AgentServer, Listener, dispatch
from executors.agents.hosts.messages import (
    SAME_VERSIONS,
    AgentLaunch,
    AgentLeave,
    AgentStop,
    Begin,
    EndAll,
    FromAgent,
    Kill,
)
from executors.agents.local.job import FunctionProgram, ProcessJob
from executors.agents.local.supervisor import longest_end
from executors.agents.local.work import CallWork
from executors.agents.spark.broadcasts import PickledCall
from executors.agents.spark.elastic_task import DriverAddress, TaskSlot, machine_of, run_agent
from executors.agents.spark.plan import SparkOptions
from executors.agents.spark.session import Session, reason
from executors.agents.spark.stage import Stage, StageFinished
from executors.api import ExecutorError, number_of
from executors.job.job import Job
from executors.job.loop import Loop
from executors.job.output import Output, SinkTable
from executors.membership import Limits

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
    return job.values()


class ElasticSparkJob(ProcessJob, Listener):
    """One job, with an agent in each task of a stage: a context manager that leaves no task behind."""

    _loop: Loop

    def __init__(
        self, session: Session, frame: Any, call: PickledCall, limits: Limits, output: Output, options: SparkOptions
    ) -> None:
        bound, self._reached = session.addresses()
        job, seconds, page = Job(limits.size, bound), options.start_timeout, options.dashboard
        super().__init__(limits, job, FunctionProgram(), output, seconds, page, "hvd_cluster", machine_of)
        self._session = session
        self._frame = frame
        self._options = options
        self._broadcasts = call.broadcasts
        self._work = CallWork(call.data, options.executable, None, options.search_path)
        self._loop = Loop()
        self._agent_server = AgentServer(bound, self._job.secret, self)
        self._links: dict[str, AgentConnection] = {}
        self._refused: dict[str, AgentConnection] = {}
        self._workers: dict[int, str] = {}
        self._leaving: set[str] = set()
        self._stages: list[Stage] = []
        # By stage: the partitions that Spark takes for computed, because a surplus task of them has ended.
        self._released: list[set[int]] = []
        self._has_begun = False
        self._error: ExecutorError | None = None

    @override
    def _open(self, stack: ExitStack) -> None:
        super()._open(stack)
        self._sinks = SinkTable(self._outputs)
        stack.callback(self._sinks.close)
        stack.enter_context(self._agent_server)

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
        address = DriverAddress(self._reached, self._agent_server.port, self._job.secret)
        number, feeder, broadcasts = len(self._stages), self._options.feeder, self._broadcasts

        def task(batches: Iterator[Any]) -> Iterator[Any]:
            return run_agent(address, number, feeder, batches, broadcasts)

        stage = Stage(self._session, self._frame.mapInArrow(task, SCHEMA).toArrow, self._finished)
        self._released.append(set())
        self._stages.append(self._entered.enter_context(stage))

    def _is_over(self) -> bool:
        return self._error is not None or (self.driver.is_over and not self._workers)

    # Agents.

    @override
    def start(self, worker: str, host: str, environment: Mapping[str, str]) -> None:
        number = self.number(worker)
        own = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": self._reached[0], **self._options.environment}
        given = self.variables(environment, own, self._options.nics)
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

    @override
    def stop(self, worker: str) -> None:
        self._tell(worker, AgentStop(number_of(worker)))

    @override
    def kill(self, worker: str) -> None:
        self._tell(worker, Kill(number_of(worker)))

    @override
    def end(self, spare: str | None = None) -> None:
        for link in self._links.values():
            link.send(EndAll(None if spare is None else number_of(spare)))
        self.after(longest_end(self._options.grace), self._give_up_workers)

    def _give_up_workers(self) -> None:
        """The agents whose workers have not ended in time count as lost."""
        for slot in set(self._workers.values()) & self._links.keys():
            self._links[slot].close()

    def _tell(self, worker: str, message: AgentStop | Kill) -> None:
        if number_of(worker) in self._workers:
            self._send(self._workers[number_of(worker)], message)

    def _send(self, slot: str, message: AgentLaunch | AgentStop | Kill) -> None:
        if slot in self._links:
            self._links[slot].send(message)

    # In the thread of the agent server, and of Spark.

    @override
    def connected(self, link: AgentConnection) -> None:
        self.soon(partial(self._connected, link))

    @override
    def received(self, link: AgentConnection, message: FromAgent) -> None:
        self.soon(partial(dispatch, message, self._sinks, self._gone, self))

    @override
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

    def _gone(self, number: int) -> None:
        self._workers.pop(number, None)

    def _disconnected(self, slot: str) -> None:
        if self._refused.pop(slot, None) is not None:
            self.driver.host_unusable(slot, None)
        if self._links.pop(slot, None) is None:
            return
        self._workers = {number: place for number, place in self._workers.items() if place != slot}
        if not self.driver.is_over:
            self.host_lost(slot, "its task was lost: Spark lost the executor, or killed it")
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
