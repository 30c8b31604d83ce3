"""The engine as a backend of torch.distributed: ``import hvd_cluster.torch.distributed`` registers "hvd".

Then ``torch.distributed.init_process_group("hvd")`` works as with "gloo", with any launcher and any ``init_method``.
"""

from typing import Any

from torch import distributed as dist

from hvd_cluster.torch.distributed.group_engine import GroupEngine
from hvd_cluster.torch.distributed.process_group import NAME, HvdProcessGroup

__all__ = ["HvdProcessGroup"]


def _create(options: Any, backend_options: Any) -> HvdProcessGroup:
    if backend_options is not None:
        raise ValueError(f"pg_options is {backend_options!r}, but the backend {NAME!r} has none; leave it out")
    rank, size = options.group_rank, options.group_size
    seconds = options.timeout.total_seconds()
    return HvdProcessGroup(GroupEngine(options.store, rank, size, options.group_id, seconds), rank, size)


dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
