"""The arguments of an elastic job on Ray -> its limits. Pure, but for HOROVOD_ELASTIC_TIMEOUT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from executors.arguments import check_integer
from executors.discovery import HostDiscovery
from executors.elastic import ElasticArguments, ResetLimit, resolve_limits
from executors.membership import Limits
from executors.ray.settings import MiniSettings

__all__ = ["ElasticRequest"]


@dataclass(frozen=True, slots=True)
class ElasticRequest:
    """What a user may say about the workers of an elastic job; None: the default of it.

    ``num_workers`` start, by default the fewest; ``min_workers`` are the fewest that go on, by default as many as
    start; ``max_workers`` the most, by default as many as the cluster has room for.
    """

    num_workers: int | None = None
    min_workers: int | None = None
    max_workers: int | None = None
    reset_limit: ResetLimit = None
    cooldown_range: Sequence[float] | None = None
    elastic_timeout: float | None = None
    override_discovery: bool = True

    @property
    def is_elastic(self) -> bool:
        """Whether the user asked for workers that may change."""
        return self.min_workers is not None or self.max_workers is not None

    def limits(self) -> Limits:
        """The limits of the job. Raises ValueError for values that make no sense."""
        counts = {
            name: check_integer(value, name, 1)
            for name in ("min_workers", "num_workers", "max_workers")
            if (value := getattr(self, name)) is not None
        }
        if set(counts) == {"max_workers"}:
            raise ValueError(
                f"max_workers is {self.max_workers}, but the fewest workers are unknown: give min_workers as well, the "
                "number with which the training starts and goes on"
            )
        if list(counts.values()) != sorted(counts.values()):
            given = ", ".join(f"{name} is {count}" for name, count in counts.items())
            raise ValueError(f"{given}: give min_workers <= num_workers <= max_workers")
        arguments = ElasticArguments(
            self.min_workers, self.max_workers, self.reset_limit, self.elastic_timeout, self.cooldown_range, True
        )
        return resolve_limits(self.num_workers, arguments)

    def check_shape(self, arguments: Mapping[str, object]) -> None:
        """Raise ValueError for arguments of RayExecutor that place a fixed number of workers."""
        defaults = {"num_hosts": None, "placement_strategy": None, "bundle_label_selector": None}
        given = [f"{name} is {arguments[name]!r}" for name, default in defaults.items() if arguments[name] != default]
        if arguments["num_workers_per_host"] not in (None, 1):
            given.append(f"num_workers_per_host is {arguments['num_workers_per_host']!r}")
        if given:
            raise ValueError(
                f"{' and '.join(given)}, but the workers of an elastic job go where there is room: leave "
                f"{'it' if len(given) == 1 else 'them'} out; label_selector names the labels of their nodes"
            )

    def discovery(self, settings: MiniSettings) -> HostDiscovery | None:
        """What finds the nodes; None for the whole cluster. Raises ValueError where the user named none."""
        if self.override_discovery:
            return None
        if not hasattr(settings.discovery, "find_available_hosts_and_slots"):
            raise ValueError(
                f"override_discovery is False, but the discovery of the settings is {settings.discovery!r}: give "
                "create_settings(discovery=...) an object with a method find_available_hosts_and_slots()"
            )
        return settings.discovery

    def check_static(self) -> None:
        """Raise ValueError for an argument of elastic jobs in one that is not."""
        names = ("reset_limit", "cooldown_range", "elastic_timeout")
        given = [name for name in names if getattr(self, name) is not None]
        if given:
            raise ValueError(f"{', '.join(given)}: this is for elastic jobs; give min_workers as well")
