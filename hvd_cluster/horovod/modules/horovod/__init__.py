"""hvd-cluster under the name of Horovod; see ``hvd_cluster.horovod``."""

from hvd_cluster import run

# The release of Horovod whose API this is: scripts compare it with what they need.
__version__ = "0.28.1+hvd.cluster"

__all__ = ["__version__", "run"]
