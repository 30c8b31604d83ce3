"""The arguments of a launcher for an elastic job -> its limits. Pure, but for HOROVOD_ELASTIC_TIMEOUT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from executors.job.arguments import check_integer, resolve_seconds
from executors.membership import Cooldown, Limits
from executors.membership.limits import UNLIMITED

ELASTIC_TIMEOUT_SECONDS = 600.0
WRITTEN = {
    name: name
    for name in ("num_proc", "min_num_proc", "max_num_proc", "reset_limit", "elastic_timeout", "cooldown_range")
}
"""The arguments by the names that they have in Python."""

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


def resolve_limits(size: int | None, arguments: ElasticArguments, written: Mapping[str, str] = WRITTEN) -> Limits:
    """The limits of a job that starts with ``size`` workers, None: the fewest. Raises ValueError.

    A job that is not elastic has limits of a static one, and no other argument of elastic jobs. ``written`` is how the
    user writes each argument.
    """
    if not arguments.is_elastic:
        _check_static(size, arguments, written)
        return Limits.static(check_integer(size, written["num_proc"], 1))
    least, number, most = _numbers(size, arguments, written)
    return Limits(
        number,
        least,
        most,
        **_resets(arguments.reset_limit, written["reset_limit"]),
        timeout=resolve_seconds(
            arguments.timeout, written["elastic_timeout"], "HOROVOD_ELASTIC_TIMEOUT", ELASTIC_TIMEOUT_SECONDS
        ),
        cooldown=_cooldown(arguments.cooldown, written["cooldown_range"]),
        may_find_hosts=arguments.has_discovery,
    )


def _numbers(size: int | None, arguments: ElasticArguments, written: Mapping[str, str]) -> tuple[int, int, int]:
    """The fewest workers, those that start, and the most; those that are not given follow from the others."""
    values = {"min_num_proc": arguments.least, "num_proc": size, "max_num_proc": arguments.most}
    if arguments.least is None and size is None:
        raise ValueError(f"{written['num_proc']} is missing; give it, or {written['min_num_proc']}")
    given = {name: check_integer(value, written[name], 1) for name, value in values.items() if value is not None}
    if list(given.values()) != sorted(given.values()):
        *first, last = (f"{written[name]} is {number}" for name, number in given.items())
        order = " <= ".join(written[name] for name in values)
        raise ValueError(f"{', '.join(first)} and {last}, but they must not descend: give {order}")
    number = given.get("num_proc", given.get("min_num_proc", 1))
    most = UNLIMITED if arguments.has_discovery else number
    return given.get("min_num_proc", number), number, given.get("max_num_proc", most)


def _resets(limit: ResetLimit, name: str) -> dict[str, Any]:
    if limit is None:
        return {}
    if not isinstance(limit, Mapping):
        return {"resets": check_integer(limit, name, 0)}
    if not limit or set(limit) - set(COUNTED):
        raise ValueError(
            f"{name} is {dict(limit)!r}, but must be an integer of at least 0 for failures and resizes together, "
            'or limits of each, such as {"failures": 3, "resizes": 10}'
        )
    return {each: check_integer(count, f'{name}["{each}"]', 0) for each, count in limit.items()}


def _cooldown(seconds: Sequence[float] | None, name: str) -> Cooldown | None:
    if seconds is None:
        return None
    numbers = tuple(seconds) if isinstance(seconds, Sequence) and not isinstance(seconds, str) else ()
    if len(numbers) != 2 or not all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers):
        raise ValueError(f"{name} is {seconds!r}, but must be two numbers of seconds, such as (1, 60)")
    return Cooldown(*map(float, numbers))


def _check_static(size: int | None, arguments: ElasticArguments, written: Mapping[str, str]) -> None:
    if size is None:
        raise ValueError(f"{written['num_proc']} is None, but must be an integer of at least 1")
    values = {
        "reset_limit": arguments.reset_limit,
        "elastic_timeout": arguments.timeout,
        "cooldown_range": arguments.cooldown,
    }
    given = [written[name] for name, value in values.items() if value is not None]
    if given:
        raise ValueError(
            f"{', '.join(given)}: this is for elastic jobs; give {written['min_num_proc']}, {written['max_num_proc']} "
            "or a host discovery script as well"
        )
