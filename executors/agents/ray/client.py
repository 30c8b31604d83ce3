"""Jobs of a Ray Client, a process outside of the cluster: a remote driver inside of it drives them."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from executors.agents.ray.actors import ActorWork
from executors.agents.ray.connection import WorkerLife
from executors.agents.ray.elastic import ElasticOptions
from executors.agents.ray.placement.nodes import how
from executors.agents.ray.placement.request import RayRequest
from executors.agents.ray.remote_driver import DriverEnd, News, RemoteDriver, RemoteEntry
from executors.agents.ray.settings import MiniSettings
from executors.agents.ray.worker_log import Callback
from executors.api import ExecutorError
from executors.job.call import Call
from executors.membership import Limits

STOP_S = 10.0


class ClientJob:
    """A :class:`executors.agents.ray.job.RayJob` that a remote driver drives, with the same methods and errors."""

    def __init__(
        self,
        request: RayRequest,
        settings: MiniSettings,
        use_current_group: bool = True,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._driver = _RemoteDriver()
        self._actors: list[Any] = []
        with ExitStack() as stack:
            stack.callback(self.close)
            self._driver.do("start", request, settings, use_current_group, dict(variables or {}))
            stack.pop_all()

    def call(
        self, method: str, call: ObjectRef[Call], ranks: int | None = None, callbacks: Sequence[Callback] = ()
    ) -> list[Any]:
        values: list[Any] = self._driver.do("call", method, [call], ranks, bool(callbacks), callbacks=callbacks)
        return values

    def submit(self, call: ObjectRef[Call]) -> list[ObjectRef[Any]]:
        """The values do not belong to the remote driver, so they outlive it."""
        self._driver.do("check")
        self._actors = self._actors or self._driver.workers()
        return [actor.run_plain.remote([call]) for actor in self._actors]

    def check(self) -> None:
        self._driver.check()

    def close(self) -> None:
        self._driver.close()


def run_elastic_by_remote_driver(
    work: ActorWork, limits: Limits, options: ElasticOptions, callbacks: Sequence[Callback] = ()
) -> list[Any]:
    """As :func:`executors.agents.ray.elastic.run_elastic`."""
    with closing(_RemoteDriver()) as driver:
        values: list[Any] = driver.do("run_elastic", work, limits, options, bool(callbacks), callbacks=callbacks)
    return values


class _RemoteDriver:
    """A remote driver, which ends with :meth:`close`, and when the wait for it is interrupted."""

    def __init__(self) -> None:
        self._resources = ExitStack()
        self._life = WorkerLife(self._resources.close)
        self._actor = _start_remote_driver()
        self._resources.callback(self._kill)

    def do(self, method: str, *args: object, callbacks: Sequence[Callback] = ()) -> Any:
        """The value of a method of the remote driver; ``callbacks`` get what the workers log meanwhile.

        Raises what the method does, and ExecutorError when the remote driver is lost.
        """
        request = getattr(self._actor, method).remote(*args)
        try:
            end = self._follow(request, callbacks)
        except BaseException as error:
            self._stop(request)
            self._life.end(_reason(error))
            raise
        return end.unwrap()

    def workers(self) -> list[Any]:
        """The actors by rank."""
        actors: list[Any] = ray.get(self._actor.workers.remote())
        return actors

    def check(self) -> None:
        """Raise ExecutorError if the remote driver has ended."""
        self._life.check()

    def close(self) -> None:
        """Let the remote driver end its workers, and end it. May be called twice."""
        if not self._life.is_over and self._life.is_connected:
            with suppress(ExecutorError):
                self.do("close")
        self._life.end("they were shut down")

    def _follow(self, request: ObjectRef[None], callbacks: Sequence[Callback]) -> DriverEnd:
        while True:
            news = self._ask(request)
            for each in news:
                _pass_on(each, callbacks)
            for each in news:
                if isinstance(each, DriverEnd):
                    return each

    def _ask(self, request: ObjectRef[None]) -> list[News]:
        try:
            news: list[News] = ray.get(self._actor.news.remote())
            if not news and ray.wait([request], timeout=0)[0]:
                ray.get(request)  # its arguments may have failed to arrive
        except RayActorError as error:
            raise ExecutorError(
                f"the actor that drives the job in the cluster {how(error)}; start the job again"
            ) from error
        except RayError as error:
            reason = str(error).strip().splitlines()[-1]
            raise ExecutorError(
                f"the actor that drives the job in the cluster cannot do so: {reason}; the modules and files that "
                "it needs must be on the nodes, or in the runtime_env of ray.init()"
            ) from error
        return news

    def _stop(self, request: ObjectRef[None]) -> None:
        """Give an elastic job a moment to end, in which it withdraws its request to the autoscaler."""
        with suppress(RayError, ConnectionError):
            if ray.get(self._actor.stop.remote(), timeout=STOP_S):
                ray.wait([request], timeout=STOP_S)

    def _kill(self) -> None:
        # The actor ends with its connection, and no other connection knows it.
        with suppress(RayError, ConnectionError):
            self._life.if_connected(ray.kill, self._actor)


def _reason(error: BaseException) -> str:
    if isinstance(error, ExecutorError):
        return "the actor that drives the job was lost"
    return f"{type(error).__name__} interrupted the wait for its workers"


def _start_remote_driver() -> Any:
    # This server ends the job of a client that was killed, so the job gains nothing from another node.
    beside_server = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    # For the call, for news and for the request to stop.
    options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 3, "scheduling_strategy": beside_server}
    level = logging.getLogger(__name__).getEffectiveLevel()
    try:
        return ray.remote(**options)(RemoteDriver).remote(level)
    except ImportError as error:
        raise ExecutorError(
            f"no job could be started from here ({error}); hvd-cluster must be installed on every node of the Ray "
            "cluster"
        ) from error


def _pass_on(news: News, callbacks: Sequence[Callback]) -> None:
    if isinstance(news, RemoteEntry):
        value = pickle.loads(news.data)
        for callback in callbacks:
            callback(value)
    elif isinstance(news, logging.LogRecord) and logging.getLogger(news.name).isEnabledFor(news.levelno):
        logging.getLogger(news.name).handle(news)
