"""How many threads each rank of a host computes with, so that the ranks do not take the cores from each other.

Without a limit, the numerical libraries start one thread per core in every rank. On two ranks each core then has two
threads, which slows a training step down several times. Ray and Spark limit their workers by the same variable.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

__all__ = ["THREADS", "share", "shared_threads", "thread_remark", "thread_variables", "threads_of"]

logger = logging.getLogger(__name__)

THREADS = "OMP_NUM_THREADS"
VARIABLES = ("MKL_NUM_THREADS", THREADS)
"""Each limits the threads of torch; the first wins."""

CHOICES = (*VARIABLES, "OPENBLAS_NUM_THREADS")
"""With one of these the user has chosen the threads. The last one limits NumPy, but not torch."""


def share(cores: int, ranks: int) -> int:
    """The threads of each of ``ranks`` ranks on a host where they may use ``cores`` cores; at least 1."""
    return max(1, cores // ranks)


def threads_of(environment: Mapping[str, str], cores: int) -> int:
    """The threads that a rank with ``environment`` computes with; ``cores`` where no variable limits them."""
    # A value such as 4,2 is for nested parallel regions: the first number is that of the outermost.
    texts = (environment.get(name, "").partition(",")[0].strip() for name in VARIABLES)
    return next((int(text) for text in texts if text.isascii() and text.isdigit() and int(text)), cores)


def thread_variables(environment: Mapping[str, str], cores: int, ranks: int) -> dict[str, str]:
    """The variables that a launcher adds to ``environment`` for each of ``ranks`` ranks of one host.

    None for a single rank, which may use all cores, and none if the user has set one of CHOICES.
    """
    is_chosen = any(environment.get(name, "").strip() for name in CHOICES)
    return {} if ranks == 1 or is_chosen else {THREADS: str(share(cores, ranks))}


def shared_threads(environment: Mapping[str, str], cores: int, ranks: int) -> dict[str, str]:
    """The result of :func:`thread_variables`; the log shows the share.

    A number that the user has set may be too large. The first rank of a host says so, because it knows the framework's.
    """
    variables = thread_variables(environment, cores, ranks)
    if variables:
        text = "%s=%s for each of the %d ranks, its share of %d cores; set the variable to choose another number"
        logger.info(text, THREADS, variables[THREADS], ranks, cores)
    return variables


def thread_remark(threads: int, cores: int, ranks: int) -> str:
    """The sentence that advises to set fewer threads, or "" where those of the ranks fit the cores.

    ``threads`` are those of each of ``ranks`` ranks, which share ``cores`` cores.
    """
    if threads <= share(cores, ranks):
        return ""
    return (
        f"{ranks} ranks with up to {threads} threads each share {cores} cores, which slows all of them down; set "
        f"{THREADS}={share(cores, ranks)} in the environment of the ranks"
    )
