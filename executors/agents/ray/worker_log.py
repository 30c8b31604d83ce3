"""Log entries of the workers of a job for its driver: values in the rendezvous store of the job."""

from __future__ import annotations

import base64
import itertools
import logging
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import ray.cloudpickle

from collectives import ENVIRONMENT_SECRET, RendezvousClient
from executors.job.job import Job

logger = logging.getLogger(__name__)

LOGS = "logs/"

Callback = Callable[[object], object]


class Queue(Protocol):
    """Takes what is logged."""

    def put(self, item: object, /) -> object:
        """Add ``item``."""


class _Channel:
    """A worker's way to the driver: entry k is at ``logs/<process>/<k>``."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._client = RendezvousClient(
            environment["HOROVOD_GLOO_RENDEZVOUS_ADDR"],
            int(environment["HOROVOD_GLOO_RENDEZVOUS_PORT"]),
            base64.b64decode(environment[ENVIRONMENT_SECRET]),
        )
        self._name = environment.get("HOROVOD_WORKER_ID") or environment["HOROVOD_RANK"]
        self._numbers = itertools.count()

    def send(self, value: object) -> None:
        # As for results: the pickler that knows the classes of the call, so that they are the same in the driver.
        self._client.set(f"{LOGS}{self._name}/{next(self._numbers)}", ray.cloudpickle.dumps(value))


_ways: dict[int, Callable[[object], object]] = {}
_warned: set[int] = set()


def configure(environment: Mapping[str, str]) -> None:
    """Let :func:`log` of this process reach the driver of the job that ``environment`` describes."""
    _ways[os.getpid()] = _Channel(environment).send


def send_to(queue: Queue) -> None:
    """Let :func:`log` of this process put its values into ``queue``."""
    _ways[os.getpid()] = queue.put


def log(info: object) -> None:
    """Give ``info``, usually a dict, to the callbacks of the driver's ``run``, and return when the driver has it.

    Without a job, one warning says that nobody gets it. Raises HorovodInternalError if the driver cannot be reached,
    and what the pickler raises.
    """
    process = os.getpid()  # a forked child must not answer for its parent
    way = _ways.get(process)
    if way is not None:
        way(info)
    elif process not in _warned:
        _warned.add(process)
        logger.warning("log() was called in a process that is not a worker of a RayExecutor; the value is dropped")


def listen(job: Job, soon: Callable[[Callable[[], None]], None], callbacks: Sequence[Callback]) -> Callable[[], None]:
    """Call each of ``callbacks``, by ``soon``, with each value that a worker of ``job`` logs.

    That ends when the result is called.
    """

    def take(key: str) -> None:
        sent = job.take(key)
        if sent is None:
            return
        value = pickle.loads(sent)
        for callback in callbacks:
            callback(value)

    def note(key: str) -> None:
        """In the thread of the rendezvous server."""
        if key.startswith(LOGS):
            soon(lambda: take(key))

    return job.subscribe(note)
