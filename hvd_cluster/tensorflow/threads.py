"""The threads that TensorFlow computes with in this rank.

A launcher gives each rank its share of the cores in a variable that TensorFlow does not read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

import tensorflow as tf
from tensorflow.python.eager import context

from executors import threads_of

INSIDE, BETWEEN = "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"
FEWEST_BETWEEN = 2
"""One node that blocks, such as a read of data, must not stop all others."""


def limit_threads(environment: Mapping[str, str]) -> None:
    """Let TensorFlow compute with the threads that ``environment`` gives to any library, unless the user chose others.

    Does nothing where TensorFlow has begun to compute: it cannot change its threads any more.
    """
    share = threads_of(environment, 0)
    threading = tf.config.threading
    with suppress(RuntimeError):
        if share and not environment.get(INSIDE) and not threading.get_intra_op_parallelism_threads():
            threading.set_intra_op_parallelism_threads(share)
        if share and not environment.get(BETWEEN) and not threading.get_inter_op_parallelism_threads():
            threading.set_inter_op_parallelism_threads(max(FEWEST_BETWEEN, share))
    if share:
        _let_idle_threads_sleep()


def _let_idle_threads_sleep() -> None:
    """A thread without work would spin for a while, on a core that another rank of this host waits for.

    TensorFlow has an option against it, but no function that sets it for eager mode.
    """
    eager = context.context()
    config = eager._config or tf.compat.v1.ConfigProto()
    config.experimental.disable_thread_spinning = True
    eager._config = config


def count_threads() -> int:
    """The threads inside of a node; 0 where nothing limits them."""
    given = os.environ.get(INSIDE, "")
    return tf.config.threading.get_intra_op_parallelism_threads() or (int(given) if given.isdecimal() else 0)
