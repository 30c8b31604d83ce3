"""Tapes and optimizers that train on the gradients of all ranks.

The course is that of :mod:`hvd_cluster.gradients.lists`; ``binding`` has TensorFlow's operations. ``tape`` wraps
``tf.GradientTape``, and ``wrapping`` has ``DistributedOptimizer``, also for
the optimizers of ``tf.compat.v1``.
``aggregation`` adds up gradients over several backward passes.
"""
