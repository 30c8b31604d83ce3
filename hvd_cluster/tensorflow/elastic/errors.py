"""The engine's errors in place of TensorFlow's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from collectives.api import HorovodInternalError
from collectives.engine.work import fresh
from hvd_cluster.tensorflow.errors import engine_error

__all__ = ["engine_errors"]


@contextmanager
def engine_errors() -> Iterator[None]:
    """Raises the HorovodInternalError for which an error of TensorFlow stands; all other errors pass."""
    try:
        yield
    except tf.errors.OpError as error:
        cause = engine_error(error)
        if not isinstance(cause, HorovodInternalError):
            raise
        raise fresh(cause) from error
