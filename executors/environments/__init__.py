"""Pure: the launchers that are not ours, and what their variables say about this process.

A class a launcher: it reads the environment and returns a :class:`.Place`, with the way on which the ranks
find one another. ``table.py`` has the order of the search.
"""
