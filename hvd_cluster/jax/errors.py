"""The engine's errors in place of XLA's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from collectives.api import HorovodInternalError
from collectives.engine.work import fresh
from hvd_cluster.jax.calls import last_error

__all__ = ["engine_errors"]


@contextmanager
def engine_errors() -> Iterator[None]:
    """Raises the HorovodInternalError of an allreduce for which an error of XLA stands; all other errors pass."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        cause = last_error()
        if not isinstance(cause, HorovodInternalError) or str(cause) not in str(error):
            raise
        raise fresh(cause) from error
