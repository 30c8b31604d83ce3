"""All collectives, in Horovod's module of this name."""

from collectives.api import HorovodInternalError
from hvd_cluster.core.basics import (
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
from hvd_cluster.core.features import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from hvd_cluster.core.observation import start_timeline, stop_timeline
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.ops.arguments import Adasum, Average, Max, Min, Product, Sum
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
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]

_table.make_all_known()
_vectorization.refuse_all()
_error_texts.adjust(_TEXT)
