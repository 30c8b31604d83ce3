"""hvd-cluster under the name of Horovod; see ``hvd_cluster.horovod``."""

from hvd_cluster import run
from hvd_cluster.horovod.finder import HOROVOD_VERSION as __version__

__all__ = ["__version__", "run"]
