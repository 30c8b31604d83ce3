"""Bad inputs from good ones, as AFL makes them: bits, blocks, numbers at their limits, pieces of another input."""

import random
from collections.abc import Callable, Sequence

MOST_BYTES = 1 << 16
MOST_CHANGES = 6
LIMITS = [
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    (1 << 63) - 1,
    (1 << 64) - 1,
]
WORDS = [
    *(bytes([each]) for each in (*range(0xC0, 0xE0), 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF)),  # msgpack: kinds and lengths
    *(b'"', b"{", b"}", b"[", b"]", b",", b":", b"null", b"NaN", b"-1", b"1e999", b"9" * 30, b"[" * 2000, b"\\ud800"),
    *(b"\r\n", b"\r\n\r\n", b"Content-Length: -1", b"Transfer-Encoding: chunked", b"GET ", b"%00", b"..", b"/", b"\0"),
    *(b"\xff\xfe", b"\xed\xa0\x80", "é".encode(), b"&a [*a, *a]", b"!!python/object:os.system", b"\t", b"#", b"="),
]


def position(rng: random.Random, data: bytearray) -> int:
    return rng.randrange(len(data) + 1)


def flip(rng: random.Random, data: bytearray, other: bytes) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def replace_byte(rng: random.Random, data: bytearray, other: bytes) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.randrange(256)


def cut(rng: random.Random, data: bytearray, other: bytes) -> None:
    del data[position(rng, data) :]


def remove(rng: random.Random, data: bytearray, other: bytes) -> None:
    first = position(rng, data)
    del data[first : first + rng.choice([1, 2, 4, 16, 256])]


def repeat(rng: random.Random, data: bytearray, other: bytes) -> None:
    first = position(rng, data)
    data[first:first] = data[first : first + rng.choice([1, 4, 32, 1024])] * rng.choice([1, 2, 50])


def splice(rng: random.Random, data: bytearray, other: bytes) -> None:
    first = rng.randrange(len(other) + 1)
    data[position(rng, data) :] = other[first:]


def put_word(rng: random.Random, data: bytearray, other: bytes) -> None:
    first, word = position(rng, data), rng.choice(WORDS)
    data[first : first + rng.choice([0, len(word)])] = word


def put_limit(rng: random.Random, data: bytearray, other: bytes) -> None:
    size, first = rng.choice([1, 2, 4, 8]), position(rng, data)
    data[first : first + size] = (rng.choice(LIMITS) % (1 << 8 * size)).to_bytes(size, rng.choice(["big", "little"]))


def put_noise(rng: random.Random, data: bytearray, other: bytes) -> None:
    first = position(rng, data)
    data[first:first] = rng.randbytes(rng.choice([1, 3, 8, 100]))


CHANGES: Sequence[Callable[[random.Random, bytearray, bytes], None]] = (
    flip,
    flip,
    replace_byte,
    cut,
    remove,
    repeat,
    splice,
    put_word,
    put_word,
    put_limit,
    put_noise,
)


def mutated(rng: random.Random, inputs: Sequence[bytes]) -> bytes:
    """One of the ``inputs`` with up to MOST_CHANGES changes."""
    data = bytearray(rng.choice(inputs))
    for _ in range(rng.randint(1, MOST_CHANGES)):
        rng.choice(CHANGES)(rng, data, rng.choice(inputs))
    return bytes(data[:MOST_BYTES])
