"""Optimizers that train on the gradients of all ranks.

``wrapping`` wraps any torch optimizer. There are two kinds: ``gradient_optimizer`` combines gradients before the
step; ``adasum_optimizer`` combines the parameter changes of the ranks' steps. The course of a step is that of
:mod:`hvd_cluster.gradients`; ``binding`` shows it torch's gradients, and ``packs`` is the memory of small ones.
"""

from hvd_cluster.torch.optimizer.wrapping import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
