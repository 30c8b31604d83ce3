"""The wire form of control messages."""

import zlib
from contextlib import suppress

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.api import DType, EngineError, Operation, Parameters, ReduceOp, Request
from collectives.controller.errors import ErrorData
from collectives.controller.messages import (
    COMPRESSED,
    Abort,
    Leave,
    Left,
    Ready,
    Refuse,
    Rejection,
    Response,
    Run,
    Stop,
    Together,
    Unknown,
    WaitReport,
    Waits,
    decode,
    encode,
)

ids = st.integers(0, 1 << 40)
parameters = st.builds(
    Parameters,
    fusion_threshold=ids,
    cycle_time=st.floats(0, 1000),
    patient=st.booleans(),
    pipeline_piece=st.integers(1, 1 << 40),
    version=ids,
)
id_lists = st.lists(ids, max_size=4).map(tuple)
texts = st.text(max_size=20)
lengths = st.lists(st.integers(0, 1 << 40), max_size=4).map(tuple)
factors = st.floats(allow_nan=False)
requests = st.builds(
    Request,
    name=texts,
    operation=st.sampled_from(Operation),
    dtype=st.sampled_from(DType),
    shape=lengths,
    op=st.sampled_from(ReduceOp),
    root_rank=st.integers(-1, 1000),
    prescale_factor=factors,
    postscale_factor=factors,
    process_set=st.integers(0, 1000),
    splits=lengths,
    device=st.sampled_from(["cpu", "cuda"]),
    tag=st.integers(0, 1 << 62),
)
request_lists = st.lists(requests, max_size=3).map(tuple)
responses = st.lists(st.builds(Response, ids, requests, lengths), max_size=3).map(tuple)
keys = st.lists(st.tuples(st.integers(0, 1000), texts), max_size=3).map(tuple)
rejections = st.lists(st.builds(Rejection, st.integers(0, 1000), texts, texts, texts), max_size=2).map(tuple)
messages = st.one_of(
    st.builds(Ready, request_lists, id_lists, keys, id_lists, id_lists, rejections),
    st.builds(Together, id_lists, id_lists, id_lists, request_lists, keys),
    st.builds(
        Run, st.lists(id_lists, max_size=3).map(tuple), responses, id_lists, st.booleans(), ids, st.none() | parameters
    ),
    st.builds(
        Refuse, st.integers(0, 1000), texts, texts, texts, st.lists(st.tuples(st.integers(0, 9), texts)).map(tuple)
    ),
    st.builds(Unknown, id_lists),
    st.builds(Stop, st.integers(0, 1000), cause=texts),
    st.builds(Leave, texts),
    st.builds(Abort, st.builds(ErrorData, texts, texts, id_lists)),
    st.builds(
        WaitReport,
        factors,
        st.lists(st.builds(Waits, st.integers(0, 9), factors, factors, ids), max_size=3).map(tuple),
        factors,
    ),
    st.just(Left()),
)


@given(messages)
def test_what_is_sent_is_what_arrives(message):
    assert decode(encode(message)) == message


@given(st.binary(max_size=60))
def test_garbage_is_refused(data):
    _decode_or_refuse(data)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 63) | st.floats() | texts | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=15,
)


@given(
    plain | st.lists(plain, min_size=1, max_size=5).flatmap(lambda rest: st.integers(-2, 9).map(lambda t: [t, *rest]))
)
def test_packed_garbage_is_refused(value):
    _decode_or_refuse(msgpack.packb(value))


@given(messages, st.data())
def test_a_damaged_message_is_refused_or_another_message(message, data):
    sent = encode(message)
    cut = data.draw(st.integers(0, len(sent) - 1))
    _decode_or_refuse(sent[:cut] + data.draw(st.binary(max_size=3)) + sent[cut + 1 :])


def _decode_or_refuse(data):
    with suppress(EngineError):
        decode(data)


@pytest.mark.parametrize(
    "value", [None, 7, [], {}, [99], [-1, "kind", "text"], ["0"], [6, "more"], [0, [["too", "short"]], [], [], []]]
)
def test_what_is_no_message_is_refused(value):
    with pytest.raises(EngineError, match=r"a control message of \d+ bytes cannot be read"):
        decode(msgpack.packb(value))


def test_a_long_message_is_compressed():
    adding = Request("process_set.add", Operation.ADD_PROCESS_SET, splits=tuple(range(500)))
    offers = tuple(b"the address of rank %d, on a port of its own: " % rank * 10 for rank in range(500))
    message = Run(((7,),), (Response(7, adding, (1,), offers),))
    data = encode(message)
    assert len(data) < sum(map(len, offers)) / 5
    assert decode(data) == message
    with pytest.raises(EngineError, match="cannot be read"):
        decode(data[:-4] + b"0000")


def test_equal_requests_are_one_object_unless_they_are_long():
    def decoded(splits):
        return decode(encode(Ready((Request("x", Operation.ALLTOALL, DType.FLOAT32, (4, 2), splits=splits),)))).requests

    short, long = (2, 2), (1000,) * 512
    assert decoded(short)[0] is decoded(short)[0]
    assert decoded(long)[0] is not decoded(long)[0]
    assert decoded(long) == decoded(long)


@pytest.mark.parametrize("ranks", [range(0, 10_000, 2), range(64), (7, 3, *range(100, 200))])
def test_the_ranks_of_a_large_set_are_few_bytes_and_one_object(ranks):
    def decoded(offer):
        adding = Request("add", Operation.ADD_PROCESS_SET, splits=tuple(ranks), offer=offer)
        data = encode(Ready((adding,)))
        assert len(data) < 300
        (found,) = decode(data).requests
        assert found == adding
        return found.splits

    assert decoded(b"here") == decoded(b"there") == tuple(ranks)
    assert len(ranks) <= 64 or decoded(b"here") is decoded(b"there")


def test_compressed_messages_are_not_nested_and_have_a_limit(monkeypatch):
    message = Ready(tuple(Request(f"name {number}", Operation.ALLREDUCE, DType.FLOAT32) for number in range(9999)))
    data = encode(message)
    assert decode(data) == message
    with pytest.raises(EngineError, match="cannot be read"):
        decode(msgpack.packb((COMPRESSED, zlib.compress(data))))
    monkeypatch.setattr("collectives.controller.messages.LARGEST", len(data))
    with pytest.raises(EngineError, match=f"of more than {len(data)} bytes"):
        decode(data)


def test_a_steady_step_is_small():
    names = tuple(range(100, 164))
    assert len(encode(Ready(ids=names, urgent_ids=names[-1:]))) < 2 * len(names)
    assert len(encode(Run((names,)))) < 2 * len(names)
