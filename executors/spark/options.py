"""How to run a job on Spark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from executors.dashboard.address import Address
from executors.local.crew import GRACE_SECONDS
from executors.spark.feeding import Feeder

__all__ = ["SparkOptions"]


@dataclass(frozen=True, slots=True)
class SparkOptions:
    """How to run a job: see :class:`.plan.Plan`. With ``verbose`` the driver prints the host of each rank.

    ``dashboard`` is where the live page is served; None: there is none.
    """

    start_timeout: float
    environment: Mapping[str, str] = field(default_factory=dict)
    nics: tuple[str, ...] = ()
    executable: str | None = None
    search_path: Callable[[str], str] | None = None
    feeder: Feeder | None = None
    grace: float = GRACE_SECONDS
    verbose: bool = False
    dashboard: Address | None = None
