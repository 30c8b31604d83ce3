"""Functions on several processes, in the place where Horovod has them."""

from hvd_cluster.run import run

__all__ = ["run"]
