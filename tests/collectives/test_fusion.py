"""Ready tensors -> batches."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.api import DType, Operation, ReduceOp, Request
from collectives.fusion import plan
from collectives.messages import Response


def ready(name, elements=2, **fields):
    dtype = fields.pop("dtype", DType.FLOAT32)
    return Response(1, Request(name, fields.pop("operation", Operation.ALLREDUCE), dtype, (elements,), **fields))


def names(batches):
    return ["".join(response.request.name for response in batch) for batch in batches]


def test_alike_tensors_share_a_batch_in_order():
    assert names(plan([ready(name) for name in "abc"], 1000)) == ["abc"]


def test_a_batch_is_full_at_the_threshold():
    tensors = [ready(name) for name in "abcde"]
    assert [names(plan(tensors, limit)) for limit in (7, 8, 15, 16, 24, 40)] == [
        ["a", "b", "c", "d", "e"],
        ["a", "b", "c", "d", "e"],
        ["a", "b", "c", "d", "e"],
        ["ab", "cd", "e"],
        ["abc", "de"],
        ["abcde"],
    ]


def test_a_large_tensor_has_a_batch_of_its_own():
    assert names(plan([ready("a"), ready("b", 100), ready("c"), ready("d")], 16)) == ["a", "b", "cd"]


@pytest.mark.parametrize("elements", [0, 1, 100])
def test_a_threshold_of_0_turns_fusion_off(elements):
    assert names(plan([ready("a", elements), ready("b", elements)], 0)) == ["a", "b"]


DIFFERENCES = [
    {"process_set": 1},
    {"device": "cuda"},
    {"dtype": DType.INT32},
    {"op": ReduceOp.MAX},
    {"prescale_factor": 0.5},
    {"postscale_factor": 0.5},
]


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda difference: next(iter(difference)))
def test_only_what_agrees_shares_a_batch_and_others_may_lie_between(difference):
    tensors = [ready("a"), ready("x", **difference), ready("b"), ready("y", **difference)]
    assert names(plan(tensors, 1000)) == ["ab", "xy"]


@pytest.mark.parametrize("operation", [operation for operation in Operation if operation is not Operation.ALLREDUCE])
def test_only_allreduce_fuses(operation):
    assert names(plan([ready(name, operation=operation) for name in "ab"], 1000)) == ["a", "b"]


def test_nothing_ready_means_no_batch():
    assert plan([], 1000) == []


tensors = st.builds(
    ready,
    st.text("abc", min_size=1, max_size=3),
    st.integers(0, 30),
    dtype=st.sampled_from([DType.FLOAT32, DType.INT8]),
    operation=st.sampled_from([Operation.ALLREDUCE, Operation.ALLREDUCE, Operation.ALLGATHER]),
    process_set=st.integers(0, 1),
)


@given(st.lists(tensors, max_size=20), st.integers(0, 200))
def test_no_tensor_is_lost_and_no_batch_is_too_large(waiting, threshold):
    batches = plan(waiting, threshold)
    assert sorted(id(each) for batch in batches for each in batch) == sorted(map(id, waiting))
    position = {id(each): index for index, each in reversed(list(enumerate(waiting)))}
    for batch in batches:
        assert batch
        assert len(batch) == 1 or sum(each.request.nbytes for each in batch) <= threshold
        assert len({(each.request.dtype, each.request.operation, each.request.process_set) for each in batch}) == 1
        assert all(position[id(one)] <= position[id(other)] for one, other in pairwise(batch))
    first = [position[id(batch[0])] for batch in batches]
    assert first == sorted(first)
