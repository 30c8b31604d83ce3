"""The driver's side of any job: the rendezvous server, the secret, the environment of each rank."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Callable, MutableMapping
from types import TracebackType

from collectives import ENVIRONMENT_SECRET, MemoryStore, Observer, RendezvousServer, Store
from executors.api import JobSecret, Slot
from executors.job.environment import Course

REMEMBERED_KEYS = 1 << 14


class Inbox:
    """Takes each value out of ``store`` once, though its worker sends it again after a connection that broke.

    It remembers the last keys only, because a worker sends again within seconds.
    """

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._taken: dict[str, None] = {}  # the oldest key is the first one

    def take(self, key: str) -> bytes | None:
        """The value of ``key``, which is removed from the store; None if it was taken before."""
        value = self._store.peek(key)
        self._store.delete(key)
        if value is None or key in self._taken:
            return None
        self._remember(key)
        return value

    def _remember(self, key: str) -> None:
        self._taken[key] = None
        if len(self._taken) > REMEMBERED_KEYS:
            del self._taken[next(iter(self._taken))]


class Job:
    """A job of ``size`` ranks: a context manager that runs the rendezvous server of the job.

    ``host`` is the address of this machine that the server binds to and that the workers get: 127.0.0.1 for workers of
    this machine only, else an address that every worker can reach. The server is up inside the ``with`` block, which
    can be entered once. ``course`` says when it was requested; without it, that was now. Raises SettingsError, a
    ValueError, if ``host`` is no address of this machine.
    """

    def __init__(
        self, size: int, host: str = "127.0.0.1", secret: JobSecret | None = None, course: Course | None = None
    ) -> None:
        if size < 1:
            raise ValueError(f"a job needs at least 1 rank, got size {size}")
        self.size = size
        self.host = host
        self.secret = secret or JobSecret()
        self.course = course or Course(time.time())
        self._server = RendezvousServer(self.secret.key, host=host)
        self.store: Store = self._server.store
        """That of the rendezvous server, in this process."""
        self._inbox = Inbox(self._server.store)
        self._port = 0

    def __enter__(self) -> Job:
        self._port = self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop()
        self._port = 0

    @property
    def id(self) -> str:
        """The name of the job, which all of its ranks have."""
        return _id_of(self.secret)

    @property
    def port(self) -> int:
        """The port of the rendezvous server; 0 while it is down."""
        return self._port

    def subscribe(self, observer: Observer) -> Callable[[], None]:
        """Call ``observer(key)`` at each change of the store, until the result is called; see MemoryStore."""
        return self._server.store.subscribe(observer)

    def take(self, key: str) -> bytes | None:
        """The value that a worker has sent under ``key``; None if it was taken before. See Inbox."""
        return self._inbox.take(key)

    def environment(self, slot: Slot) -> dict[str, str]:
        """The variables that the worker at ``slot`` needs in its environment.

        It holds the secret: hand it over by environment or by the cluster's own channel, never on a command line.
        Raises ValueError for a slot of a job of another size, RuntimeError outside of the ``with`` block.
        """
        if slot.size != self.size:
            raise ValueError(f"slot {slot} belongs to a job of {slot.size} ranks, this one has {self.size}")
        if not self._port:
            raise RuntimeError("the rendezvous server is not running; use the job inside its with block")
        return self.place(slot)

    def place(self, slot: Slot, is_newcomer: bool = False) -> dict[str, str]:
        """As :meth:`environment`, for a job of any size; a worker ``is_newcomer`` if the job has begun without it."""
        course = Course() if is_newcomer else self.course
        return environment_of(slot, self.host, self._port, self.secret, course)


def environment_of(slot: Slot, host: str, port: int, secret: JobSecret, course: Course) -> dict[str, str]:
    """The result of :meth:`Job.environment` for the job of ``secret`` at ``host`` and ``port``."""
    return {
        **slot.environment(),
        "HOROVOD_CONTROLLER": "gloo",
        # A worker of an elastic job may start a job of its own.
        "HOROVOD_ELASTIC": "0",
        "HOROVOD_JOB_ID": _id_of(secret),
        "HOROVOD_ROUND": "0",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": host,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "PYTHONUNBUFFERED": "1",
        **course.variable(),
        **secret_variable(secret),
    }


def is_job_id(text: str) -> bool:
    """Whether ``text`` has the form of :attr:`Job.id`."""
    return re.fullmatch(r"[0-9a-f]{12}", text) is not None


def _id_of(secret: JobSecret) -> str:
    return hashlib.sha256(b"job" + secret.key).hexdigest()[:12]


def secret_variable(secret: JobSecret) -> dict[str, str]:
    """The variable that has ``secret``; never on a command line."""
    return {ENVIRONMENT_SECRET: base64.b64encode(secret.key).decode("ascii")}


def secret_of(environment: MutableMapping[str, str]) -> JobSecret:
    """The reverse of :func:`secret_variable`; removes it, so that other processes do not inherit it."""
    return JobSecret(base64.b64decode(environment.pop(ENVIRONMENT_SECRET)))
