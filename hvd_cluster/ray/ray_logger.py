"""``log``: from a worker to the callbacks of the driver's ``run``."""

from executors.agents.ray.log import log

__all__ = ["log"]
