"""Strings and binary data from Arrow batches to batches of a shard: every value with its row, in each form."""

import itertools
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import BinaryType, FloatType, LongType, StringType
from row_feeds import batch, never, opened, rows_of, shard_of

from hvd_cluster.spark.rows import batches, order
from hvd_cluster.spark.rows.strings import StringRows, array_bytes, encoded, objects

SCHEMA = {"text": StringType(), "image": BinaryType(), "title": StringType(), "x": FloatType(), "id": LongType()}
FEATURES = [["text", "title"], "image", ["x"]]
LETTERS = st.characters(exclude_categories=["Cs"])


def arrow(texts, images, first=0):
    """Rows whose values follow from each other."""
    ids = np.arange(first, first + len(texts))
    return batch(
        text=pa.array(texts, pa.string()),
        title=pa.array([text[::-1] for text in texts], pa.string()),
        image=pa.array(images, pa.binary()),
        x=np.float32(ids),
        id=ids,
    )


def cut(values, sizes):
    """Arrow batches of these sizes, then of the rest."""
    bounds = [0, *itertools.accumulate(sizes), len(values)]
    for first, stop in itertools.pairwise(min(bound, len(values)) for bound in bounds):
        texts, images = ([each[side] for each in values[first:stop]] for side in (0, 1))
        yield arrow(texts, images, first)


def check(values, features, labels):
    """The strings of each row; gives the rows."""
    texts, images, x = features
    ids = labels.tolist()
    assert [list(row) for row in texts] == [[values[row][0], values[row][0][::-1]] for row in ids]
    assert list(images) == [values[row][1] for row in ids]
    assert x.tolist() == [[row] for row in ids]
    return ids


@given(
    values=st.lists(st.tuples(st.text(LETTERS, max_size=30), st.binary(max_size=60)), max_size=60),
    sizes=st.lists(st.integers(0, 30), max_size=4),
    batch_size=st.integers(1, 25),
    shuffle=st.booleans(),
    validation=st.sampled_from([None, 0.3]),
    window=st.integers(200, 3000),
    chunk=st.integers(1, 300),
)
def test_every_value_comes_with_its_row(values, sizes, batch_size, shuffle, validation, window, chunk):
    rows = rows_of(SCHEMA, "id", FEATURES, batch_size=batch_size, shuffle=shuffle, validation=validation)
    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
        shard_of(rows, folder, cut(values, sizes)) as shard,
    ):
        patch.setattr(order, "WINDOW_BYTES", window)
        patch.setattr(order, "CHUNK_BYTES", chunk)
        parts = [shard, shard.validation] if validation else [shard]
        for _ in range(3):
            found = [[check(values, *each) for each in part] for part in parts]
            assert all(len(ids) == batch_size for part in found for ids in part[:-1])
            assert sorted(itertools.chain(*itertools.chain(*found))) == list(range(len(values)))
        elastic = [ids for each in shard.rest(1, 0) for ids in check(values, *each)]
        assert len(elastic) == shard.rows


def test_forms(tmp_path):
    values = [("z\u00fcrich", b"\0\xff\0"), ("", b""), ("\U0001f600\0", b"\x89PNG")]
    rows = rows_of(SCHEMA, "id", [["text", "title"], "image", ["x"]], batch_size=2)
    with shard_of(rows, tmp_path, cut(values, [])) as shard:
        (texts, images, _), _ = next(iter(shard))
        assert [(each.dtype, each.shape) for each in (texts, images)] == [(object, (2, 2)), (object, (2,))]
        pytest.importorskip("torch")
        (texts, images, x), labels = next(iter(shard.torch()))
        assert texts == [["z\u00fcrich", "hcir\u00fcz"], ["", ""]]
        assert images == [b"\0\xff\0", b""]
        assert (x.tolist(), labels.tolist()) == ([[0], [1]], [0, 1])


def test_one_column_alone(tmp_path):
    for columns, expected in ("text", ["a", "b"]), (["text"], [["a"], ["b"]]):
        with shard_of(rows_of(SCHEMA, "id", columns), tmp_path, [batch(text=pa.array(["a", "b"]), id=[0, 1])]) as shard:
            [(texts, _)] = shard
            assert texts.tolist() == expected


@pytest.mark.parametrize("empty", ["", "rows"])
def test_nothing_to_map(tmp_path, empty):
    """A file of values without a byte, and one without a row."""
    texts = [] if empty else ["", "", ""]
    rows = rows_of(SCHEMA, "id", "text", shuffle=True)
    with shard_of(rows, tmp_path, [batch(text=pa.array(texts, pa.string()), id=np.arange(len(texts)))]) as shard:
        for _ in range(2):
            assert [text for features, _ in shard for text in features] == texts


def test_the_order_does_not_depend_on_when_rows_come(tmp_path, monkeypatch):
    """Also of the first epoch, whose windows depend on the size of the strings."""
    monkeypatch.setattr(order, "WINDOW_BYTES", 2000)
    values = [("a" * (row % 40), bytes(row % 7)) for row in range(200)]
    taken = threading.Event()

    def slowly():
        for number, each in enumerate(cut(values, [20, 40, 60, 3])):
            assert number == 0 or taken.wait(30)
            yield each

    rows = rows_of(SCHEMA, "id", FEATURES, batch_size=2, shuffle=True)
    with shard_of(rows, tmp_path, cut(values, [])) as shard:
        usual = [[labels.tolist() for _, labels in shard] for _ in range(2)]
    with opened(rows, tmp_path) as (feed, shard), ThreadPoolExecutor(1) as pool:
        feeding = pool.submit(feed.feed, slowly(), never)
        coming = iter(shard)
        first = [next(coming)[1].tolist()]
        taken.set()
        assert [first + [labels.tolist() for _, labels in coming], [labels.tolist() for _, labels in shard]] == usual
        feeding.result(30)
    assert usual[0] != usual[1]


def test_windows_are_smaller_where_strings_are_longer(tmp_path):
    sizes = {}
    for length in (0, 1000):
        texts = pa.array(["a" * length] * 40)
        with shard_of(rows_of(SCHEMA, "id", "text"), tmp_path, [batch(text=texts, id=np.arange(40))]) as shard:
            assert shard.rows == 40
            sizes[length] = shard._source.window(4, 40).rows
    assert 42 < sizes[0] / sizes[1000] < 43  # 24 bytes a row, and 1024


def test_a_window_has_no_values_in_memory(tmp_path):
    """A batch has: of all rows in a window, those that are long may come together."""
    rows = rows_of(SCHEMA, "id", "text", shuffle=True)
    with shard_of(rows, tmp_path, [batch(text=pa.array(["a" * 10] * 50), id=np.arange(50))]) as shard:
        list(shard)
        [(texts, _)] = shard._epoch()
        assert isinstance(texts, StringRows)
        assert len(texts) == 50
        assert texts[3:5].objects().tolist() == ["a" * 10] * 2


def test_a_dataset_gets_a_batch_at_a_time():
    windows = iter([[np.arange(5), np.array(list("abcde"), object)], [np.arange(1), np.array(["f"], object)]])
    found = [[each.tolist() for each in arrays] for arrays in batches.cut_windows(windows, 2)]
    assert found == [[[0, 1], ["a", "b"]], [[2, 3], ["c", "d"]], [[4], ["e"]], [[0], ["f"]]]


@pytest.mark.leaves("processes")  # of multiprocessing
def test_workers_of_a_data_loader(tmp_path):
    pytest.importorskip("torch")
    from torch.utils.data import DataLoader

    values = [(f"z\u00fcrich {row}", bytes([row, 0])) for row in range(9)]
    rows = rows_of(SCHEMA, "id", FEATURES, batch_size=4, shuffle=True)
    with shard_of(rows, tmp_path, cut(values, [])) as shard:
        found = []
        for features, labels in DataLoader(shard, num_workers=2):
            assert [type(each) for each in features[:2]] == [list, list]
            found += check(values, features, labels)
        assert sorted(found) == list(range(9))
        for features, labels in DataLoader(shard.torch()):
            check(values, features, labels)


def test_digests(tmp_path):
    """They follow from the strings, however Spark cuts the rows."""

    def digest(values, *sizes):
        with shard_of(rows_of(SCHEMA, "id", FEATURES), tmp_path, cut(values, sizes)) as shard:
            return shard.digest()

    values = [("ab", b"c"), ("", b""), ("d", b"e")]
    usual = digest(values)
    assert digest(values, 1, 1) == usual
    assert digest([("ab", b"x"), *values[1:]]) != usual
    assert digest([("a", b"c"), ("b", b""), values[2]]) != usual


def test_a_batch_that_fills_a_step(tmp_path):
    """A rank without rows has the strings of another one, because a decoder cannot read empty ones."""
    rows = rows_of(SCHEMA, "id", FEATURES, batch_size=3)
    with shard_of(rows, tmp_path, cut([("ab", b"c"), ("d", b"e")], [])) as shard:
        assert shard.widths() == (2, 1, 1, 1)
        assert shard.has_strings
        strings = shard.first_strings()
        assert [each.tolist() for each in strings] == [[["ab", "ba"]], [b"c"]]
    with shard_of(rows, tmp_path, []) as shard:
        (texts, images, x), ids = shard.filler((2, 1, 1, 1), strings)
        assert texts.tolist() == [["ab", "ba"]] * 3
        assert images.tolist() == [b"c"] * 3
        assert (x.tolist(), ids.tolist()) == ([[0]] * 3, [0] * 3)
        (texts, images, _), _ = shard.torch().filler((2, 1, 1, 1))
        assert (texts, images) == ([["", ""]] * 3, [b""] * 3)


@given(st.lists(st.lists(st.text(LETTERS), min_size=2, max_size=2), min_size=1, max_size=10), st.integers(0, 1 << 40))
def test_places_of_values(rows, position):
    array = np.array(rows, object).reshape(-1, 2)
    places, data = encoded(array, position)
    assert places.shape == (len(rows), 3)
    assert StringRows(places - position, data, str, False).objects().tolist() == rows
    assert places[0, 0] == position
    assert places[-1, -1] == position + len(data)


def test_sizes_of_arrays():
    assert array_bytes(np.zeros((2, 3), np.float32)) == 24
    assert array_bytes(np.array(["abc", ""], object)) == 3 + 16
    assert objects(array := np.array(["a"], object)) is array
