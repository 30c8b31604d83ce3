"""Frames of an authenticated connection: only genuine ones, each once, in their order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.net.frames import LENGTH, Frames, Opener, Sealer, digest, frame, keys

SECRET = b"s" * 32
AGENT, DRIVER = keys(SECRET, b"a" * 32, b"d" * 32)


def frames(key=AGENT):
    sealer = Sealer(key)
    return sealer.seal(b"one"), sealer.seal(b"two")


def test_frames_arrive_in_any_pieces():
    data = b"".join(frames())
    opener = Opener(AGENT)
    assert [content for i in range(len(data)) for content in opener.feed(data[i : i + 1])] == [b"one", b"two"]


def test_a_frame_may_be_empty():
    assert list(Opener(AGENT).feed(Sealer(AGENT).seal(b""))) == [b""]


@pytest.mark.parametrize("key", [DRIVER, *keys(b"t" * 32, b"a" * 32, b"d" * 32)])
def test_frames_of_the_other_side_or_another_job_are_refused(key):
    with pytest.raises(PermissionError, match="does not know the secret"):
        list(Opener(AGENT).feed(frames(key)[0]))


def test_each_connection_has_keys_of_its_own():
    keys_of_all = {*keys(SECRET, b"a" * 32, b"e" * 32), *keys(SECRET, b"b" * 32, b"d" * 32), AGENT, DRIVER}
    assert len(keys_of_all) == 6


@pytest.mark.parametrize("order", [(1,), (0, 0), (1, 0)])
def test_frames_that_are_dropped_repeated_or_swapped_are_refused(order):
    opener, sent = Opener(AGENT), frames()
    with pytest.raises(PermissionError):
        [list(opener.feed(sent[place])) for place in order]


def test_a_changed_byte_is_noticed():
    data = bytearray(frames()[0])
    data[-1] ^= 1
    with pytest.raises(PermissionError):
        list(Opener(AGENT).feed(bytes(data)))


@given(st.lists(st.binary(max_size=30)), st.lists(st.integers(0, 200)))
def test_frames_in_any_pieces(contents, ends):
    data, frames, found, start = b"".join(map(frame, contents)), Frames(), [], 0
    for end in sorted({*ends, len(data)}):
        found += frames.feed(data[start:end])
        start = max(start, end)
    assert found == contents
    assert frames.missing == len(LENGTH.pack(0))


def test_a_frame_that_is_too_long_is_refused_by_its_length():
    assert Frames(10).feed(frame(bytes(10))) == [bytes(10)]
    frames = Frames(10)
    with pytest.raises(PermissionError, match="a frame of 11 bytes is refused; at most 10 are allowed"):
        [frames.feed(bytes([byte])) for byte in LENGTH.pack(11)]


def test_no_two_lists_of_fields_have_one_digest():
    lists = [(b"ab", b"c"), (b"a", b"bc"), (b"abc",), (b"abc", b"")]
    assert len({digest(SECRET, *fields) for fields in lists}) == len(lists)
    assert digest(b"k", b"a") != digest(b"k\0", b"a")
