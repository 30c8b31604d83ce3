"""A real allreduce of two processes by each backend."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from collectives import (
    EngineError,
    HorovodInternalError,
    InvalidRequestError,
    Operation,
    SettingsError,
    UnsupportedRequestError,
    registry,
)
from executors import ExecutorError
from hvd_cluster import run
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import global_process_set
from hvd_cluster.ops.arrays import in_place
from hvd_cluster.ops.objects import described
from hvd_cluster.ops.submission import run as run_operation

RANKS = 2
COUNT = 1 << 18
"""Elements of float32: 1 MiB."""
WARM_UP = 3
REPEATS = 20
SECONDS = 30.0
UNTIL_IT_IS_OVER = {"HOROVOD_ENABLE_ASYNC_COMPLETION": "0"}
"""An allreduce on a GPU lasts until the GPU has done it, not only until it is in a stream."""

DEFAULT = registry.Row("cpu", "auto", "HOROVOD_CPU_OPERATIONS")
"""The backend of a job that asks for none."""

ARRAYS = {"cpu": "numpy", "cuda": "cupy"}
"""The library whose arrays are on each kind of device."""
BY_MPIRUN = ("mpi",)
"""Backends whose processes mpirun has to start."""
PLAIN = (ExecutorError, HorovodInternalError, ImportError, InvalidRequestError, SettingsError)
"""Errors whose text says what is missing and what to do."""

Launch = Callable[[registry.Row], float]
"""Runs the allreduce of a row; returns its seconds, and raises its error."""


@dataclass(frozen=True, slots=True)
class BackendTrial:
    """The result: the ``seconds`` of an allreduce, or the ``reason`` why there was none, and the remedy."""

    device: str
    name: str
    variable: str
    seconds: float | None
    reason: str

    @property
    def works(self) -> bool:
        """Whether the ranks had the right result."""
        return self.seconds is not None


def launch(row: registry.Row) -> float:
    """Run the allreduce of ``row`` on RANKS processes of this machine; the median of its seconds on rank 0.

    Raises UnsupportedRequestError for a device that is not here, and the errors of ``run()``.
    """
    reason = registry.absence(row.device)
    if reason:
        raise UnsupportedRequestError(reason)
    environment = {"HOROVOD_GLOO_TIMEOUT_SECONDS": f"{SECONDS:g}", **UNTIL_IT_IS_OVER, row.variable: row.name}
    by_mpirun = True if row.name in BY_MPIRUN else None
    results = run(reduce_in_rank, (row.device,), num_proc=RANKS, env=environment, use_mpi=by_mpirun)
    return results[0]


def try_row(row: registry.Row, launch: Launch = launch) -> BackendTrial:
    """The result of ``row``. Raises nothing: any failure is a reason."""
    try:
        seconds = launch(row)
    except Exception as error:  # noqa: BLE001 - the reason, whatever it is
        return BackendTrial(*row, seconds=None, reason=_reason(error))
    return BackendTrial(*row, seconds=seconds, reason="")


def _reason(error: Exception) -> str:
    """In one line; with the class of an error whose text may be too little."""
    text = str(error) if isinstance(error, PLAIN) else described(error)
    return " ".join(text.split())


def reduce_in_rank(device: str) -> float:
    """In a rank: the median of the seconds of an allreduce of 1 MiB. Raises EngineError for a wrong result."""
    basics.init()
    array = _filled(device, basics.rank() + 1, basics.local_rank())
    _reduce(array)
    expected = basics.size() * (basics.size() + 1) // 2
    if not (array == expected).all():
        raise EngineError(f"the sum of 1 to {basics.size()} is {array[0]}, not {expected}; report this")
    array[:] = 0
    seconds = [_timed(array) for _ in range(WARM_UP + REPEATS)]
    basics.shutdown()
    return statistics.median(seconds[WARM_UP:])


def _filled(device: str, value: float, local_rank: int) -> Any:
    """An array; on a GPU of its own for each rank, as far as there are enough."""
    library = import_module(ARRAYS[device])
    if device == "cuda":
        library.cuda.Device(local_rank % library.cuda.runtime.getDeviceCount()).use()
    return library.full(COUNT, value, "float32")


def _timed(array: Any) -> float:
    begin = time.perf_counter()
    _reduce(array)
    return time.perf_counter() - begin


def _reduce(array: Any) -> None:
    run_operation(Operation.ALLREDUCE, in_place, array, "diagnose", global_process_set)
