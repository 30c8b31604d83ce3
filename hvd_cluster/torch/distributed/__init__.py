"""The engine as a backend of torch.distributed: ``import hvd_cluster.torch.distributed`` registers "hvd".

Then ``torch.distributed.init_process_group("hvd")`` works as with "gloo", with any launcher and any ``init_method``;
``init_method="hvd://"`` is for processes that ``hvd.init()`` finds, such as those of hvdrun, whatever the backend.
"""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from torch import distributed as dist
from torch.distributed.constants import default_pg_timeout

from executors import own_addresses
from hvd_cluster.core import basics
from hvd_cluster.ops.objects import broadcast_object
from hvd_cluster.torch.distributed.group_engine import GroupEngine
from hvd_cluster.torch.distributed.process_group import NAME, HvdProcessGroup

__all__ = ["HvdProcessGroup", "register"]

LOOPBACK = "127.0.0.1"
_torch: Any = dist  # of which these names have no types


def _create(options: Any, backend_options: Any) -> HvdProcessGroup:
    if backend_options is not None:
        raise ValueError(f"pg_options is {backend_options!r}, but the backend {NAME!r} has none; leave it out")
    rank, size = options.group_rank, options.group_size
    seconds = options.timeout.total_seconds()
    return HvdProcessGroup(GroupEngine(options.store, rank, size, options.group_id, seconds), rank, size)


def _rendezvous(url: str, timeout: timedelta = default_pg_timeout, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """The store of the ranks of ``hvd.init()``, which this calls: rank 0 serves it."""
    basics.init()
    rank, size = basics.rank(), basics.size()
    given = dict(parse_qsl(urlsplit(url).query))
    for name, value in (("rank", rank), ("world_size", size)):
        if int(given.get(name, value)) not in (value, -1):
            raise ValueError(
                f"{name} is {given[name]}, but this is rank {rank} of {size} ranks of hvd.init(); leave {name} out "
                'with init_method="hvd://"'
            )
    address = LOOPBACK if basics.local_size() == size else own_addresses()[0]
    served = [_torch.TCPStore(address, 0, size, True, timeout, wait_for_workers=False)] if rank == 0 else []
    port = served[0].port if served else 0
    address, port = broadcast_object((address, port), name="torch.distributed.store")
    yield served[0] if served else _torch.TCPStore(address, port, size, False, timeout), rank, size
    raise RuntimeError("the ranks of hvd:// meet once; call destroy_process_group() and init_process_group() again")


def register() -> None:
    """Make "hvd" known to torch, as the import of this module does, for hooks that need the name of a function."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
        _torch.register_rendezvous_handler(NAME, _rendezvous)


register()
