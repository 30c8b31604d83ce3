"""Optimizers that work on what all ranks computed.

``wrapping`` makes them; ``arguments`` says what it must be given. There are two kinds: ``gradient_optimizer`` combines
gradients before the step, in ``buckets`` that travel as a ``reduction``; ``adasum_optimizer`` combines what the steps
of the ranks changed.
"""

from hvd_cluster.torch.optimizer.wrapping import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
