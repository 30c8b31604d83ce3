"""All collectives, in Horovod's module of this name."""

from collectives import HorovodInternalError
from hvd_cluster import common_api as _common_api
from hvd_cluster.common_api import *  # noqa: F403
from hvd_cluster.ops.arguments import Max, Min, Product
from hvd_cluster.tensorflow.errors import TEXT as _TEXT
from hvd_cluster.tensorflow.kernels import table as _table
from hvd_cluster.tensorflow.native import error_texts as _error_texts
from hvd_cluster.tensorflow.operations import calls as _vectorization
from hvd_cluster.tensorflow.operations.allgather import allgather, grouped_allgather
from hvd_cluster.tensorflow.operations.allreduce import _allreduce as _allreduce
from hvd_cluster.tensorflow.operations.allreduce import _grouped_allreduce as _grouped_allreduce
from hvd_cluster.tensorflow.operations.allreduce import allreduce, grouped_allreduce
from hvd_cluster.tensorflow.operations.alltoall import alltoall
from hvd_cluster.tensorflow.operations.broadcast import broadcast, broadcast_
from hvd_cluster.tensorflow.operations.members import (
    barrier,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from hvd_cluster.tensorflow.operations.reducescatter import _grouped_reducescatter as _grouped_reducescatter
from hvd_cluster.tensorflow.operations.reducescatter import _reducescatter as _reducescatter
from hvd_cluster.tensorflow.operations.reducescatter import grouped_reducescatter, reducescatter

__all__ = [
    "HorovodInternalError",
    "Max",
    "Min",
    "Product",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]
__all__ += _common_api.__all__

_table.make_all_known()
_vectorization.refuse_all()
_error_texts.adjust(_TEXT)
