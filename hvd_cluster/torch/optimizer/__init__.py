"""Optimizers that train on the gradients of all ranks.

``wrapping`` wraps any torch optimizer. There are two kinds: ``gradient_optimizer`` combines gradients before the
step, in ``buckets`` that a ``reduction`` sends; ``adasum_optimizer`` combines the parameter changes of the ranks'
steps. Options, names and the plan of buckets come from :mod:`hvd_cluster.optimizer`.
"""

from hvd_cluster.torch.optimizer.wrapping import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
