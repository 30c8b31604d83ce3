"""The backend "HVD" of ``ray.util.collective``, for tensors of torch, and for arrays of NumPy that can be written.

The driver imports this, and each actor does before its first collective. Then
``init_collective_group(size, rank, "HVD", name)`` and ``create_collective_group(actors, size, ranks, "HVD", name)``
work as with "GLOO".
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import numpy as np
import ray
import torch
from ray.experimental import internal_kv
from ray.util.collective.backend_registry import register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import Backend, ReduceOp
from torch import distributed as dist

from collectives import InvalidRequestError, override
from hvd_cluster.torch.distributed import HvdProcessGroup
from hvd_cluster.torch.distributed.group_engine import GroupEngine

__all__ = ["HvdGroup"]

NAME = "HVD"
SECONDS = 300.0
"""How long a rank waits for the others, where a group meets and in each collective."""
POLL_SECONDS = 0.05
_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
}


class KeyValueStore:
    """Ray's own key-value store, as a Store of torch.distributed, for the group ``name`` of this job."""

    def __init__(self, name: str) -> None:
        self._prefix = f"hvd-cluster.{ray.get_runtime_context().get_job_id()}.{name}."

    def set(self, key: str, value: bytes) -> None:
        """Write ``value``."""
        internal_kv._internal_kv_put(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        """The value, b"" if there is none."""
        value: bytes | None = internal_kv._internal_kv_get(self._prefix + key)
        return value or b""

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until all ``keys`` have a value; RuntimeError after ``timeout``."""
        deadline = time.monotonic() + timeout.total_seconds()
        while not all([self.get(key) for key in keys]):
            if time.monotonic() >= deadline:
                raise RuntimeError(f"Ray's key-value store has no {', '.join(keys)} within {timeout}")
            time.sleep(POLL_SECONDS)

    def delete_key(self, key: str) -> None:
        """Remove the value, if there is one."""
        internal_kv._internal_kv_del(self._prefix + key)


class HvdGroup(BaseGroup):
    """Collectives of the ranks of one group, on an engine of their own. All of them wait for their end.

    ``send`` and ``recv`` are refused. InvalidRequestError, a ValueError, for arguments that cannot travel; the other
    ranks then wait until their timeout.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        engine = GroupEngine(KeyValueStore(group_name), rank, world_size, f"ray {group_name}", SECONDS)
        self._group = HvdProcessGroup(engine, rank, world_size)

    @classmethod
    @override
    def backend(cls) -> str:
        return NAME

    @classmethod
    @override
    def check_backend_availability(cls) -> bool:
        return True

    @override
    def destroy_group(self) -> None:
        self._group.shutdown()

    @override
    def allreduce(self, tensor: Sequence[Any], allreduce_options: Any = None) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = _op_of(allreduce_options)
        self._group.allreduce(_all_shared(tensor), options).wait()

    @override
    def reduce(self, tensor: Sequence[Any], reduce_options: Any = None) -> None:
        options = dist.ReduceOptions()
        options.reduceOp = _op_of(reduce_options)
        options.rootRank = getattr(reduce_options, "root_rank", 0)
        self._group.reduce(_all_shared(tensor), options).wait()

    @override
    def broadcast(self, tensor: Sequence[Any], broadcast_options: Any = None) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = getattr(broadcast_options, "root_rank", 0)
        self._group.broadcast(_all_shared(tensor), options).wait()

    @override
    def allgather(
        self, tensor_list: Sequence[Sequence[Any]], tensor: Sequence[Any], allgather_options: Any = None
    ) -> None:
        self._group.allgather([_all_shared(outputs) for outputs in tensor_list], _all_shared(tensor)).wait()

    @override
    def reducescatter(
        self, tensor: Sequence[Any], tensor_list: Sequence[Sequence[Any]], reducescatter_options: Any = None
    ) -> None:
        options = dist.ReduceScatterOptions()
        options.reduceOp = _op_of(reducescatter_options)
        inputs = [_all_shared(parts) for parts in tensor_list]
        self._group.reduce_scatter(_all_shared(tensor), inputs, options).wait()

    @override
    def barrier(self, barrier_options: Any = None) -> None:
        self._group.barrier().wait()

    @override
    def send(self, tensor: Any, send_options: Any) -> NoReturn:
        _refuse("send")

    @override
    def recv(self, tensor: Any, recv_options: Any) -> NoReturn:
        _refuse("recv")


def _op_of(options: Any) -> Any:
    """Ray gives a class whose attribute all threads share: it is read at once."""
    return _OPS[getattr(options, "reduceOp", ReduceOp.SUM)]


def _all_shared(tensors: Sequence[Any]) -> list[torch.Tensor]:
    return [_shared(tensor) for tensor in tensors]


def _shared(tensor: Any) -> torch.Tensor:
    """A tensor with the memory of ``tensor``."""
    if isinstance(tensor, torch.Tensor):
        return tensor
    if not isinstance(tensor, np.ndarray):
        raise InvalidRequestError(f"a {type(tensor).__name__} cannot travel; give a torch.Tensor or a NumPy array")
    if not tensor.flags.writeable:
        raise InvalidRequestError(
            f"an array of shape {tensor.shape} cannot be written, as all arrays from ray.get(); give a copy() of it"
        )
    return torch.from_numpy(tensor)


def _refuse(function: str) -> NoReturn:
    raise InvalidRequestError(
        f"{function}() is not available in the backend {NAME!r}, whose engine has collectives only; make a group with "
        "the backend 'GLOO' for it"
    )


if not hasattr(Backend, NAME):
    register_collective_backend(NAME, HvdGroup)
