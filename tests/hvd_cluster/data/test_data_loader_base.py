"""Data loaders that work ahead: order, bounds, errors, and that no thread is left; see the fixture of all tests."""

import gc
import itertools
import logging
import subprocess
import sys
import threading

import pytest

from hvd_cluster.data import AsyncDataLoaderMixin, BaseDataLoader
from hvd_cluster.data.prefetch import Prefetch

PATIENCE = 10


class Loader(BaseDataLoader):
    """The given batches; remembers how many it made, and whether it came to the end of its pass."""

    def __init__(self, batches):
        self.batches = batches
        self.made = 0
        self.full = threading.Event()
        self.ended = threading.Event()
        self.process_thread = None

    def _iterate(self):
        try:
            for batch in self.batches:
                self.made += 1
                if self.made == getattr(self, "async_loader_queue_size", 0) + 1:
                    self.full.set()
                yield batch
        finally:
            self.ended.set()

    def _process_batch(self, batch):
        self.process_thread = threading.current_thread()
        return batch * 10


class AsyncLoader(AsyncDataLoaderMixin, Loader):
    pass


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "hvd-data-loader"]


@pytest.mark.parametrize("size", [0, 1, 3, 64])
def test_batches_come_in_order_in_every_pass(size):
    loader = AsyncLoader(size, batches=[1, 2, 3, 4])
    for _ in range(2):
        assert list(loader) == [10, 20, 30, 40]
        assert not threads()
    assert loader.process_thread is threading.current_thread()


def test_without_the_mixin():
    assert list(Loader([1, 2])) == [10, 20]


def test_it_works_ahead_and_no_further_than_asked():
    loader = AsyncLoader(3, batches=itertools.count(1))
    batches = iter(loader)
    assert next(batches) == 10
    assert loader.full.wait(PATIENCE)  # three wait, or two and one on its way to the consumer
    assert loader.made <= 5  # one was taken, three wait, one is in hand
    loader.close_async_loader()


def test_without_a_queue_there_is_no_thread():
    loader = AsyncLoader(0, batches=[1, 2])
    batches = iter(loader)
    assert next(batches) == 10
    assert loader.made == 1
    assert not threads()
    loader.close_async_loader()
    assert next(batches) == 20


@pytest.mark.parametrize("size", [0, 1, 64])
def test_an_error_comes_behind_the_batches_before_it(size):
    def fail():
        yield from [1, 2]
        raise OSError("the disk is gone")

    batches = iter(AsyncLoader(size, batches=fail()))
    assert [next(batches), next(batches)] == [10, 20]
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    assert list(batches) == []


def test_closing_ends_a_thread_that_waits_for_room():
    loader = AsyncLoader(2, batches=itertools.count())
    batches = iter(loader)
    next(batches)
    assert loader.full.wait(PATIENCE)
    loader.close_async_loader()
    assert not threads()
    assert loader.ended.is_set()
    assert list(batches) == []
    loader.close_async_loader()
    assert next(iter(loader)) == 30  # another pass


def test_closing_ends_the_wait_for_a_batch():
    gate, wanted = threading.Event(), threading.Event()

    def slow():
        wanted.set()
        assert gate.wait(PATIENCE)
        yield 1

    prefetch = Prefetch(slow, 1)
    assert wanted.wait(PATIENCE)
    consumer = threading.Thread(target=lambda: next(prefetch, None))
    closer = threading.Thread(target=prefetch.close)
    consumer.start()
    closer.start()
    consumer.join(PATIENCE)
    assert not consumer.is_alive()
    gate.set()
    closer.join(PATIENCE)
    assert not threads()


def test_leaving_the_loop_leaves_no_thread():
    loader = AsyncLoader(2, batches=itertools.count())
    for _ in loader:
        break
    assert not threads()


def test_an_error_in_the_loop_leaves_no_thread():
    def train():
        for _ in AsyncLoader(2, batches=itertools.count()):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        train()
    gc.collect()
    assert not threads()


def test_two_passes_at_once():
    loader = AsyncLoader(2, batches=[1, 2, 3])
    assert list(zip(loader, loader, strict=True)) == [(10, 10), (20, 20), (30, 30)]


def test_a_pass_that_its_own_thread_gives_up():
    """As garbage collection may do."""
    known, prefetch = threading.Event(), []

    def items():
        assert known.wait(PATIENCE)
        prefetch[0].close()
        yield 1

    prefetch.append(Prefetch(items, 1))
    known.set()
    assert list(prefetch[0]) == []
    prefetch[0].close()


@pytest.mark.parametrize("size", [-1, None, 2.0])
def test_a_size_that_cannot_be_meant(size):
    with pytest.raises(ValueError, match="async_loader_queue_size="):
        AsyncLoader(size, batches=[])


def test_passes_can_be_logged(caplog):
    with caplog.at_level(logging.INFO, logger="hvd_cluster.data"):
        list(AsyncLoader(1, batches=[1, 2]))
        list(AsyncLoader(1, True, batches=[1, 2]))
    assert caplog.messages == ["AsyncLoader: 2 batches were taken"]


LEFT_OPEN = """
import itertools
import torch
from hvd_cluster.data import AsyncDataLoaderMixin, BaseDataLoader

class Loader(AsyncDataLoaderMixin, BaseDataLoader):
    def _iterate(self):
        return (large @ large for _ in itertools.count())

large = torch.ones(1000, 1000)  # so that another one is in the making when the program ends
batches = iter(Loader(100))
next(batches)
"""


def test_a_pass_that_is_open_at_the_end_of_the_program():
    command = [sys.executable, "-c", LEFT_OPEN]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
