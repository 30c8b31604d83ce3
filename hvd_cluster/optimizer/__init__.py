"""The parts of distributed optimizers that are the same in every framework.

A parameter is any hashable object here, and a gradient any tensor; ``binding`` has the operations on them that a
framework provides. ``combiner`` counts the gradients of an optimizer and sends them in buckets; ``reduction`` is one
bucket on its way. ``options`` checks the arguments of ``DistributedOptimizer``; ``names`` gives each parameter a name
that all ranks share; ``buckets`` plans which gradients travel together; ``layout`` compares the gradients that the
ranks have; ``rivals`` tells optimizers with the same parameter names apart.
"""
