"""What TensorFlow raises for an error of the engine, and the way back.

An exception cannot pass through TensorFlow, which knows only a code and a text. So the text has the number of the
exception, which is kept here for a while: :func:`engine_error` returns it.

=========================  ==========================================================================
``tf.errors``              the engine's error
=========================  ==========================================================================
FailedPreconditionError    MismatchError: the ranks disagree; NotInitializedError
InvalidArgumentError       InvalidRequestError: the arguments of this rank
UnknownError               PeerLostError, CollectiveTimeoutError, ShutDownError: the job has to go on without
AbortedError               EngineError, and every other error: a bug, or no memory
CancelledError             none: another collective of the same run of the graph has failed
=========================  ==========================================================================

An error that is raised while a function is traced passes through as it is.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import tensorflow as tf
from tensorflow.python.framework import errors_impl

from collectives import (
    CollectiveTimeoutError,
    HorovodInternalError,
    InvalidRequestError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    ShutDownError,
    fresh,
)
from hvd_cluster.tensorflow.native.error_texts import pattern_of

ABANDONED = tf.errors.CANCELLED, "another collective of this run of the graph has failed"
"""The code and the text for an operation that shall not go on."""
KEPT_ERRORS = 256

_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (NotInitializedError, tf.errors.FAILED_PRECONDITION),
    (MismatchError, tf.errors.FAILED_PRECONDITION),
    (InvalidRequestError, tf.errors.INVALID_ARGUMENT),
    (PeerLostError, tf.errors.UNKNOWN),
    (CollectiveTimeoutError, tf.errors.UNKNOWN),
    (ShutDownError, tf.errors.UNKNOWN),
)
_kept: OrderedDict[int, BaseException] = OrderedDict()
_numbers = count(1)
_NUMBER = re.compile(r"\[hvd-cluster error (\d+)\]")
TEXT = pattern_of(f"{_NUMBER.pattern}|{re.escape(ABANDONED[1])}")
"""The text of TensorFlow's error for one of ours."""

for _kind in (HorovodInternalError, InvalidRequestError):
    # Otherwise AutoGraph, which converts each tf.function, would raise a StagingError in place of classes of our own.
    setattr(_kind, "ag_pass_through", True)  # noqa: B010 - the classes do not know TensorFlow


def as_status(error: BaseException) -> tuple[int, str]:
    """The code and the text for TensorFlow. Keeps ``error``, without its traceback, for :func:`engine_error`."""
    number = next(_numbers)
    _kept[number] = error.with_traceback(None)
    while len(_kept) > KEPT_ERRORS:
        _kept.popitem(last=False)
    code = next((code for kind, code in _CODES if isinstance(error, kind)), tf.errors.ABORTED)
    return code, f"{error} [hvd-cluster error {number}]"


def engine_error(error: BaseException) -> BaseException | None:
    """The engine's error that a caught ``error`` of TensorFlow stands for; None if a collective has not caused it.

    Only the latest 256 errors of this process are known.
    """
    found = _NUMBER.search(str(getattr(error, "message", error)))
    return None if found is None else _kept.get(int(found.group(1)))


@contextmanager
def raised_by_tensorflow() -> Iterator[None]:
    """Around an exchange without an operation: its error becomes that of TensorFlow, as if it came from one."""
    try:
        yield
    except HorovodInternalError as error:
        code, text = as_status(error)
        raise errors_impl.exception_type_from_error_code(code)(None, None, text) from error


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
