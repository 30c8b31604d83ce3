"""The parts of distributed optimizers that are the same in every framework.

A parameter is any hashable object here; a binding passes its framework's own, and the functions that read it.
``options`` checks the arguments of ``DistributedOptimizer``; ``names`` gives each parameter a name that all ranks
share; ``buckets`` plans which gradients travel together; ``layout`` compares the gradients that the ranks have;
``ordinals`` tells simultaneous optimizers apart.
"""
