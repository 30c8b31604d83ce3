"""The arguments of a launcher for an elastic job -> its limits. Pure, but for HOROVOD_ELASTIC_TIMEOUT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from executors.arguments import check_integer, resolve_seconds
from executors.membership import Cooldown, Limits
from executors.membership.limits import UNLIMITED

__all__ = ["ELASTIC_TIMEOUT_SECONDS", "ElasticArguments", "ResetLimit", "resolve_limits"]

ELASTIC_TIMEOUT_SECONDS = 600.0

ResetLimit = int | Mapping[str, int] | None
"""The most failures and resizes together; or each of them alone, as {"failures": 3, "resizes": 10}."""
COUNTED = ("failures", "resizes")


@dataclass(frozen=True, slots=True)
class ElasticArguments:
    """What a user may say about an elastic job; None: the default of it.

    ``least`` workers are the fewest that go on, ``most`` the most that run: by default as many as start, or as many as
    the hosts have slots if these are discovered (``has_discovery``). ``reset_limit`` bounds failures and resizes,
    together or each. ``timeout`` is how long the job waits for too few workers, in seconds, and ``cooldown`` the
    shortest and the longest time for which a host with failures gets no new worker.
    """

    least: int | None = None
    most: int | None = None
    reset_limit: ResetLimit = None
    timeout: float | None = None
    cooldown: Sequence[float] | None = None
    has_discovery: bool = False

    @property
    def is_elastic(self) -> bool:
        """Whether the job may change its workers."""
        return self.has_discovery or self.least is not None or self.most is not None


def resolve_limits(size: int | None, arguments: ElasticArguments) -> Limits:
    """The limits of a job that starts with ``size`` workers, None: the fewest. Raises ValueError.

    A job that is not elastic has limits of a static one, and no other argument of elastic jobs.
    """
    if not arguments.is_elastic:
        _check_static(size, arguments)
        return Limits.static(check_integer(size, "num_proc", 1))
    least = check_integer(arguments.least if arguments.least is not None else size, "min_num_proc", 1)
    size = least if size is None else check_integer(size, "num_proc", 1)
    most = _most(size, arguments)
    if not least <= size <= most:
        given = f", num_proc is {size} and max_num_proc is {most}" if most < UNLIMITED else f" and num_proc is {size}"
        raise ValueError(
            f"min_num_proc is {least}{given}, but they must not descend: give min_num_proc <= num_proc <= max_num_proc"
        )
    return Limits(
        size,
        least,
        most,
        **_resets(arguments.reset_limit),
        timeout=resolve_seconds(
            arguments.timeout, "elastic_timeout", "HOROVOD_ELASTIC_TIMEOUT", ELASTIC_TIMEOUT_SECONDS
        ),
        cooldown=_cooldown(arguments.cooldown),
        may_find_hosts=arguments.has_discovery,
    )


def _most(size: int, arguments: ElasticArguments) -> int:
    if arguments.most is not None:
        return check_integer(arguments.most, "max_num_proc", 1)
    return UNLIMITED if arguments.has_discovery else size


def _resets(limit: ResetLimit) -> dict[str, Any]:
    if limit is None:
        return {}
    if not isinstance(limit, Mapping):
        return {"resets": check_integer(limit, "reset_limit", 0)}
    if not limit or set(limit) - set(COUNTED):
        raise ValueError(
            f"reset_limit is {dict(limit)!r}, but must be an integer of at least 0 for failures and resizes together, "
            'or limits of each, such as {"failures": 3, "resizes": 10}'
        )
    return {name: check_integer(count, f'reset_limit["{name}"]', 0) for name, count in limit.items()}


def _cooldown(seconds: Sequence[float] | None) -> Cooldown | None:
    if seconds is None:
        return None
    numbers = tuple(seconds) if isinstance(seconds, Sequence) and not isinstance(seconds, str) else ()
    if len(numbers) != 2 or not all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers):
        raise ValueError(f"cooldown_range is {seconds!r}, but must be two numbers of seconds, such as (1, 60)")
    return Cooldown(*map(float, numbers))


def _check_static(size: int | None, arguments: ElasticArguments) -> None:
    if size is None:
        raise ValueError("num_proc is None, but must be an integer of at least 1")
    given = [
        name
        for name, value in (
            ("reset_limit", arguments.reset_limit),
            ("elastic_timeout", arguments.timeout),
            ("cooldown_range", arguments.cooldown),
        )
        if value is not None
    ]
    if given:
        raise ValueError(
            f"{', '.join(given)}: this is for elastic jobs; give min_num_proc, max_num_proc or a host discovery script "
            "as well"
        )
