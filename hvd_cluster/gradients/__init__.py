"""The parts of distributed optimizers that are the same in every framework.

A parameter is any hashable object here, and a gradient any tensor; ``binding`` has the operations on them that a
framework provides. ``combiner`` sends the gradients of an optimizer in buckets when they are complete: ``inventory``
has the parameters, ``progress`` counts backward passes, ``reduction`` is one ``bucket`` in flight, with ``transfers``
of ``gradients`` by compressors, and ``agreement`` where ranks differ. ``differences`` combines the changes of a
step instead, with Adasum. ``options`` checks the arguments of ``DistributedOptimizer``; ``names`` gives each parameter
a name that all ranks share; ``buckets`` plans which gradients travel together; ``layout`` compares the gradients that
the ranks have; ``rivals`` tells optimizers with the same parameter names apart.
"""
