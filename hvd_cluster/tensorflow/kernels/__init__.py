"""The kernels of our ops. ``table`` has all ops, and registers them with TensorFlow.

A kernel that an eager call runs is on the thread of that call: it runs the operation there and then. One of a graph is
on a thread that TensorFlow needs for other nodes: it submits its tensors, and the ``Completer`` ends it.
"""
