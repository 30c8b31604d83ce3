"""``log``: from a worker to the callbacks of the driver's ``run``."""

from executors.agents.ray import log

__all__ = ["log"]
