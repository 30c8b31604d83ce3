"""All collectives, in Horovod's module of this name."""

from collectives.api import HorovodInternalError
from hvd_cluster.basics import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from hvd_cluster.operations.reductions import Adasum, Average, Max, Min, Product, Sum
from hvd_cluster.process_sets import ProcessSet, global_process_set
from hvd_cluster.tensorflow.kernels import table as _table
from hvd_cluster.tensorflow.operations.allgather import allgather, grouped_allgather
from hvd_cluster.tensorflow.operations.allreduce import (
    _allreduce as _allreduce,
)
from hvd_cluster.tensorflow.operations.allreduce import (
    _grouped_allreduce as _grouped_allreduce,
)
from hvd_cluster.tensorflow.operations.allreduce import (
    allreduce,
    grouped_allreduce,
)
from hvd_cluster.tensorflow.operations.broadcast import broadcast
from hvd_cluster.tensorflow.operations.numbers import (
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "allgather",
    "allreduce",
    "broadcast",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "grouped_allgather",
    "grouped_allreduce",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "process_set_included_op",
    "rank",
    "rank_op",
    "shutdown",
    "size",
    "size_op",
]

_table.make_all_known()
