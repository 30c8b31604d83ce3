"""Keras optimizers that train on the gradients of all ranks.

``wrapping`` wraps an optimizer of Keras 3: the result is ``distributed``, a subclass of its class that combines
gradients in ``apply``. ``passes`` adds up gradients over several backward passes. ``adjustments`` has the three places
where Keras itself must know of such an optimizer.
"""

from hvd_cluster.keras.optimizer.wrapping import DistributedOptimizer, PartialDistributedOptimizer

__all__ = ["DistributedOptimizer", "PartialDistributedOptimizer"]
