"""A shard in torch's DataLoader: each batch once an epoch, in the order in which the shard alone gives them."""

import gc
import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from row_feeds import NUMBERED, batch, feed_of, inherited, never, numbered, opened, rows_of, shard_of

from executors.api import ExecutorError
from hvd_cluster.spark.rows import order
from hvd_cluster.spark.rows.torch_data_loader import epoch_of_last
from tests.doc_blocks import blocks, execute

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader, IterableDataset  # noqa: E402

pytestmark = [
    pytest.mark.leaves("processes"),  # multiprocessing's resource tracker
    pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes"),  # on two cores
]

PATIENCE = 60


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(order, "WINDOW_BYTES", 512)
    monkeypatch.setattr(order, "CHUNK_BYTES", 64)


def ids_of(loader):
    return [labels.tolist() for _, labels in loader]


def epochs_of(loader, count=3):
    return [ids_of(loader) for _ in range(count)]


@pytest.fixture(params=["in order", "shuffle"])
def rows(request):
    return rows_of(NUMBERED, "id", batch_size=7, shuffle=request.param == "shuffle")


@pytest.fixture
def expected(rows, tmp_path):
    with shard_of(rows, tmp_path, numbered(50, 60)) as shard:
        epochs = epochs_of(shard)
    assert all(sorted(itertools.chain(*epoch)) == list(range(110)) for epoch in epochs)
    return epochs


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_batches_are_those_of_the_shard_alone(rows, expected, tmp_path, workers):
    with shard_of(rows, tmp_path, numbered(50, 60)) as shard:
        assert isinstance(shard, IterableDataset)
        loader = DataLoader(shard, num_workers=workers)
        assert epochs_of(loader) == expected
        assert len(loader) == len(expected[0])


def test_workers_that_stay(rows, expected, tmp_path):
    with shard_of(rows, tmp_path, numbered(50, 60)) as shard:
        loader = DataLoader(shard, num_workers=2, persistent_workers=True)
        assert epochs_of(loader) == expected
        del loader


def test_spawned_workers(tmp_path):
    with shard_of(rows_of(NUMBERED, "id", batch_size=7), tmp_path, numbered(50, 60)) as shard:
        found = ids_of(DataLoader(shard, num_workers=2, multiprocessing_context="spawn"))
    assert list(itertools.chain(*found)) == list(range(110))


def test_loaders_and_loops_count_their_epochs_together(tmp_path):
    shuffled = rows_of(NUMBERED, "id", batch_size=7, shuffle=True)
    with shard_of(shuffled, tmp_path, numbered(110)) as shard:
        usual = epochs_of(shard, 4)
    with shard_of(shuffled, tmp_path, numbered(110)) as shard:
        found = [ids_of(shard), ids_of(DataLoader(shard, num_workers=2)), ids_of(shard.torch())]
        found.append(ids_of(DataLoader(shard.torch(), num_workers=2)))
    assert found == usual
    assert len({str(epoch) for epoch in found}) == 4


@pytest.mark.parametrize("size", [1, None])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_tensors_of_the_size_of_the_shard(tmp_path, workers, size):
    with shard_of(rows_of(NUMBERED, "id"), tmp_path, numbered(10)) as shard:
        for loader in (shard, shard.torch()):
            features, labels = next(iter(DataLoader(loader, batch_size=size, num_workers=workers)))
            assert (features.shape, labels.shape) == ((4, 2), (4,))
            assert (features.dtype, labels.dtype) == (torch.float64, torch.int64)


def test_a_batch_size_of_the_loader_is_refused(tmp_path):
    text = "asked for batches of 3 elements, but a shard already gives batches: give batch_size to run_on_dataframe"
    with shard_of(rows_of(NUMBERED, "id"), tmp_path, numbered(20)) as shard, pytest.raises(ValueError, match=text):
        next(iter(DataLoader(shard, batch_size=3)))


def test_rows_that_come_while_workers_wait(tmp_path):
    """Two readers of the same stream; what one has seen is not lost to the other."""
    first_batches = threading.Event()

    def slowly():
        yield from numbered(20)
        assert first_batches.wait(PATIENCE)
        for ids in np.arange(20, 400).reshape(-1, 5):
            yield batch(x=ids.astype(np.float32), y=ids * 2.0, id=ids)

    with opened(rows_of(NUMBERED, "id", batch_size=7), tmp_path) as (feed, shard):
        thread = threading.Thread(target=feed.feed, args=(slowly(), never))
        batches = iter(DataLoader(shard, num_workers=3))  # forks before there is a thread
        thread.start()
        found = [next(batches)[1].tolist() for _ in range(2)]
        first_batches.set()
        found += ids_of(batches)
        thread.join(PATIENCE)
    assert list(itertools.chain(*found)) == list(range(400))


def test_a_forked_child_that_is_killed_while_it_waits_keeps_nothing_from_others(tmp_path):
    with opened(rows_of(NUMBERED, "id", batch_size=7), tmp_path) as (feed, shard):
        child = os.fork()
        if child == 0:
            list(shard)
            os._exit(1)
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        feed.feed(numbered(50, 60), never)
        assert list(itertools.chain(*ids_of(shard))) == list(range(110))


def test_an_epoch_that_was_left_early_is_one_epoch(tmp_path):
    shuffled = rows_of(NUMBERED, "id", batch_size=7, shuffle=True)
    with shard_of(shuffled, tmp_path, numbered(110)) as shard:
        usual = epochs_of(shard, 2)
    with shard_of(shuffled, tmp_path, numbered(110)) as shard:
        loader = iter(DataLoader(shard, num_workers=2, prefetch_factor=1))
        assert next(loader)[1].tolist() == usual[0][0]
        del loader
        assert ids_of(shard) == usual[1]


def test_the_end_of_the_task_ends_the_workers(tmp_path):
    stopped = iter([False, True])
    with ExitStack() as task:
        feed = task.enter_context(feed_of(rows_of(NUMBERED, "id"), tmp_path))
        with inherited(feed), rows_of(NUMBERED, "id").shard(0) as shard:
            feed.feed(numbered(10, 10), lambda: next(stopped))
            task.close()
            # Spawned, because forked ones would have the end of the task that is in this process here.
            batches = iter(DataLoader(shard, num_workers=2, multiprocessing_context="spawn"))
            assert [next(batches)[1].tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
            with pytest.raises(ExecutorError, match="ended before the last row"):
                next(batches)
            del batches
    gc.collect()  # of what the error holds


def test_no_row_at_all(tmp_path):
    with shard_of(rows_of(NUMBERED, "id", shuffle=True), tmp_path, numbered(0)) as shard:
        assert ids_of(DataLoader(shard, num_workers=2)) == []


def test_fewer_batches_than_workers(tmp_path, rows):
    with shard_of(rows, tmp_path, numbered(5)) as shard:
        assert [sorted(ids) for ids in ids_of(DataLoader(shard, num_workers=3))] == [[0, 1, 2, 3, 4]]


def test_a_shard_is_of_its_process(tmp_path):
    text = "its rows are in open files of this process"
    with shard_of(rows_of(NUMBERED, "id"), tmp_path, numbered(5)) as shard, pytest.raises(TypeError, match=text):
        pickle.dumps(shard)


def test_epochs_of_workers():
    """A plain loop, then two workers for two epochs, then a new loader with the same seed."""
    records = [(5, 0), (9, 1), (9, 0), (9, 0), (7, 0), (9, 1), (9, 0), (9, 1)]
    numbers = [epoch_of_last(records[:end], records[end - 1]) for end in range(1, len(records) + 1)]
    assert numbers == [0, 1, 1, 2, 3, 2, 4, 4]


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import hvd_cluster.spark
from hvd_cluster.spark.rows.batches import Shard
from hvd_cluster.spark.rows.torch_data_loader import current_worker, introduce
introduce(Shard)
assert current_worker().count == 1
"""


def test_a_shard_needs_no_torch():
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("block", blocks("shard"), ids=lambda block: block.name)
def test_a_block_of_the_docs(tmp_path, block, capsys):
    with shard_of(rows_of(NUMBERED, "id"), tmp_path, numbered(10)) as shard:
        execute(block, shard=shard, torch=torch)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"torch.Size([{count}, 2]) torch.Size([{count}])" for count in (4, 4, 2)] * 2
