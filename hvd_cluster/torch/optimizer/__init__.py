"""Optimizers that train on the gradients of all ranks.

``wrapping`` makes one of any torch optimizer. There are two kinds: ``gradient_optimizer`` combines gradients before the
step, in ``buckets`` that travel as a ``reduction``; ``adasum_optimizer`` combines the changes that the ranks' steps
made. Options, names and the plan of buckets are those of :mod:`hvd_cluster.optimizer`.
"""

from hvd_cluster.torch.optimizer.wrapping import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
