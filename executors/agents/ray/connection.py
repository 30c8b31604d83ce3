"""This process's connection to a Ray cluster, and the life of workers, which ends with it at the latest."""

from __future__ import annotations

from collections.abc import Callable

import ray
from ray import ObjectRef

from executors.api import ExecutorError
from executors.job.call import Call, refusal


def connection() -> str | None:
    """The identity of the connection: it changes after ``ray.shutdown()`` and ``ray.init()``; None if not connected."""
    if not ray.is_initialized():
        return None
    identity: str = ray.get_runtime_context().get_worker_id()
    return identity


def check_connection() -> None:
    """Raise ExecutorError unless this process is a driver, a worker or a client of a Ray cluster."""
    # Ray's own functions would connect implicitly, to a new cluster with an authentication of its own.
    if not ray.is_initialized():
        raise ExecutorError("Ray is not initialized; call ray.init() first")


def is_client() -> bool:
    """Whether this process is outside of the cluster, by ``ray.init("ray://...")``."""
    connected: bool = ray.util.client.ray.is_connected()
    return connected


class WorkerLife:
    """Begins now; ``release`` is called at its end, and may be called again.

    Actors and placement groups end with their connection, and no other connection knows them.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        self._connection = connection()
        self._release = release
        self._reason: str | None = None

    @property
    def is_connected(self) -> bool:
        """Whether this process still has the connection that it had at the beginning."""
        return self._connection == connection()

    @property
    def is_over(self) -> bool:
        """Whether it was ended."""
        return self._reason is not None

    def check(self) -> None:
        """Raise ExecutorError if the workers have ended."""
        if not self.is_connected:
            self.end("ray.shutdown() was called meanwhile")
        if self._reason is not None:
            raise have_ended(self._reason)

    def end(self, reason: str) -> None:
        """The workers end, for the ``reason``; the first one counts. Goes on with an end that was interrupted."""
        self._reason = self._reason or reason
        self._release()

    def if_connected(self, action: Callable[..., None], *args: object) -> None:
        """Call ``action(*args)``, unless the connection has gone with all that it is for."""
        if self.is_connected:
            action(*args)


def have_ended(reason: str) -> ExecutorError:
    """The error of a call to workers that have ended."""
    return ExecutorError(f"the workers have ended: {reason}; call shutdown() and start() again")


def store(call: Call) -> ObjectRef[Call]:
    """Put ``call`` into the object store, where all workers of a node share one copy of its arrays.

    Raises TypeError that names the function when it cannot be pickled.
    """
    try:
        return ray.put(call)
    except Exception as error:
        raise refusal(call, error.__cause__ or error, ray.cloudpickle.dumps) from error
