"""The behaviour of every store, and the effect of a prefix on its keys."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from collectives.api import (
    CollectiveTimeoutError,
    InvalidRequestError,
    Store,
)
from collectives.store.memory import MemoryStore, PrefixStore, parse_counter
from tests.collectives.store.wire import in_thread


class TestStore:
    """The behaviour of every store; the same body for each."""

    @pytest.mark.parametrize("key", ["a", "job/rank/0", "//../x", ".", "a b?c=d&e#f%2F", "ключ/鍵/🔑", "x" * 1000])
    @pytest.mark.parametrize("value", [b"", bytes(range(256)), b"\x80\x04N."])
    def test_round_trip(self, store: Store, key: str, value: bytes) -> None:
        store.set(key, value)
        assert store.get(key, 0) == value
        store.delete(key)
        store.delete(key)
        with pytest.raises(CollectiveTimeoutError):
            store.get(key, 0)

    def test_a_key_that_ends_with_a_slash_deletes_all_below_it(self, store: Store) -> None:
        store.set_all(dict.fromkeys(["a/b/1", "a/b/2/3", "a/b", "a/bc/1"], b"value"))
        store.delete("a/b/")
        assert [store.get(key, 0) for key in ("a/b", "a/bc/1")] == [b"value"] * 2
        for key in ("a/b/1", "a/b/2/3"):
            with pytest.raises(CollectiveTimeoutError):
                store.get(key, 0)

    def test_replace(self, store: Store) -> None:
        store.set("key", b"old")
        store.set("key", b"new")
        assert store.get("key", 1) == b"new"

    def test_several_keys_at_once(self, store: Store) -> None:
        store.set("a", b"old")
        store.set_all({"a": b"new", "b/c": b"\x80"})
        assert (store.get("a", 0), store.get("b/c", 0)) == (b"new", b"\x80")
        with pytest.raises(InvalidRequestError, match="1 to 1024"):
            store.set_all({"d": b"1", "": b"2"})
        with pytest.raises(CollectiveTimeoutError):
            store.get("d", 0)

    def test_get_waits_for_a_later_set(self, store: Store) -> None:
        with in_thread(lambda: store.get("late", 30)) as result:
            store.set("other", b"no")
            store.set("late", b"yes")
            assert result() == b"yes"

    def test_timeout_names_key_and_remedy(self, store: Store) -> None:
        with pytest.raises(CollectiveTimeoutError, match=r"absent.*0\.01 s.*raise the timeout"):
            store.get("absent", 0.01)

    def test_counter(self, store: Store) -> None:
        assert [store.add("count", amount) for amount in (5, -7, 0)] == [5, -2, -2]
        assert store.get("count", 0) == b"-2"
        store.set("count", b"40")
        assert store.add("count", 2) == 42

    def test_counters_of_many_threads(self, store: Store) -> None:
        with ThreadPoolExecutor(8) as pool:
            totals = list(pool.map(lambda _: store.add("count", 1), range(200)))
        assert sorted(totals) == list(range(1, 201))

    @pytest.mark.parametrize("value", [b"", b"1.0", b" 1", b"1_0", b"0x1", "٣".encode(), b"9" * 19, b"1" * 5000])
    def test_what_is_no_counter_stays_as_it_is(self, store: Store, value: bytes) -> None:
        store.set("key", value)
        with pytest.raises(InvalidRequestError):
            store.add("key", 1)
        assert store.get("key", 0) == value

    def test_counters_stay_in_64_bits(self, store: Store) -> None:
        assert store.add("count", 2**63 - 1) == 2**63 - 1
        with pytest.raises(InvalidRequestError, match="64-bit"):
            store.add("count", 1)
        assert parse_counter(store.get("count", 0)) == 2**63 - 1

    @pytest.mark.parametrize("key", ["", "a\nb", "a\0", "\x7f", "\x85", "\ud800", "x" * 1025])
    def test_bad_keys(self, store: Store, key: str) -> None:
        for use in (
            lambda: store.set(key, b""),
            lambda: store.get(key, 0),
            lambda: store.add(key, 1),
            lambda: store.delete(key),
        ):
            with pytest.raises(InvalidRequestError, match="key"):
                use()


def test_prefixes_nest_and_separate() -> None:
    inner = MemoryStore()
    PrefixStore(PrefixStore(inner, "a"), "b").set("c", b"1")
    assert inner.peek("a/b/c") == b"1"
    assert PrefixStore(inner, "a/b").get("c", 0) == b"1"
    PrefixStore(inner, "other").delete("c")
    assert inner.peek("a/b/c") == b"1"
