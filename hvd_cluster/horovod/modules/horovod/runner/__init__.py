"""Functions on several processes, in the place where Horovod has them."""

from hvd_cluster import run

__all__ = ["run"]
