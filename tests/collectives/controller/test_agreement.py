"""Mistakes that one rank can find alone, and mistakes that only all ranks together show."""

import random
from dataclasses import replace

import numpy as np
import pytest

from collectives.api import DType, InvalidRequestError, Operation, ReduceOp, Request
from collectives.controller.agreement import check_member, checked, disagreement, sizes
from collectives.controller.messages import Ready, decode, encode

REDUCE = Request("t", Operation.ALLREDUCE, DType.FLOAT32, (4, 2))
SCATTER = replace(REDUCE, operation=Operation.REDUCESCATTER)
GATHER = replace(REDUCE, operation=Operation.ALLGATHER)
BROADCAST = replace(REDUCE, operation=Operation.BROADCAST, root_rank=2)
EXCHANGE = replace(REDUCE, operation=Operation.ALLTOALL, splits=(1, 2, 1))
BARRIER = Request("t", Operation.BARRIER)
MEMBERS = (1, 2, 3)

GOOD = [
    REDUCE,
    SCATTER,
    GATHER,
    BROADCAST,
    EXCHANGE,
    BARRIER,
    replace(REDUCE, op=ReduceOp.PRODUCT, prescale_factor=0.5),
    replace(REDUCE, dtype=DType.BOOL, op=ReduceOp.MAX),
    replace(SCATTER, op=ReduceOp.AVERAGE),
    replace(SCATTER, splits=(0, 4, 0)),
    replace(GATHER, dtype=DType.BOOL),
    replace(GATHER, dtype=DType.COMPLEX64),
    replace(SCATTER, dtype=DType.COMPLEX128, op=ReduceOp.AVERAGE, prescale_factor=0.5),
    replace(EXCHANGE, splits=(0, 0, 0)),
    replace(EXCHANGE, splits=(0, 4, 0)),
]

BAD = [
    (replace(BROADCAST, root_rank=0), r"root rank 0 is not in the process set; choose one of \[1, 2, 3\]"),
    (replace(BROADCAST, root_rank=-1), "root rank -1"),
    (replace(EXCHANGE, splits=()), "without splits, 3 ranks must be able to share the 4 rows of the tensor evenly"),
    (replace(EXCHANGE, splits=(1, 1, 1, 1)), "splits has 4 entries, but must have 3, one for each rank"),
    (replace(EXCHANGE, splits=(1.0, 2.0, 1.0)), r"splits \(1.0, 2.0, 1.0\) must consist of integers"),
    (replace(EXCHANGE, splits=("1", 2, 1)), "splits .* must consist of integers"),
    (replace(BROADCAST, root_rank="2"), "root rank .* must consist of integers"),
    (replace(BROADCAST, root_rank=2.0), "root rank .* must consist of integers"),
    (replace(REDUCE, shape=(4, 2.5)), r"shape \(4, 2.5\) must consist of integers"),
    (replace(REDUCE, process_set=0.0), r"process set \(0.0,\) must consist of integers"),
    (replace(REDUCE, prescale_factor="2"), r"the scale factors \('2', 1.0\) must be real numbers"),
    (replace(REDUCE, postscale_factor=np.float32("nan")), "a scale factor of nan is not allowed"),
    (replace(EXCHANGE, splits=(1, -1, 1)), r"splits \[1, -1, 1\] must be non-negative"),
    (replace(EXCHANGE, splits=(2, 2, 1)), "add up to at most the 4 rows"),
    (replace(SCATTER, splits=(2, 2)), "splits has 2 entries, but must have 3, one for each rank"),
    (replace(SCATTER, splits=(2, 2, 1)), "add up to at most the 4 rows"),
    (replace(SCATTER, splits=(2, 1, 0)), r"splits \[2, 1, 0\] must add up to the 4 rows of the tensor"),
    (replace(SCATTER, splits=(2, 1.0, 1)), "splits .* must consist of integers"),
    (replace(REDUCE, dtype=DType.BOOL, op=ReduceOp.AVERAGE), "bool tensors cannot be averaged or scaled"),
    (replace(SCATTER, dtype=DType.BOOL, prescale_factor=2.0), "convert to float32"),
    (replace(REDUCE, dtype=DType.BOOL, postscale_factor=2.0), "convert to float32"),
    (replace(REDUCE, op=ReduceOp.ADASUM), "op Adasum needs a power of two of ranks, not 3; use Average"),
    (replace(REDUCE, op=ReduceOp.ADASUM, dtype=DType.INT32), "op Adasum needs floats, not int32; convert"),
    (replace(SCATTER, op=ReduceOp.MIN), "op Min is not available; use Average or Sum"),
    (replace(REDUCE, op=ReduceOp.MIN, dtype=DType.COMPLEX64), "op Min is not defined for complex64; use Average or"),
    (replace(REDUCE, op=ReduceOp.PRODUCT, dtype=DType.COMPLEX128), "op Product is not defined for complex128"),
    (replace(REDUCE, op=ReduceOp.ADASUM, dtype=DType.COMPLEX64), "op Adasum is not defined for complex64"),
    (replace(SCATTER, shape=()), r"it needs at least one dimension; reshape the scalar to \(1,\)"),
]


@pytest.mark.parametrize("request_", GOOD, ids=lambda request: f"{request.operation.value}-{request.op.name}")
def test_what_may_be_submitted(request_):
    for rank in MEMBERS:
        check_member(request_, rank, MEMBERS)
        assert checked(request_, MEMBERS) == request_


@pytest.mark.parametrize(("request_", "says"), BAD)
def test_what_is_wrong_whatever_the_others_say(request_, says):
    with pytest.raises(InvalidRequestError, match=says) as caught:
        checked(request_, MEMBERS)
    assert str(caught.value).startswith(f"{request_.operation.value} 't': ")


def test_numbers_of_numpy_become_plain():
    plain = replace(EXCHANGE, process_set=3), replace(BROADCAST, root_rank=2), replace(REDUCE, prescale_factor=0.5)
    arrays = (
        replace(EXCHANGE, process_set=np.int64(3), splits=np.array([1, 2, 1]), shape=(np.int64(4), np.uint8(2))),
        replace(BROADCAST, root_rank=np.int32(2)),
        replace(REDUCE, prescale_factor=np.float32(0.5), postscale_factor=1),
    )
    for request, expected in zip(arrays, plain, strict=True):
        normal = checked(request, MEMBERS)
        assert normal == expected
        assert decode(encode(Ready((normal,)))) == Ready((expected,))


def test_equal_shares_are_what_an_alltoall_without_splits_means():
    assert checked(replace(EXCHANGE, shape=(6, 2), splits=()), MEMBERS).splits == (2, 2, 2)


def test_a_checked_alltoall_is_not_made_anew():
    """The engine knows repeated calls by the identity of the checked request."""
    request = checked(replace(EXCHANGE, shape=(6, 2), splits=()), MEMBERS)
    assert checked(request, MEMBERS) is request


@pytest.mark.parametrize("name", ["\ud800", "a\udfffb", "\u00e4\ud800"])
def test_a_name_that_cannot_be_sent(name):
    with pytest.raises(InvalidRequestError, match=r"the name '.*' cannot be sent .*surrogates not allowed at position"):
        check_member(replace(REDUCE, name=name), 1, MEMBERS)


def test_a_name_has_an_end():
    check_member(replace(REDUCE, name="\U0001f600" * (1 << 15)), 1, MEMBERS)
    with pytest.raises(
        InvalidRequestError, match=r"a name of 32769 characters, 'nnn.*'\.\.\., is too long; at most 32768"
    ):
        check_member(replace(REDUCE, name="n" * ((1 << 15) + 1)), 1, MEMBERS)


def test_only_members_may_submit():
    with pytest.raises(InvalidRequestError, match=r"Rank 0 is not a member .* Set 7 has the ranks \[1, 2, 3\]"):
        check_member(replace(REDUCE, process_set=7), 0, MEMBERS)


def test_equal_requests_agree():
    for request in GOOD:
        assert disagreement(dict.fromkeys(MEMBERS, request), MEMBERS) is None


@pytest.mark.parametrize("request_", [GATHER, EXCHANGE], ids=["allgather", "alltoall"])
def test_the_number_of_rows_may_differ_the_rest_may_not(request_):
    others = dict.fromkeys((1, 2), request_)
    assert disagreement(others | {3: replace(request_, shape=(9, 2))}, MEMBERS) is None
    assert disagreement(others | {3: replace(request_, shape=(0, 2))}, MEMBERS) is None
    for shape in ((4, 3), (4, 2, 1), (4,), ()):
        text = disagreement(others | {3: replace(request_, shape=shape)}, MEMBERS).text
        assert "disagree about the shape" in text
        assert "('any', 2) on ranks 1, 2" in text


@pytest.mark.parametrize("request_", [GATHER, replace(EXCHANGE, splits=(0, 0, 0))], ids=["allgather", "alltoall"])
def test_scalars_are_refused_on_all_ranks(request_):
    scalar = replace(request_, shape=())
    checked(scalar, MEMBERS)
    text = disagreement(dict.fromkeys(MEMBERS, scalar), MEMBERS).text
    assert text == f"tensor 't': {scalar.operation.value}: it needs at least one dimension; reshape the scalar to (1,)"
    found = disagreement({1: scalar, 2: request_, 3: request_}, MEMBERS)
    assert "shape: () on rank 1; ('any', 2) on ranks 2, 3" in found.text
    assert (found.property, found.values) == ("shape", ((1, "()"), (2, "('any', 2)"), (3, "('any', 2)")))


def test_ops_are_called_as_users_call_them():
    text = disagreement({0: REDUCE, 1: replace(REDUCE, op=ReduceOp.AVERAGE)}, MEMBERS).text
    assert "disagree about the op: Sum on rank 0; Average on rank 1." in text


def test_the_text_does_not_depend_on_the_order_of_arrival():
    said = {rank: replace(REDUCE, dtype=dtype) for rank, dtype in enumerate((DType.INT8, DType.BOOL, DType.INT8))}
    texts = set()
    for seed in range(10):
        ranks = list(said)
        random.Random(seed).shuffle(ranks)
        texts.add(disagreement({rank: said[rank] for rank in ranks}, MEMBERS).text)
    assert texts == {
        "tensor 't': the ranks disagree about the dtype: int8 on ranks 0, 2; bool on rank 1. "
        "Submit the same dtype under this name on every rank"
    }


def test_all_ranks_of_a_reducescatter_give_the_same_splits():
    said = {1: replace(SCATTER, splits=(2, 2, 0)), 2: replace(SCATTER, splits=(2, 2, 0)), 3: SCATTER}
    text = disagreement(said, MEMBERS).text
    assert "the ranks disagree about the splits: (2, 2, 0) on ranks 1, 2; () on rank 3" in text


def test_many_ranks_are_cut_short():
    said = dict.fromkeys(range(100), REDUCE) | {40: GATHER}
    text = disagreement(said, MEMBERS).text
    assert "allreduce on ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, ...;" in text
    assert "allgather on rank 40." in text


def test_members_learn_each_others_rows():
    assert sizes({rank: replace(GATHER, shape=(10 * rank, 2)) for rank in (3, 1, 2)}, MEMBERS) == (10, 20, 30)
    splits = {1: (1, 0, 0), 2: (0, 2, 1), 3: (0, 0, 4)}
    exchange = {rank: replace(EXCHANGE, splits=splits[rank]) for rank in (2, 3, 1)}
    assert sizes(exchange, MEMBERS) == (1, 0, 0, 0, 2, 1, 0, 0, 4)
    for request in (REDUCE, SCATTER, BROADCAST, BARRIER):
        assert sizes(dict.fromkeys(MEMBERS, request), MEMBERS) == ()
