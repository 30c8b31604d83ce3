"""The broadcast variables of Spark to which the function of a job refers.

Spark brings their values to its tasks, each as a file on the executor. A worker is a process of its own, so its task
tells it the paths of these files. There the function has a ``Broadcast`` again, which reads its value when it is used.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
from pyspark import Accumulator, Broadcast

from executors.job.call import Call, pickle_call

VARIABLE = "HVD_CLUSTER_SPARK_BROADCASTS"
"""The variable that tells a worker the paths of the values."""


@dataclass(frozen=True, slots=True)
class PickledCall:
    """A call as bytes, for ``pickle.loads`` in a worker, and the broadcast variables to which it refers."""

    data: bytes = field(repr=False)
    broadcasts: tuple[Any, ...] = ()

    @classmethod
    def of(cls, call: Call) -> PickledCall:
        """Raises TypeError if an object of ``call`` cannot be sent, such as an accumulator of Spark."""
        found, counts = _References(Broadcast), _References(Accumulator)
        data = pickle_call(call, lambda value: _dumps(value, found, counts))
        if counts.objects:
            raise TypeError(
                f"{call.name} cannot be sent to the workers: it refers to an accumulator of Spark, and a worker is no "
                "task of Spark, so its additions would be lost; let the function return the number, and add up the "
                "results"
            )
        return cls(data, tuple(found.objects))


@contextmanager
def exposed(broadcasts: Sequence[Any], folder: Callable[[], str]) -> Iterator[None]:
    """Workers that this task starts inside the block find the values of ``broadcasts``. Files are in ``folder()``."""
    with ExitStack() as stack:
        if broadcasts:
            paths = [stack.enter_context(_path(each, folder)) for each in broadcasts]
            os.environ[VARIABLE] = json.dumps(paths)
            stack.callback(os.environ.pop, VARIABLE)
        yield


class _References:
    """The objects of a ``kind`` that a pickle refers to."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.objects: list[Any] = []

    def index(self, value: Any) -> int:
        """The number of ``value``, which is added if it is new."""
        numbers = [number for number, known in enumerate(self.objects) if known is value]
        if not numbers:
            self.objects.append(value)
        return numbers[0] if numbers else len(self.objects) - 1


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, broadcasts: _References, accumulators: _References) -> None:
        super().__init__(file)
        self._broadcasts = broadcasts
        self._accumulators = accumulators

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Broadcast):
            return _received, (self._broadcasts.index(obj),)
        if isinstance(obj, Accumulator):
            self._accumulators.index(obj)
        return super().reducer_override(obj)


def _dumps(value: object, broadcasts: _References, accumulators: _References) -> bytes:
    file = io.BytesIO()
    _Pickler(file, broadcasts, accumulators).dump(value)
    return file.getvalue()


def _received(index: int) -> Any:
    return Broadcast(path=json.loads(os.environ[VARIABLE])[index])


@contextmanager
def _path(broadcast: Any, folder: Callable[[], str]) -> Iterator[str]:
    """The path of its pickled value."""
    if (path := getattr(broadcast, "_path", None)) is not None:
        yield path
        return
    # Where spark.io.encryption.enabled is set, Spark gives the value itself. The worker reads a file without a name.
    with tempfile.TemporaryFile(dir=folder()) as file:
        pickle.dump(broadcast.value, file, pickle.HIGHEST_PROTOCOL)
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"
