"""Optimizers that train on the gradients of all ranks.

``wrapping`` wraps any torch optimizer. There are two kinds: ``gradient_optimizer`` combines gradients before the step;
``adasum`` combines the changes that the ranks' steps made to the parameters.

``hooks`` counts the gradients that backward has finished, and sends the *buckets* that ``buckets`` plans when they are
complete. ``reduction`` is one bucket on its way, and the agreement of ranks that differ about it; ``transfers`` are the
tensors that travel for its gradients. ``in_flight`` has all buckets of a step, to wait for them or to give them up.
"""

from hvd_cluster.torch.optimizer.wrapping import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
