"""The parts of distributed optimizers that several frameworks share, and their pure decisions.

``options`` checks the arguments of ``DistributedOptimizer``; ``compression`` has the compressors; ``buckets`` plans
which gradients travel together. ``lists`` combines the gradients of a tape, or of a step of a Keras optimizer, whose
variables are ``targets``. Where hooks report one gradient after the other, as in :mod:`hvd_cluster.torch.optimizer`,
``layout`` compares the gradients that the ranks have, and ``duplicate_names`` tells optimizers with the same parameter
names apart.
"""
