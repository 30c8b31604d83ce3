"""Collectives of a graph that a framework runs on threads of its own, at many places at the same time.

A ``run`` is a node, once. The ``completer`` ends runs, a ``settlement`` those of a run of the graph in which the ranks
disagree. ``lanes`` tells the iterations of a loop apart. No framework is imported here.
"""
