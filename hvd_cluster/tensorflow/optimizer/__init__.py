"""Tapes and optimizers that train on the gradients of all ranks.

The course is that of :mod:`hvd_cluster.gradients.lists`; ``binding`` has TensorFlow's operations. ``tape`` wraps
``tf.GradientTape``, ``legacy`` the optimizers of ``tf.compat.v1``, and ``wrapping`` has ``DistributedOptimizer``.
``aggregation`` adds up gradients over several backward passes.
"""
