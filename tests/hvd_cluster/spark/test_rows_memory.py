"""The memory that a task and its worker use for a partition that is much larger."""

import subprocess
import sys
from pathlib import Path

import pytest

MEBIBYTE = 1 << 20
PARTITION = 256 * MEBIBYTE

SCRIPT = """
import resource, sys, tempfile
import numpy as np
import pyarrow as pa
from pyspark.sql.types import ArrayType, FloatType, LongType
from row_feeds import never, opened, rows_of

ROWS, COUNT, WIDTH = 4096, 64, 256
schema = {"x": ArrayType(FloatType()), "id": LongType()}

def batches():
    for first in range(0, ROWS * COUNT, ROWS):
        ids = np.arange(first, first + ROWS)
        elements = pa.array(np.repeat(np.float32(ids), WIDTH))
        yield pa.record_batch({"x": pa.ListArray.from_arrays(np.arange(0, ROWS * WIDTH + 1, WIDTH, np.int32), elements),
                               "id": ids})

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

rows = rows_of(schema, "id", batch_size=128, shuffle=sys.argv[1] == "shuffle")
with opened(rows, tempfile.gettempdir()) as (feed, shard):
    for _ in zip(batches(), range(2)):
        pass
    before = peak()
    feed.feed(batches(), never)
    fed = peak()
    for _ in range(2):
        for features, labels in shard:
            assert features[0, 0] == labels[0]
    print(before, fed, peak())
"""


def growth(order):
    """Bytes by which the peak grows when the rows are written, and when they are read."""
    command = [sys.executable, "-c", SCRIPT, order]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    before, fed, read = (int(kilobytes) * 1024 for kilobytes in done.stdout.split())
    return fed - before, read - fed


@pytest.mark.parametrize("order", ["shuffle", "in order"])
def test_a_large_partition(order):
    written, read = growth(order)
    assert written < PARTITION / 8
    assert read < PARTITION / 2
