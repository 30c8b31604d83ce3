"""Shards whose rows are in Parquet files of a store."""

from itertools import chain
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    FloatType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from hvd_cluster.spark.estimators.parquet import ParquetRows, Piece, check_validation, share, to_list
from hvd_cluster.spark.estimators.store import Store
from hvd_cluster.spark.rows import order
from hvd_cluster.spark.rows.feed import Rows

SCHEMA = StructType(
    [
        StructField("x", ArrayType(FloatType())),
        StructField("y", LongType()),
        StructField("kept", BooleanType()),
    ]
)


@given(st.lists(st.integers(0, 20), max_size=6), st.integers(1, 5))
def test_each_row_has_one_rank(sizes, ranks):
    groups = [Piece("file", number, number, rows, 0, rows) for number, rows in enumerate(sizes)]
    shares = [share(groups, rank, ranks) for rank in range(ranks)]
    seen = [(each.number, row) for own in shares for each in own for row in range(each.first, each.first + each.count)]
    assert seen == [(number, row) for number, rows in enumerate(sizes) for row in range(rows)]
    counts = [sum(each.count for each in own) for own in shares]
    assert max(counts) - min(counts) <= 1


def write(path, first, rows):
    path.mkdir(parents=True, exist_ok=True)
    ids = np.arange(first, first + rows)
    x = pa.array([[float(number), -float(number)] for number in ids], pa.list_(pa.float32()))
    table = pa.table({"x": x, "y": ids, "kept": ids % 5 == 0})
    parquet.write_table(table, path / f"part-{first}.parquet", row_group_size=7)


@pytest.fixture(params=["in order", "shuffle"])
def shards(request, tmp_path):
    """Those of three ranks, on 60 rows in three files."""

    def get(ranks=3, **options):
        store = Store.create(tmp_path)
        for first, rows in ((0, 20), (20, 30), (50, 10)):
            write(tmp_path / "rows", first, rows)
        rows = Rows.of(SCHEMA, [["y"]], [["x"]], 4, shuffle=request.param == "shuffle", **options)
        found = ParquetRows(store, str(tmp_path / "rows"), rows)
        return [found.shard(rank, ranks) for rank in range(ranks)]

    return get


def ids_of(shard):
    ids = []
    for (x,), (y,) in shard:
        assert (x[:, 0] == y[:, 0]).all()
        ids += y[:, 0].tolist()
    return ids


def test_each_row_once_in_each_epoch(shards):
    for _ in range(2):
        assert sorted(chain(*map(ids_of, shards()))) == list(range(60))


def test_epochs_have_their_own_order_with_shuffle(shards):
    shard = shards(1)[0]
    first, second = ids_of(shard), ids_of(shard)
    assert (first == second) is not shard._order.shuffle
    assert (first == list(range(60))) is not shard._order.shuffle
    assert len(shard) == 15


def test_batches_are_whole_across_windows(shards, monkeypatch):
    monkeypatch.setattr(order, "WINDOW_BYTES", 100)
    shard = shards(1)[0]
    assert [len(labels) for _, (labels,) in shard] == [4] * 15


@pytest.mark.parametrize("validation", ["kept", 0.3])
def test_rows_for_validation(shards, validation):
    found = shards(validation=validation)
    trained, kept = (list(chain(*map(ids_of, each))) for each in (found, [shard.validation for shard in found]))
    assert sorted(trained + kept) == list(range(60))
    assert sum(shard.rows for shard in found) == len(trained)
    assert set(kept) == set(range(0, 60, 5)) or validation == 0.3
    assert 0 < len(kept) < 40
    assert sorted(ids_of(shards(1, validation=validation)[0].validation)) == sorted(
        kept
    )  # whatever the number of ranks


def test_tensors(shards):
    torch = pytest.importorskip("torch")
    (x,), (y,) = next(iter(shards(1)[0].batched(9).torch()))
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((9, 2), torch.float32, (9, 1), torch.int64)


@pytest.mark.parametrize("shuffle", [False, True])
def test_strings(tmp_path, monkeypatch, shuffle):
    """Windows count their length."""
    pytest.importorskip("torch")
    monkeypatch.setattr(order, "WINDOW_BYTES", 500)
    texts, ids = [f"z\u00fcrich {row}" for row in range(60)], np.arange(60)
    (tmp_path / "rows").mkdir()
    parquet.write_table(
        pa.table({"text": texts, "image": [bytes([row]) for row in ids], "y": ids}), tmp_path / "rows/a"
    )
    fields = [StructField("text", StringType()), StructField("image", BinaryType()), StructField("y", LongType())]
    rows = Rows.of(StructType(fields), [["y"]], [["text"], ["image"]], 8, shuffle=shuffle)
    shard = ParquetRows(Store.create(tmp_path), str(tmp_path / "rows"), rows).shard(0, 1)
    found = []
    for (some, images), (labels,) in shard.torch():
        found += labels[:, 0].tolist()
        assert some == [[texts[row]] for row in found[-len(some) :]]
        assert images == [[bytes([row])] for row in found[-len(some) :]]
    assert sorted(found) == ids.tolist()
    assert (found == ids.tolist()) is not shuffle


@pytest.mark.parametrize("validation", [None, 0, 0.5, "kept"])
def test_a_validation_that_is_allowed(validation):
    check_validation(validation)
    check_validation(validation, SimpleNamespace(columns=["kept"]))


@pytest.mark.parametrize("validation", [1, -0.1, True, ["kept"], "other"])
def test_a_validation_that_is_not_allowed(validation):
    with pytest.raises(ValueError, match="validation"):
        check_validation(validation, SimpleNamespace(columns=["kept"]))


def test_lists():
    assert to_list(None, 2) is None
    assert to_list(3, 2) == to_list([3], 2) == [3, 3]
    assert to_list([3, 4], 2) == [3, 4]
    with pytest.raises(ValueError, match="there are 3 values, but there must be one, or 2"):
        to_list([1, 2, 3], 2)
