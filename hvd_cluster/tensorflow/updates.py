"""The moment in which variables begin to change, also in a graph: an op of ours tells it to elastic states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import tensorflow as tf

from hvd_cluster.elastic.steps import watchers
from hvd_cluster.tensorflow.kernels.entry import make_known
from hvd_cluster.tensorflow.kernels.table import Number
from hvd_cluster.tensorflow.native import shapes
from hvd_cluster.tensorflow.native.registration import Definition
from hvd_cluster.tensorflow.operations.calls import call
from hvd_cluster.tensorflow.xla.scope import is_compiled

OP = "HorovodUpdateBegan"


@contextmanager
def updating(gradients: Sequence[Any]) -> Iterator[None]:
    """The ops that are made inside change variables with ``gradients``, of which each may be None.

    In a graph none of them runs before all gradients are there: a rank that hears of a loss has changed nothing, or
    changes everything.
    """
    if tf.executing_eagerly():
        watchers.step_began()
        yield
        return
    if is_compiled():
        _tell_of_program()
        yield
        return
    _make_known()
    with tf.control_dependencies([gradient for gradient in gradients if gradient is not None]):
        began = call(OP, {}, {}, named=False)
    with tf.control_dependencies([began]):
        yield


def _tell_of_program() -> None:
    """XLA orders changes by the flow of data only. So each start of a collective tells, too, as they come before."""
    from hvd_cluster.tensorflow.xla import handlers, nodes

    handlers.NUMBERS.setdefault(OP, lambda _: _tell())
    if nodes.why_not() is None:
        nodes.number(OP, 0)


def _tell() -> int:
    """The value of the op, which nobody reads: it has one, so that others can wait for it."""
    watchers.step_began(in_graph=True)
    return 0


@cache
def _make_known() -> None:
    make_known(Definition(OP, (), ("number: int32",), (), shapes.scalar), partial(Number, _tell))
    tf.no_gradient(OP)
