"""``BaseHorovodWorker``: one rank in an actor that the user makes."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from executors.agents.ray import Queue, ray, send_to

__all__ = ["BaseHorovodWorker"]


class BaseHorovodWorker:
    """The worker of Horovod on Ray, for code that starts actors itself: ``ray.remote(BaseHorovodWorker)``.

    :class:`RayExecutor` needs no such class. The constructor sets HOROVOD_HOSTNAME, which is the id of the Ray node,
    HOROVOD_RANK and HOROVOD_SIZE. Where the ranks find each other has to come by :meth:`update_env_vars`.
    """

    executable: Any = None

    def __init__(self, world_rank: int = 0, world_size: int = 1) -> None:
        self.update_env_vars(
            {"HOROVOD_HOSTNAME": self.node_id(), "HOROVOD_RANK": world_rank, "HOROVOD_SIZE": world_size}
        )

    def node_id(self) -> str:
        """The id of the node of this actor, in hexadecimal."""
        node: str = ray.get_runtime_context().get_node_id()
        return node

    def hostname(self) -> str:
        """The host name of its node."""
        return socket.gethostname()

    def get_gpu_ids(self) -> list[str]:
        """The GPUs that Ray gave to this actor."""
        return list(ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))

    def update_env_vars(self, env_vars: Mapping[str, object]) -> None:
        """Set variables of the process; values become text."""
        os.environ.update({name: str(value) for name, value in env_vars.items()})

    def env_vars(self) -> dict[str, str]:
        """The variables of the process."""
        return dict(os.environ)

    def start_executable(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the executable, an object of ``executable_cls``, if that is given. Raises what its constructor does."""
        if executable_cls is not None:
            self.executable = executable_cls(*(executable_args or ()), **(executable_kwargs or {}))

    def execute(self, func: Callable[[Any], Any]) -> Any:
        """The value of ``func(executable)``; None stands for the executable where there is none."""
        return func(self.executable)

    def set_queue(self, queue: Queue) -> None:
        """Let :func:`hvd_cluster.ray.log` put its values into ``queue``, such as a ``ray.util.queue.Queue``."""
        send_to(queue)
