"""What workers send to their driver: each value is taken once."""

import pytest

from collectives.store.memory import MemoryStore
from executors.job import job
from executors.job.job import Inbox


@pytest.fixture
def store():
    return MemoryStore()


def test_a_value_that_was_taken_is_not_in_the_store_and_does_not_come_again(store):
    box = Inbox(store)
    for expected in (b"1", None):
        store.set("a", b"1")
        assert box.take("a") == expected
        assert store.peek("a") is None
    assert box.take("a") is None


def test_it_forgets_old_keys(store, monkeypatch):
    monkeypatch.setattr(job, "REMEMBERED_KEYS", 2)
    box = Inbox(store)
    for key in "abc":
        store.set(key, b"1")
        box.take(key)
    for key in "cba":
        store.set(key, b"2")
    assert [box.take(key) for key in "cba"] == [None, None, b"2"]
