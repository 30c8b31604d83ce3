"""All collectives, in Horovod's module of this name: ``from horovod.torch.mpi_ops import allreduce_async_``."""

from collectives import HorovodInternalError
from hvd_cluster import common_api as _common_api
from hvd_cluster.common_api import *  # noqa: F403
from hvd_cluster.ops.arguments import Max, Min, Product
from hvd_cluster.ops.submission import Handle as Handle
from hvd_cluster.ops.submission import HandleGroup as HandleGroup
from hvd_cluster.torch.compression import Compression as Compression
from hvd_cluster.torch.operations.allgather import HorovodAllgather as HorovodAllgather
from hvd_cluster.torch.operations.allgather import HorovodGroupedAllgather as HorovodGroupedAllgather
from hvd_cluster.torch.operations.allgather import (
    allgather,
    allgather_async,
    grouped_allgather,
    grouped_allgather_async,
    sparse_allreduce_async,
)
from hvd_cluster.torch.operations.allreduce import HorovodAllreduce as HorovodAllreduce
from hvd_cluster.torch.operations.allreduce import HorovodGroupedAllreduce as HorovodGroupedAllreduce
from hvd_cluster.torch.operations.allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from hvd_cluster.torch.operations.alltoall import HorovodAlltoall as HorovodAlltoall
from hvd_cluster.torch.operations.alltoall import alltoall, alltoall_async
from hvd_cluster.torch.operations.broadcast import HorovodBroadcast as HorovodBroadcast
from hvd_cluster.torch.operations.broadcast import (
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
)
from hvd_cluster.torch.operations.operands import barrier, join, poll, synchronize
from hvd_cluster.torch.operations.reducescatter import HorovodGroupedReducescatter as HorovodGroupedReducescatter
from hvd_cluster.torch.operations.reducescatter import HorovodReducescatter as HorovodReducescatter
from hvd_cluster.torch.operations.reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)

__all__ = [
    "HorovodInternalError",
    "Max",
    "Min",
    "Product",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]
__all__ += _common_api.__all__
