"""Horovod's API on TensorFlow: ``import hvd_cluster.tensorflow as hvd``."""

try:
    import tensorflow as _tf
except ModuleNotFoundError as error:
    if error.name != "tensorflow":
        raise
    raise ImportError('hvd_cluster.tensorflow needs TensorFlow: pip install "hvd-cluster[tensorflow]"') from error

from hvd_cluster.basics import add_process_set, remove_process_set
from hvd_cluster.launchers import register_thread_count as _register_thread_count
from hvd_cluster.tensorflow.compression import Compression
from hvd_cluster.tensorflow.mpi_ops import (
    Adasum,
    Average,
    HorovodInternalError,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    allgather,
    allreduce,
    broadcast,
    cross_rank,
    cross_size,
    global_process_set,
    grouped_allgather,
    grouped_allreduce,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_rank_op,
    local_size,
    local_size_op,
    process_set_included_op,
    rank,
    rank_op,
    shutdown,
    size,
    size_op,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
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
    "remove_process_set",
    "shutdown",
    "size",
    "size_op",
]

_register_thread_count("tensorflow", _tf.config.threading.get_intra_op_parallelism_threads)
