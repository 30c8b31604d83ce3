"""Process sets, in the place where Horovod has them."""

from hvd_cluster.core.basics import add_process_set, remove_process_set
from hvd_cluster.core.process_sets import ProcessSet, global_process_set

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]
