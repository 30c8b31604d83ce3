"""Pure: whether the workers fit, and the error if they do not.

Spark itself would look for the slots of a barrier stage again and again, for ten minutes, before it fails.
"""

from __future__ import annotations

from collections.abc import Callable

from executors.api import PlacementError

__all__ = ["check_settings", "promised", "shortage"]

Setting = Callable[[str], str | None]


def check_settings(setting: Setting) -> None:
    """Raise PlacementError if Spark does not run barrier stages at all."""
    if _is_local(setting("spark.master") or ""):
        return  # Spark ignores dynamic allocation there
    if (setting("spark.dynamicAllocation.enabled") or "false").lower() == "true":
        raise PlacementError(
            "Spark cannot start all workers at once with dynamic allocation of executors "
            "(spark.dynamicAllocation.enabled=true); set it to false and give the number of executors"
        )


def _is_local(master: str) -> bool:
    """Whether the driver is the only executor. "local-cluster[...]" has others."""
    return master == "local" or master.startswith("local[")


def promised(setting: Setting) -> int | None:
    """The number of slots when all requested executors have started; None if unknown."""
    per_task, per_executor = int(setting("spark.task.cpus") or 1), int(setting("spark.executor.cores") or 1)
    instances, most = setting("spark.executor.instances"), setting("spark.cores.max")
    if (setting("spark.master") or "").startswith("local"):
        return None
    if instances is not None:
        return int(instances) * (per_executor // per_task)
    return None if most is None else int(most) // per_task


def shortage(size: int, slots: int, setting: Setting) -> PlacementError:
    """The error for ``size`` workers if Spark runs only ``slots`` tasks at a time."""
    per_task = {
        name: value
        for name in ("spark.task.cpus", "spark.task.resource.gpu.amount", "spark.executor.instances")
        if (value := setting(name)) is not None
    }
    needs = f" ({', '.join(f'{name}={value}' for name, value in per_task.items())})" if per_task else ""
    return PlacementError(
        f"{size} workers need {size} task slots at the same time, but the executors of this Spark application have "
        f"{slots}{needs}; set num_proc to at most {slots}, or give the application more: spark.executor.instances, "
        "spark.executor.cores, spark.cores.max"
    )
