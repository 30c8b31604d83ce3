"""Pure: the resources of a worker, as Ray counts them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["actor_options", "check_amount", "check_resources"]

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
