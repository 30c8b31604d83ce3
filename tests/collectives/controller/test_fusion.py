"""Ready tensors -> batches."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.api import DType, Operation, ReduceOp, Request
from collectives.controller.fusion import plan
from collectives.controller.messages import Response

FUSED = (Operation.ALLREDUCE, Operation.ALLGATHER, Operation.REDUCESCATTER)


def ready(name, elements=2, sizes=(), **fields):
    dtype = fields.pop("dtype", DType.FLOAT32)
    request = Request(name, fields.pop("operation", Operation.ALLREDUCE), dtype, (elements,), **fields)
    return Response(1, request, sizes)


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


@pytest.mark.parametrize("operation", FUSED)
def test_what_fuses_does_so_with_its_like(operation):
    tensors = [ready(name, operation=operation) for name in "ab"]
    others = [ready(name, operation=other) for name, other in zip("xy", set(FUSED) - {operation}, strict=True)]
    assert names(plan([tensors[0], *others, tensors[1]], 1000))[0] == "ab"


@pytest.mark.parametrize("operation", [operation for operation in Operation if operation not in FUSED])
def test_others_do_not_fuse(operation):
    assert names(plan([ready(name, operation=operation) for name in "ab"], 1000)) == ["a", "b"]


def test_adasum_fuses_but_not_with_sums():
    tensors = [ready(name, op=op) for name, op in zip("abcd", [ReduceOp.SUM, ReduceOp.ADASUM] * 2, strict=True)]
    assert names(plan(tensors, 1000)) == ["ac", "bd"]


def gathered(name, sizes=(1, 1), dtype=DType.FLOAT32, **fields):
    return ready(name, 1, operation=Operation.ALLGATHER, sizes=sizes, dtype=dtype, **fields)


def test_allgathers_of_any_dtype_fuse():
    tensors = [gathered("a"), gathered("b", dtype=DType.BOOL), gathered("x", process_set=1), gathered("c")]
    assert names(plan(tensors, 1000)) == ["abc", "x"]


def test_an_allgather_counts_the_bytes_of_the_result():
    tensors = [gathered("a", (3, 0, 1)), gathered("b", (0, 0, 9), DType.INT8), gathered("c", (0, 0, 0))]
    assert [names(plan(tensors, limit)) for limit in (24, 25)] == [["a", "bc"], ["abc"]]


def grouped(name, group, **fields):
    return ready(name, group=group, group_size=2, **fields)


def test_a_group_is_planned_at_the_place_of_its_first_tensor():
    tensors = [ready("x"), grouped("a", "G"), ready("y"), grouped("b", "G"), ready("z")]
    assert names(plan(tensors, 1000)) == ["xabyz"]
    assert names(plan(tensors, 16)) == ["xa", "by", "z"]


def test_groups_of_two_process_sets_are_two():
    tensors = [grouped("a", "G"), ready("x"), grouped("b", "G", process_set=1), ready("y")]
    assert names(plan(tensors, 1000)) == ["axy", "b"]


@pytest.mark.parametrize("threshold", [0, 1, 1000])
def test_isolated_groups_are_a_batch_each_of_any_size(threshold):
    tensors = [grouped("a", "G"), grouped("m", "H"), grouped("b", "G"), grouped("c", "G", dtype=DType.INT8)]
    assert names(plan(tensors, threshold, isolate_groups=True)) == ["ab", "c", "m"]


def test_isolated_groups_leave_the_others_to_each_other():
    tensors = [ready("x"), grouped("a", "G"), ready("y"), grouped("b", "G")]
    assert names(plan(tensors, 1000, isolate_groups=True)) == ["xy", "ab"]
    assert names(plan(tensors, 0, isolate_groups=True)) == ["x", "ab", "y"]


def test_nothing_ready_means_no_batch():
    assert plan([], 1000) == []


tensors = st.builds(
    ready,
    st.text("abc", min_size=1, max_size=3),
    st.integers(0, 30),
    st.tuples(st.integers(0, 5), st.integers(0, 5)),
    dtype=st.sampled_from([DType.FLOAT32, DType.INT8]),
    operation=st.sampled_from([Operation.ALLREDUCE, Operation.ALLREDUCE, Operation.ALLGATHER]),
    process_set=st.integers(0, 1),
    group=st.sampled_from(["", "", "G", "H"]),
)


def moved(response):
    """The bytes that count."""
    gathers = response.request.operation is Operation.ALLGATHER
    return sum(response.sizes) * response.request.dtype.itemsize if gathers else response.request.nbytes


def label(response):
    return (response.request.process_set, response.request.group)


@given(st.lists(tensors, max_size=20), st.integers(0, 200), st.booleans())
def test_no_tensor_is_lost_and_no_batch_is_too_large(waiting, threshold, isolate):
    batches = plan(waiting, threshold, isolate)
    assert sorted(id(each) for batch in batches for each in batch) == sorted(map(id, waiting))
    place = {id(each): index for index, each in enumerate(waiting)}
    groups = {label(each): place[id(each)] for each in reversed(waiting) if each.request.group}
    order = {id(each): (groups.get(label(each), place[id(each)]), place[id(each)]) for each in waiting}
    for batch in batches:
        first = batch[0].request
        whole = isolate and first.group
        assert whole or len(batch) == 1 or sum(map(moved, batch)) <= threshold
        assert len({(each.request.operation, each.request.process_set) for each in batch}) == 1
        assert first.operation is Operation.ALLGATHER or len({each.request.dtype for each in batch}) == 1
        assert not isolate or len({each.request.group for each in batch}) == 1
        assert all(order[id(one)] < order[id(other)] for one, other in pairwise(batch))
    begins = [order[id(batch[0])] for batch in batches]
    assert begins == sorted(begins)
