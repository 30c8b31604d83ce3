"""Metrics of a process: the counts of its engines, from world to world, and where they are shown."""
