"""Collectives in functions that XLA compiles for a CPU, such as ``tf.function(jit_compile=True)``.

``nodes`` puts calls of one function of Python into a graph, which ``native/xla_registry.py`` lets XLA know, in the
language that ``native/xla_module.py`` writes. ``handlers`` is what they do when XLA runs them. ``scope`` tells whether
a graph is for XLA. The rest is loaded for the first such graph.
"""
