"""Pure: the user's request -> placement group bundles."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex, cast

from executors.agents.ray.placement.capacity import check_labels

# Ray counts resources in ten-thousandths.
SMALLEST = 1e-4
OTHERWISE = {"CPU": "cpus_per_worker", "GPU": "use_gpu and gpus_per_worker"}


def check_amount(name: str, value: object) -> float:
    """A positive amount of a resource, which may be a fraction. Raises ValueError."""
    try:
        amount = math.nan if isinstance(value, bool | str) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        amount = math.nan
    if not SMALLEST <= amount < math.inf:
        raise ValueError(f"{name} is {value!r}, but must be a positive number, of which Ray counts four decimals")
    return int(amount) if amount.is_integer() else amount


def check_resources(resources: object) -> None:
    """Raise ValueError unless ``resources`` are amounts of Ray's resources by name, or None."""
    given = {} if resources is None else resources
    if not isinstance(given, Mapping) or not all(isinstance(name, str) and name for name in given):
        raise ValueError(
            f"resources_per_worker is {resources!r}, but must be a dict of resources of your Ray nodes and their "
            'amounts, such as {"TPU": 1, "memory": 4e9}'
        )
    for name, amount in given.items():
        if name in OTHERWISE:
            raise ValueError(f"resources_per_worker has {name!r}; give {OTHERWISE[name]} instead")
        if name == "object_store_memory":
            raise ValueError("resources_per_worker has 'object_store_memory', which Ray does not reserve for actors")
        check_amount(f"resources_per_worker[{name!r}]", amount)


def actor_options(need: Mapping[str, float]) -> dict[str, Any]:
    """The options of Ray for an actor with ``need``."""
    names = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    options: dict[str, Any] = {names[name]: amount for name, amount in need.items() if name in names}
    return {**options, "resources": {name: amount for name, amount in need.items() if name not in names}}


STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass(frozen=True, slots=True)
class RayRequest:
    """The number of workers, their placement, and what each gets.

    Either ``num_workers``, packed on as few hosts as possible unless ``placement_strategy`` is another one of Ray's, or
    ``num_hosts`` different hosts with ``num_workers_per_host`` workers each. ``label_selector`` names the labels of
    their hosts, ``bundle_label_selector`` those of each bundle: of a worker, or of all workers of a host. Raises
    ValueError if that makes no sense.
    """

    num_workers: int | None = None
    num_hosts: int | None = None
    num_workers_per_host: int | None = 1
    cpus_per_worker: float = 1
    use_gpu: bool = False
    gpus_per_worker: int | None = None
    resources_per_worker: Mapping[str, float] | None = None
    placement_strategy: str | None = None
    label_selector: Mapping[str, str] | None = None
    bundle_label_selector: Sequence[Mapping[str, str]] | None = None
    runtime_env: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("num_workers", "num_hosts", "num_workers_per_host", "gpus_per_worker"):
            object.__setattr__(self, name, _count(name, getattr(self, name)))
        object.__setattr__(self, "cpus_per_worker", check_amount("cpus_per_worker", self.cpus_per_worker))
        check_resources(self.resources_per_worker)
        self._check_shape()
        self._check_gpus()
        self._check_strategy()
        self._check_labels()

    @property
    def size(self) -> int:
        """The number of workers."""
        return self.num_workers or (self.num_hosts or 0) * self._per_bundle

    @property
    def worker(self) -> dict[str, float]:
        """The resources of one worker."""
        gpus = {"GPU": float(self.gpus_per_worker or 1)} if self.use_gpu else {}
        return {"CPU": float(self.cpus_per_worker), **gpus, **(self.resources_per_worker or {})}

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of one bundle: of one worker, or of all workers of one host."""
        return {name: amount * self._per_bundle for name, amount in self.worker.items()}

    @property
    def bundles(self) -> list[dict[str, float]]:
        """The placement group's bundles."""
        return [self.bundle] * (self.size // self._per_bundle)

    @property
    def selectors(self) -> list[dict[str, str]]:
        """The labels of each bundle's host; empty where any host will do."""
        if self.bundle_label_selector is not None:
            return [dict(selector) for selector in self.bundle_label_selector]
        return [dict(self.label_selector)] * len(self.bundles) if self.label_selector else []

    @property
    def total(self) -> dict[str, float]:
        """The resources of all workers."""
        return {name: amount * self.size for name, amount in self.worker.items()}

    @property
    def strategy(self) -> str:
        """Ray's placement strategy."""
        return self.placement_strategy or ("PACK" if self.num_hosts is None else "STRICT_SPREAD")

    @property
    def of_a_new_group(self) -> list[str]:
        """The arguments that only a placement group of our own can obey."""
        names = ("placement_strategy", "label_selector", "bundle_label_selector")
        return [name for name in names if getattr(self, name) is not None]

    def bundle_of(self, worker: int) -> int:
        """The index of the bundle that ``worker`` belongs in."""
        return worker // self._per_bundle

    @property
    def _per_bundle(self) -> int:
        return 1 if self.num_hosts is None else self.num_workers_per_host or 1

    def _check_shape(self) -> None:
        if (self.num_workers is None) == (self.num_hosts is None):
            raise ValueError(
                f"num_workers is {self.num_workers} and num_hosts is {self.num_hosts}; give one of them: num_workers "
                "for workers anywhere, num_hosts with num_workers_per_host for the same number on every host"
            )
        if self.num_hosts is not None and self.num_workers_per_host is None:
            raise ValueError("num_workers_per_host is None, but must be a positive integer when num_hosts is given")
        if self.num_workers is not None and self.num_workers_per_host not in (None, 1):
            raise ValueError(
                f"num_workers_per_host is {self.num_workers_per_host}, which has no meaning with num_workers; "
                "give num_hosts instead of num_workers to place the same number on every host"
            )

    def _check_gpus(self) -> None:
        if not isinstance(self.use_gpu, bool):
            raise ValueError(f"use_gpu is {self.use_gpu!r}, but must be True or False")
        if self.gpus_per_worker is not None and not self.use_gpu:
            raise ValueError(f"gpus_per_worker is {self.gpus_per_worker}, but use_gpu is False; set use_gpu=True")

    def _check_strategy(self) -> None:
        if self.placement_strategy is None:
            return
        if self.placement_strategy not in STRATEGIES:
            raise ValueError(
                f"placement_strategy is {self.placement_strategy!r}, but must be one of {', '.join(STRATEGIES)}"
            )
        if self.num_hosts is not None and self.placement_strategy != "STRICT_SPREAD":
            raise ValueError(
                f"placement_strategy is {self.placement_strategy!r}, but num_hosts are different hosts, which is "
                "STRICT_SPREAD; give num_workers instead of num_hosts for another strategy"
            )

    def _check_labels(self) -> None:
        check_labels(self.label_selector, "label_selector")
        if self.bundle_label_selector is None:
            return
        if self.label_selector is not None:
            raise ValueError(
                "label_selector and bundle_label_selector are both given; give label_selector, the labels for all "
                "workers, or bundle_label_selector, those for each bundle"
            )
        given, bundles = self.bundle_label_selector, len(self.bundles)
        if isinstance(given, str | Mapping) or not isinstance(given, Sequence) or len(given) != bundles:
            unit = "worker" if self.num_hosts is None else "host"
            raise ValueError(
                f"bundle_label_selector is {given!r}, but must be a list of {bundles} dicts, one for each {unit}; "
                "label_selector takes one dict for all"
            )
        for index, selector in enumerate(given):
            check_labels(selector, f"bundle_label_selector[{index}]")


def _count(name: str, value: object) -> int | None:
    """A count of any type that is an integer to Python, such as NumPy's."""
    if value is None:
        return None
    try:
        count = 0 if isinstance(value, bool) else operator.index(cast("SupportsIndex", value))
    except TypeError:
        count = 0
    if count < 1:
        raise ValueError(f"{name} is {value!r}, but must be a positive integer or left out")
    return count
