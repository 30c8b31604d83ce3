"""One task of an elastic job: the agent of one slot, whose worker may get the rows of the task."""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

import pyarrow
from pyspark import TaskContext

from collectives import MemoryStore, attempts
from executors.agents.hosts.agent import AgentLink, serve
from executors.agents.hosts.messages import AgentLaunch, FromAgent, FromDriver
from executors.agents.local.supervisor import MessageReceived
from executors.agents.spark.broadcasts import exposed
from executors.agents.spark.plan import DEVICES, PARTITION, Feed, Feeder, FeedingTask
from executors.agents.spark.task import folder
from executors.api import ExecutorError, JobSecret
from executors.driver.outcome import Outcome
from executors.job import host

DIAL_SECONDS = 5.0
REACH_SECONDS = 30.0
# The driver ends the job after an error in the rows, unless its worker was lost already.
REPORT_SECONDS = 30.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DriverAddress:
    """Where the driver listens for the agents of a job, and their secret."""

    addresses: Sequence[str]
    port: int
    secret: JobSecret = field(repr=False)


@dataclass(frozen=True)
class TaskSlot:
    """The slot of a task: its machine, the number of the stage in its job, the partition, and the id of the task."""

    machine: str
    stage: int
    partition: int
    task: int

    @property
    def name(self) -> str:
        """The name of the slot as a host of the membership."""
        return f"{self.machine}/task-{self.stage}.{self.partition}.{self.task}"

    @classmethod
    def of(cls, name: str) -> TaskSlot:
        """The reverse of :attr:`name`."""
        machine, _, numbers = name.rpartition("/task-")
        return cls(machine, *map(int, numbers.split(".")))


def machine_of(slot: str) -> str:
    """The machine of the slot with this name."""
    return TaskSlot.of(slot).machine


def run_agent(
    driver: DriverAddress,
    stage: int,
    feeder: Feeder | None,
    batches: Iterator[pyarrow.RecordBatch],
    broadcasts: Sequence[Any] = (),
) -> Iterator[pyarrow.RecordBatch]:
    """Serve the driver until the job needs this slot no more; ``feeder`` gives ``batches`` to the workers.

    The call of the workers refers to ``broadcasts``. Yields nothing. Raises ExecutorError if the driver cannot be
    reached: Spark then starts the task again, as often as it is set to.
    """
    context = TaskContext.get()
    if context is None:
        raise ExecutorError("this process is not a task of Spark")
    gpus = context.resources().get("gpu")
    os.environ[DEVICES] = ",".join(gpus.addresses if gpus else ())
    slot = TaskSlot(host.identity(), stage, context.partitionId(), context.taskAttemptId())
    if feeder is None:
        for _ in batches:
            pass
    elif context.attemptNumber() > 0:
        batches = _begun(batches)
    with exposed(broadcasts, folder), closing(_dial(driver)) as sock:
        link = _Link(sock, driver.secret, slot.name)
        if feeder is None:
            serve(link)
        else:
            _serve_rows(link, sock, slot, feeder, batches)
    yield from ()


def _begun(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """The same ``batches``, when the first one has come.

    If rows were lost with an executor, Spark ends the next attempt of its task, and begins the stage again.
    """
    return itertools.chain(list(itertools.islice(batches, 1)), batches)


class _Link(AgentLink):
    """The thread that feeds may send, too, and waits here for the first worker.

    ``lock``: held for one message, so for no longer than the connection may be silent; any thread owns it.
    """

    def __init__(self, sock: socket.socket, secret: JobSecret, name: str) -> None:
        super().__init__(sock, secret, name)
        self._lock = threading.Lock()
        self.needs_rows = threading.Event()
        self.worker: AgentLaunch | None = None

    def open(self, data: bytes) -> list[FromDriver]:
        messages = super().open(data)
        for message in messages:
            if isinstance(message, AgentLaunch):
                self.worker = message
                self.needs_rows.set()
        return messages

    def send(self, message: FromAgent) -> None:
        with self._lock:
            super().send(message)


class _Agent(threading.Thread):
    """Serves the driver beside the thread that feeds the rows: "hvd-agent".

    Bound: the duration of the job; abort: the end of the connection, which the feeding thread closes after an error.
    """

    def __init__(self, link: _Link, feed: Feed, variables: Mapping[str, str]) -> None:
        super().__init__(name="hvd-agent", daemon=True)
        self._link = link
        self._feed = feed
        self._variables = variables
        self._has_ended = False
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            serve(self._link, self._feed.descriptors, self._variables)
        except Exception as error:  # noqa: BLE001  the main thread raises it
            self.error = error
        finally:
            self._has_ended = True
            self._link.needs_rows.set()

    def has_ended(self) -> bool:
        return self._has_ended


def _serve_rows(
    link: _Link, sock: socket.socket, slot: TaskSlot, feeder: Feeder, batches: Iterator[pyarrow.RecordBatch]
) -> None:
    """As ``serve``, while the worker gets the rows. Raises what Spark raises if the rows break off."""
    # Alone in its store, as rank 0 of one: the workers compare what they have got, whenever ranks come.
    task = FeedingTask(0, 1, folder(), MemoryStore(), logger.warning)
    with feeder.open(task) as feed:
        agent = _Agent(link, feed, {**feed.environment, PARTITION: str(slot.partition)})
        agent.start()
        rows = _Rows(batches)
        try:
            link.needs_rows.wait()  # Bound and abort: those of the agent, which sets it at its end.
            if not agent.has_ended():  # a surplus task leaves before Spark computes its rows
                feed.feed(rows, agent.has_ended)
        except Exception as error:
            if not rows.has_failed:
                _report(link, slot, error)
                agent.join(REPORT_SECONDS)
            if agent.is_alive():
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                agent.join()  # Bound: the grace of the workers, which end with the connection.
                raise
        agent.join()  # Bound and abort: those of the agent.
        if agent.error is not None:
            raise agent.error


class _Rows(Iterator[pyarrow.RecordBatch]):
    """The batches, and whether Spark failed to make them all."""

    def __init__(self, batches: Iterator[pyarrow.RecordBatch]) -> None:
        self._batches = batches
        self.has_failed = False

    def __next__(self) -> pyarrow.RecordBatch:
        try:
            return next(self._batches)
        except StopIteration:
            raise
        except Exception:
            self.has_failed = True
            raise


def _report(link: _Link, slot: TaskSlot, error: Exception) -> None:
    """The rows cannot be used: this is the failure of the worker."""
    if link.worker is not None:
        rank = int(link.worker.environment["HOROVOD_RANK"])
        outcome = Outcome.raised(error, rank, slot.machine)
        link.send(MessageReceived(link.worker.number, pickle.dumps(outcome)))


def _dial(driver: DriverAddress) -> socket.socket:
    problems: dict[str, OSError] = {}
    for _ in attempts(REACH_SECONDS):
        for address in driver.addresses:
            try:
                return socket.create_connection((address, driver.port), DIAL_SECONDS)
            except OSError as error:
                problems[address] = error
    reasons = "; ".join(f"{address} port {driver.port}: {error}" for address, error in problems.items())
    raise ExecutorError(f"the driver of the elastic job cannot be reached ({reasons}); look at spark.driver.host")
