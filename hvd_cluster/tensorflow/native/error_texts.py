"""The texts of TensorFlow's errors for operations of ours: they begin with the engine's sentence.

In a graph, TensorFlow begins with the lines of Python that made the node. The last ones are of this package, and the
sentence comes after them.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.client import session
from tensorflow.python.eager.polymorphic_function import atomic_function

import hvd_cluster

logger = logging.getLogger(__name__)

_PACKAGE = str(Path(hvd_cluster.__file__).parent) + os.sep


def pattern_of(end: str) -> re.Pattern[str]:
    """Of texts with a sentence that ends with the pattern ``end``: functions of TensorFlow, the sentence, the rest."""
    return re.compile(rf"(?P<places>(?:{{{{.*?}}}}\s*)*)(?P<sentence>.*?(?:{end}))(?P<rest>.*)", re.DOTALL)


def put_first(error: tf.errors.OpError, pattern: re.Pattern[str]) -> None:
    """Let the text of an ``error`` of eager mode begin with the sentence of ``pattern``, if it has one."""
    parts = pattern.match(error.message)
    if parts is not None:
        error._message = parts["sentence"] + parts["rest"]


@functools.cache
def adjust(pattern: re.Pattern[str]) -> None:
    """Let texts of graphs begin so, too, and leave the lines of this package out; once in a process."""
    kind = getattr(atomic_function, "InterpolateRuntimeError", None)
    texts = getattr(session, "error_interpolation", None)
    if kind is None or texts is None:
        logger.debug("TensorFlow %s words the errors of graphs in another way; they stay as they are", tf.__version__)
        return
    kind.DENY_LIST_PHRASES = [*kind.DENY_LIST_PHRASES, _PACKAGE]
    kind.__exit__ = _of_functions(kind.__exit__, pattern)
    texts.interpolate_graph = _of_sessions(texts.interpolate_graph, pattern)


def _of_functions(leave: Any, pattern: re.Pattern[str]) -> Any:
    @functools.wraps(leave)
    def leave_with_sentence(self: Any, kind: Any, error: Any, trace: Any) -> bool:
        parts = pattern.match(error.message) if isinstance(error, tf.errors.OpError) else None
        if parts is None:
            return bool(leave(self, kind, error, trace))
        error._message = parts["places"] + parts["rest"]
        leave(self, kind, error, trace)
        error._message = f"{parts['sentence']}\n\n{error.message.strip()}"
        return False

    return leave_with_sentence


def _of_sessions(interpolate: Any, pattern: re.Pattern[str]) -> Any:
    @functools.wraps(interpolate)
    def interpolate_with_sentence(message: str, graph: Any) -> str:
        parts = pattern.match(message)
        text: str = interpolate(message if parts is None else parts["places"] + parts["rest"], graph)
        return text if parts is None else f"{parts['sentence']}\n\n{text}"

    return interpolate_with_sentence
