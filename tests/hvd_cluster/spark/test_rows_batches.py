"""The loader of one rank: every row once an epoch, whatever the sizes; orders, ends, and whose memory a batch is."""

import itertools
import pickle
import tempfile
import threading
from contextlib import ExitStack, contextmanager
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import ArrayType, DoubleType, FloatType, IntegerType, LongType
from row_feeds import NUMBERED, batch, feed_of, inherited, never, numbered, opened, rows_of, shard_of

from executors.api import ExecutorError
from hvd_cluster.spark.rows import order

PATIENCE = 30


@pytest.fixture
def small_windows():
    with windows(256, 64):
        yield


@contextmanager
def windows(window, chunk):
    with mock.patch.multiple(order, WINDOW_BYTES=window, CHUNK_BYTES=chunk):
        yield


def ids_of(loader):
    return [labels.tolist() for _, labels in loader]


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


@given(
    sizes=st.lists(st.integers(0, 70), max_size=6),
    batch_size=st.integers(1, 50),
    shuffle=st.booleans(),
    validation=st.sampled_from([None, 0.3]),
    seed=st.integers(0, 3),
    window=st.integers(1, 2000),
    chunk=st.integers(1, 300),
)
def test_every_row_comes_once_an_epoch(sizes, batch_size, shuffle, validation, seed, window, chunk):
    rows = rows_of(NUMBERED, "id", batch_size=batch_size, shuffle=shuffle, validation=validation, seed=seed)
    with (
        tempfile.TemporaryDirectory() as folder,
        windows(window, chunk),
        shard_of(rows, folder, numbered(*sizes)) as shard,
    ):
        kept_apart = flat(ids_of(shard.validation)) if shard.validation else []
        assert kept_apart == sorted(set(kept_apart))
        expected = sorted(set(range(sum(sizes))) - set(kept_apart))
        for _ in range(3):
            batches = list(shard)
            assert sorted(flat(labels for _, labels in batches)) == expected
            assert [len(labels) for _, labels in batches[:-1]] == [batch_size] * (len(batches) - 1)
            assert all(np.array_equal(x, np.stack([ids, ids * 2.0], axis=1)) for x, ids in batches)
            assert len(shard) == len(batches)
        assert shard.rows == len(expected)


def test_without_shuffle_the_order_is_that_of_the_partition(tmp_path, small_windows):
    with shard_of(rows_of(NUMBERED, "id", batch_size=7), tmp_path, numbered(10, 30, 1)) as shard:
        for _ in range(2):
            assert flat(ids_of(shard)) == list(range(41))


def orders(tmp_path, epochs=3, rank=0, **options):
    with shard_of(rows_of(NUMBERED, "id", **options), tmp_path, numbered(50, 50), rank) as shard:
        return [flat(ids_of(shard)) for _ in range(epochs)]


def test_shuffle_differs_by_epoch_rank_and_seed_and_nothing_else(tmp_path, small_windows):
    usual = orders(tmp_path, shuffle=True)
    assert orders(tmp_path, shuffle=True) == usual
    others = [orders(tmp_path, shuffle=True, rank=1), orders(tmp_path, shuffle=True, seed=1)]
    assert len({tuple(each) for run in [usual, *others] for each in run}) == 9


def test_later_epochs_mix_rows_from_anywhere(tmp_path, small_windows):
    """Rows of 24 bytes: windows of 8 rows, chunks of 2."""
    first, second, third = orders(tmp_path, shuffle=True, batch_size=4)
    assert all(
        sorted(first[start : start + 8]) == list(range(start, min(start + 8, 100))) for start in range(0, 100, 8)
    )
    for ids in (second, third):
        spans = [max(ids[start : start + 8]) - min(ids[start : start + 8]) for start in range(0, 96, 8)]
        assert np.median(spans) > 30


def test_the_first_epoch_streams(tmp_path):
    """A shard gives the rows that have arrived while the task waits for more."""
    taken = threading.Event()

    def slowly():
        yield from numbered(10)
        assert taken.wait(PATIENCE)
        yield batch(x=np.zeros(3, np.float32), y=np.zeros(3), id=np.arange(10, 13))

    with opened(rows_of(NUMBERED, "id", batch_size=4), tmp_path) as (feed, shard), feeding(feed, slowly()):
        batches = iter(shard)
        assert [next(batches)[1].tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        taken.set()
        assert ids_of(batches) == [[8, 9, 10, 11], [12]]


def test_the_first_epoch_streams_where_it_is_shuffled(tmp_path):
    """A small part of a window is enough for the first batches; what follows does not change the order."""
    rows, taken = rows_of(NUMBERED, "id", shuffle=True), threading.Event()

    def slowly():
        for number, each in enumerate(numbered(*[8] * 20)):
            assert number < 4 or taken.wait(PATIENCE)
            yield each

    with opened(rows, tmp_path) as (feed, shard), feeding(feed, slowly()):
        batches = iter(shard)
        found = [next(batches)[1].tolist() for _ in range(8)]
        assert sorted(flat(found)) == list(range(32))
        assert flat(found) != list(range(32))
        taken.set()
        found += ids_of(batches)
    with shard_of(rows, tmp_path, numbered(160)) as shard:
        assert ids_of(shard) == found


def test_asking_for_tensors_does_not_wait(tmp_path):
    with opened(rows_of(NUMBERED, "id", validation=0.5), tmp_path) as (feed, shard):
        loader = shard.torch()
        assert loader.validation is not shard.validation
        feed.feed(numbered(10), never)
        assert loader.rows + loader.validation.rows == 10


@contextmanager
def feeding(feed, batches):
    thread = threading.Thread(target=feed.feed, args=(batches, never))
    thread.start()
    try:
        yield
    finally:
        thread.join(PATIENCE)


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_that_was_left_early(tmp_path, shuffle, small_windows):
    first = threading.Event()

    def slowly():
        for number, each in enumerate(numbered(*[10] * 10)):
            assert number < 3 or first.wait(PATIENCE)
            yield each

    rows = rows_of(NUMBERED, "id", batch_size=4, shuffle=shuffle)
    with opened(rows, tmp_path) as (feed, shard), feeding(feed, slowly()):
        for _ in shard:
            break
        first.set()
        for _ in range(2):
            assert sorted(flat(ids_of(shard))) == list(range(100))


@pytest.mark.parametrize("shuffle", [False, True])
def test_two_epochs_at_once(tmp_path, shuffle, small_windows):
    with shard_of(rows_of(NUMBERED, "id", shuffle=shuffle), tmp_path, numbered(50)) as shard:
        first, second = zip(*zip(ids_of(shard), ids_of(shard), strict=True), strict=True)
        assert sorted(flat(first)) == sorted(flat(second)) == list(range(50))
        assert (first == second) is not shuffle


def test_two_threads(tmp_path, small_windows):
    """Both may be the one that reads the pipe."""
    found = []
    with opened(rows_of(NUMBERED, "id", shuffle=True), tmp_path) as (feed, shard):
        threads = [threading.Thread(target=lambda: found.append(flat(ids_of(shard)))) for _ in range(2)]
        for thread in threads:
            thread.start()
        feed.feed(numbered(*[5] * 20), never)
        for thread in threads:
            thread.join(PATIENCE)
    assert [sorted(ids) for ids in found] == [list(range(100))] * 2


def test_an_empty_shard(tmp_path):
    with shard_of(rows_of(NUMBERED, "id", shuffle=True, validation=0.5), tmp_path, numbered(0)) as shard:
        for loader in (shard, shard.torch(), shard.validation):
            assert (list(loader), len(loader), loader.rows) == ([], 0, 0)


def test_a_task_that_ends_early_is_no_short_epoch(tmp_path):
    rows, stopped = rows_of(NUMBERED, "id"), iter([False, True])
    with ExitStack() as task:
        feed = task.enter_context(feed_of(rows, tmp_path))
        with inherited(feed), rows.shard(0) as shard:
            feed.feed(numbered(10, 10), lambda: next(stopped))
            task.close()
            batches = iter(shard)
            assert [next(batches)[1].tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
            with pytest.raises(ExecutorError, match="ended before"):
                next(batches)
            with pytest.raises(ExecutorError, match="ended before"):
                len(shard)


def test_validation_by_a_column(tmp_path):
    rows = rows_of({**NUMBERED, "kept": IntegerType()}, "id", validation="kept")
    ids = np.arange(10)
    columns = batch(x=np.float32(ids), y=ids * 2.0, id=ids, kept=np.int32(ids % 3 - 1))
    with shard_of(rows, tmp_path, [columns]) as shard:
        assert flat(ids_of(shard)) == [0, 1, 3, 4, 6, 7, 9]
        assert flat(ids_of(shard.validation)) == [2, 5, 8]
        assert next(iter(shard))[0].shape == (4, 2)


def test_validation_by_a_fraction(tmp_path):
    def kept(sizes, **options):
        with shard_of(rows_of(NUMBERED, "id", validation=0.2, **options), tmp_path, numbered(*sizes)) as shard:
            assert shard.validation.validation is None
            return flat(ids_of(shard.validation))

    usual = kept([1000])
    assert 150 < len(usual) < 250
    assert kept([400, 600], shuffle=True) == usual
    assert kept([1000], seed=1) != usual


def test_no_validation(tmp_path):
    with shard_of(rows_of(NUMBERED, "id", validation=0.0), tmp_path, numbered(5)) as shard:
        assert shard.validation is None
        assert shard.torch().validation is None


@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_belong_to_who_gets_them(tmp_path, shuffle):
    with shard_of(rows_of(NUMBERED, "id", shuffle=shuffle), tmp_path, numbered(30)) as shard:
        for features, labels in shard:
            np.subtract(features, features.mean(), out=features)
            labels[:] = -1
        assert sorted(flat(ids_of(shard))) == list(range(30))


def test_batches_are_views(tmp_path):
    with shard_of(rows_of(NUMBERED, "id"), tmp_path, numbered(3, 5)) as shard:
        (first, _), (second, _) = shard
        assert first.base is second.base is not None


@pytest.mark.parametrize("shuffle", [False, True])
def test_torch(tmp_path, shuffle):
    torch = pytest.importorskip("torch")
    with shard_of(rows_of(NUMBERED, "id", shuffle=shuffle, validation=0.2), tmp_path, numbered(30)) as shard:
        expected = list(shard.validation)
        loader = shard.torch()
        for _ in range(2):
            ids = []
            for features, labels in loader:
                assert (features.dtype, labels.dtype) == (torch.float64, torch.int64)
                torch.testing.assert_close(features[:, 0], labels.double())
                ids.append(labels.tolist())
                features.zero_()
            assert len(ids) == len(loader)
            assert len(flat(ids)) == len(set(flat(ids))) == shard.rows
        for found in (list(loader.validation), list(shard.validation.torch())):
            assert [labels.tolist() for _, labels in found] == [labels.tolist() for _, labels in expected]


def test_torch_shares_memory_and_counts_epochs_with_the_arrays(tmp_path):
    torch = pytest.importorskip("torch")
    with shard_of(rows_of(NUMBERED, "id", shuffle=True), tmp_path, numbered(100)) as shard:
        tensors = [torch.cat([labels for _, labels in loader]).tolist() for loader in (shard.torch(), shard.torch())]
        (first, _), (second, _) = itertools.islice(shard.torch(), 2)
        assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert tensors == orders(tmp_path, epochs=2, shuffle=True, batch_size=4)


def test_tuples_of_arrays(tmp_path):
    torch = pytest.importorskip("torch")
    schema = {"a": FloatType(), "b": ArrayType(FloatType()), "c": LongType(), "id": LongType(), "z": DoubleType()}
    rows = rows_of(schema, ["id", ["z"]], [["a", "b"], "c"])
    ids = np.arange(6)
    arrow = batch(
        a=np.float32(ids), b=pa.array([[i, i] for i in ids], pa.list_(pa.float32())), c=ids, id=ids, z=ids * 1.0
    )
    with shard_of(rows, tmp_path, [arrow]) as shard:
        (wide, single), (label, other) = next(iter(shard))
        assert [each.shape for each in (wide, single, label, other)] == [(4, 3), (4,), (4,), (4, 1)]
        assert [each.dtype for each in (wide, single, label, other)] == [np.float32, np.int64, np.int64, np.float64]
        (wide, single), (label, other) = next(iter(shard.torch()))
        assert all(isinstance(each, torch.Tensor) for each in (wide, single, label, other))


def test_a_feed_that_is_stopped_takes_no_more(tmp_path):
    source = numbered(1, 1, 1)
    stopped = iter([False, True])
    with feed_of(rows_of(NUMBERED, "id"), tmp_path) as feed:
        feed.feed(source, lambda: next(stopped))
        assert next(source)["id"].to_pylist() == [2]


def test_large_batches_are_written_in_pieces(tmp_path):
    """So that a first epoch begins, and little memory is needed."""
    with feed_of(rows_of(NUMBERED, "id"), tmp_path) as feed:
        with mock.patch.object(feed._writer, "append", wraps=feed._writer.append) as append:
            feed.feed(numbered(1_000_000), never)
        assert [len(call.args[1][0]) for call in append.call_args_list] == [209715] * 4 + [161140]


def test_the_function_gets_the_shard_before_its_arguments(tmp_path, monkeypatch):
    rows = pickle.loads(pickle.dumps(rows_of(NUMBERED, "id")))
    monkeypatch.setenv("HOROVOD_RANK", "0")
    call = rows.on_shard(lambda shard, *args, **kwargs: (flat(ids_of(shard)), args, kwargs))
    with feed_of(rows, tmp_path) as feed, inherited(feed):
        feed.feed(numbered(5), never)
        assert call(1, two=2) == ([0, 1, 2, 3, 4], (1,), {"two": 2})


@pytest.mark.parametrize("shuffle", [False, True])
def test_weights_are_a_third_side(tmp_path, shuffle):
    rows = rows_of({**NUMBERED, "w": FloatType()}, "id", [["x", "y"], "x"][:1], sample_weight_col="w", shuffle=shuffle)
    ids = np.arange(10)
    columns = batch(x=np.float32(ids), y=ids * 2.0, id=ids, w=np.float32(ids / 2))
    with shard_of(rows, tmp_path, [columns]) as shard:
        for features, labels, weights in shard:
            assert (features[0].shape, weights.shape) == ((len(labels), 2), (len(labels),))
            np.testing.assert_array_equal(weights, labels / 2)
        assert sorted(flat(labels.tolist() for _, labels, _ in shard)) == list(range(10))
