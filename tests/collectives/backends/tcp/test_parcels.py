"""The messages of a member to all others, packed and unpacked again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from collectives.backends.tcp.star import EACH, SAME, Parcel, pack

MESSAGES = st.dictionaries(st.integers(0, 5), st.lists(st.binary(min_size=1, max_size=9), max_size=3))


def passed_on(messages: dict[int, list[memoryview]], position: int) -> tuple[int, dict[int, bytes]]:
    form, parts = pack(messages, 6, position)
    parcel = Parcel(form, memoryview(b"".join(parts)), 6)
    return form, {other: bytes(parcel.to(other)) for other in range(6) if other != position}


@given(MESSAGES, st.integers(0, 5))
def test_each_member_gets_the_message_to_it(messages: dict[int, list[bytes]], position: int) -> None:
    messages.pop(position, None)
    views = {other: list(map(memoryview, parts)) for other, parts in messages.items()}
    expected = {other: b"".join(messages.get(other, ())) for other in range(6) if other != position}
    assert passed_on(views, position) == (EACH, expected)


def test_one_message_to_all_is_sent_once() -> None:
    views = [memoryview(b"one"), memoryview(b"two")]
    assert pack(dict.fromkeys([0, 1, 3, 4, 5], views), 6, 2) == (SAME, views)
    form, found = passed_on(dict.fromkeys([0, 1, 3, 4, 5], views), 2)
    assert (form, found) == (SAME, dict.fromkeys([0, 1, 3, 4, 5], b"onetwo"))
