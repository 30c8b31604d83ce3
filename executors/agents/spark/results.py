"""The outcomes of tasks without a connection to the driver, which travel as rows of Spark.

Spark refuses results that are larger together than ``spark.driver.maxResultSize``, and all results of a job pass
through the heap of its driver. So these rows stay on the executors first, and the driver fetches them in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle
import pyarrow
from pyspark.sql import functions

from executors.agents.spark.session import Session, reason
from executors.api import ExecutorError
from executors.driver.outcome import Outcome

SCHEMA = "rank long, chunk long, data binary"
COLUMNS = pyarrow.schema([("rank", pyarrow.int64()), ("chunk", pyarrow.int64()), ("data", pyarrow.binary())])
CHUNK_BYTES = 1 << 20
FETCHED_CHUNKS = 32


def rows_of(outcome: Outcome) -> Iterator[pyarrow.RecordBatch]:
    """``outcome`` as rows of :data:`SCHEMA`, in chunks of CHUNK_BYTES."""
    data: bytes = cloudpickle.dumps(outcome)
    for number, start in enumerate(range(0, len(data), CHUNK_BYTES)):
        chunk = data[start : start + CHUNK_BYTES]
        yield pyarrow.RecordBatch.from_pydict(
            {"rank": [outcome.rank], "chunk": [number], "data": [chunk]}, schema=COLUMNS
        )


def collected(session: Session, frame: Any, missing: Callable[[], Sequence[int]]) -> list[bytes]:
    """Run the tasks of ``frame``. Afterwards fetch the pickled outcomes of the ranks that are ``missing``.

    Ranks whose task has yielded none are left out. Raises what Spark raises; ExecutorError if rows cannot be fetched.
    """
    # A checkpoint, because Spark would run the tasks again for rows of a cache that are lost with their executor.
    stored = frame.localCheckpoint()
    try:
        ranks = missing()
        return _fetched(stored, ranks) if ranks else []
    except Exception as error:
        raise ExecutorError(
            f"the results of ranks {ranks} were made, but Spark could not fetch them from its executors "
            f"({reason(str(error))}); let the executors reach the driver (spark.driver.host), return less, or save "
            "models to shared storage inside the function"
        ) from error
    finally:
        session.forget(stored)


def _fetched(stored: Any, ranks: Sequence[int]) -> list[bytes]:
    index = stored.select("rank").toArrow().column("rank").to_pylist()
    return [_outcome(stored, rank, index.count(rank)) for rank in ranks if rank in index]


def _outcome(stored: Any, rank: int, chunks: int) -> bytes:
    of_rank = stored.where(functions.col("rank") == rank)
    data = bytearray()
    for first in range(0, chunks, FETCHED_CHUNKS):
        part = of_rank.where(functions.col("chunk").between(first, first + FETCHED_CHUNKS - 1)).toArrow()
        for row in part.sort_by("chunk").column("data"):
            data += row.as_buffer()
    return bytes(data)
