"""The batches of a shard from any place on, as the successor of a lost worker needs them; no Spark is needed."""

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import ArrayType, FloatType, LongType
from row_feeds import batch, rows_of, shard_of

from hvd_cluster.spark.rows import elastic_shard, order
from hvd_cluster.spark.rows.elastic_shard import agreed

SCHEMA = {"x": FloatType(), "id": LongType()}


def numbered(ids):
    ids = np.asarray(ids)
    return batch(x=ids.astype(np.float32), id=ids)


def labels_of(batches):
    return [labels.tolist() for _, labels in batches]


@given(
    rows=st.integers(0, 90),
    size=st.integers(1, 20),
    shuffle=st.booleans(),
    first=st.integers(0, 12),
    window=st.integers(1, 600),
)
def test_the_rest_of_an_epoch(tmp_path_factory, rows, size, shuffle, first, window):
    folder = tmp_path_factory.mktemp("rows")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "WINDOW_BYTES", window)
        patch.setattr(order, "CHUNK_BYTES", 32)
        settings = rows_of(SCHEMA, "id", batch_size=size, shuffle=shuffle)
        with shard_of(settings, folder, [numbered(range(rows))]) as shard:
            whole = labels_of(shard.rest(1, 0))
            assert sorted(itertools.chain.from_iterable(whole)) == list(range(rows))
            assert labels_of(shard.rest(1, first)) == whole[first:]
            assert len(whole) == len(shard)


def test_orders_and_digests(tmp_path):
    """They follow from the rows, seed, partition and epoch alone, however Spark cuts the rows."""

    def found(*batches, partition=0):
        with shard_of(rows_of(SCHEMA, "id", shuffle=True), tmp_path, batches, rank=partition) as shard:
            return shard.digest(), [labels_of(shard.rest(epoch, 0)) for epoch in range(2)]

    digest, epochs = found(numbered(range(100)))
    assert epochs[0] != epochs[1]
    assert found(numbered(range(40)), numbered(range(40, 100))) == (digest, epochs)
    assert found(numbered(range(100)), partition=1)[1] != epochs
    assert found(numbered(range(99, -1, -1)))[0] != digest
    assert found(numbered(range(99)))[0] != digest


def test_a_batch_that_fills_a_step(tmp_path):
    schema = {"x": ArrayType(FloatType()), "y": FloatType()}
    pairs = batch(x=pa.array([[1, 2], [3, 4]], pa.list_(pa.float32())), y=pa.array([5, 6], pa.float32()))
    settings = rows_of(schema, "y", feature_cols="x", batch_size=3)
    with shard_of(settings, tmp_path, [pairs]) as shard:
        assert shard.widths() == (2, 1)
        features, labels = shard.filler((2, 1))
        assert (features.tolist(), labels.tolist()) == ([[1, 2], [3, 4]], [5, 6])
    with shard_of(settings, tmp_path, []) as shard:
        assert shard.widths() == ()
        features, labels = shard.filler((2, 1))
        assert (features.tolist(), labels.tolist()) == ([[0, 0]] * 3, [0] * 3)
        assert (features.dtype, labels.dtype) == (np.float32, np.float32)


def test_widths_of_all_ranks():
    assert agreed([(), (2, 1), (2, 1)]) == (2, 1)
    text = r"\(2, 1\) elements a row on rank 1, but \(3, 1\) on rank 2; all rows must have the same number"
    with pytest.raises(ValueError, match=text):
        agreed([(), (2, 1), (3, 1)])


class Row:
    """A rank with one row, or without."""

    def __init__(self, strings, rows=1):
        self.has_strings, self.rows, self._strings = bool(strings), rows, strings

    def first_strings(self):
        return self._strings


@pytest.mark.parametrize(
    ("widths", "has_strings", "root"),
    [
        ([(), (2, 1), ()], True, 1),
        ([(2, 1), ()], True, 0),
        ([(2, 1), (2, 1)], True, None),  # nobody needs them
        ([(), ()], True, None),  # nobody has them
        ([(), (2, 1)], False, None),
    ],
)
def test_a_rank_without_rows_gets_the_strings_of_another(monkeypatch, widths, has_strings, root):
    """All ranks take part in the broadcast, or none."""
    calls = []

    def broadcast(strings, rank, name):
        calls.append((strings, rank))
        return ["sent"]

    monkeypatch.setattr(elastic_shard, "broadcast_object", broadcast)
    found = [elastic_shard._strings_of_others(Row(["own"] * has_strings, len(each)), widths) for each in widths]
    assert found == [()] * len(widths) if root is None else [["sent"]] * len(widths)
    assert calls == ([] if root is None else [(["own"] if each else (), root) for each in widths])
