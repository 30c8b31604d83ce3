"""The remedy where a rank has ended and another one waits: a table of the last call there and the waiting call here."""

import pytest

from collectives.api import Operation
from collectives.stalls import deadlocks
from collectives.stalls.deadlocks import remedy

STEP, BUCKET = "optimizer.gradient.weight:0", "gradients.0.weight..3.bias:0"
ADASUM, RIVAL = "delta.weight", "2.gradients.a..b:1"
GRAPH = "allreduce.StatefulPartitionedCall/gradients.1.sequential/dense/bias..0.sequential/dense/kernel"
LOSS = "allreduce.avg_loss"


@pytest.mark.parametrize("is_in_fit", [False, True])
@pytest.mark.parametrize("last", ["", STEP, LOSS])
@pytest.mark.parametrize(
    ("operation", "text"),
    [
        (Operation.JOIN, deadlocks.NO_JOIN),
        (Operation.ADD_PROCESS_SET, deadlocks.NO_SET),
        (Operation.REMOVE_PROCESS_SET, deadlocks.NO_SET),
    ],
)
def test_calls_that_all_ranks_make(operation, text, last, is_in_fit):
    assert remedy(last, operation, f"{operation.label}.noname.0", is_in_fit) == text


@pytest.mark.parametrize("waits", [STEP, BUCKET, ADASUM, RIVAL, GRAPH])
@pytest.mark.parametrize(
    ("last", "is_in_fit", "text"),
    [
        ("", False, deadlocks.NOTHING),
        ("", True, deadlocks.NOTHING),
        (STEP, False, deadlocks.FEWER),
        (BUCKET, False, deadlocks.FEWER),
        (ADASUM, False, deadlocks.FEWER),
        (RIVAL, False, deadlocks.FEWER),
        (GRAPH, False, deadlocks.FEWER),
        (LOSS, False, deadlocks.OTHER_EPOCHS.format(LOSS)),
        ("broadcast.gradient_clip", False, deadlocks.OTHER_EPOCHS.format("broadcast.gradient_clip")),
        (STEP, True, deadlocks.LEFT_FIT),
        (LOSS, True, deadlocks.LEFT_FIT),
    ],
)
def test_a_rank_that_waits_for_a_gradient(last, is_in_fit, text, waits):
    assert remedy(last, Operation.ALLREDUCE, waits, is_in_fit) == text


@pytest.mark.parametrize("operation", [Operation.ALLREDUCE, Operation.BROADCAST, Operation.ALLGATHER])
@pytest.mark.parametrize("last", [STEP, LOSS])
@pytest.mark.parametrize(("is_in_fit", "text"), [(False, deadlocks.OTHER_CALL), (True, deadlocks.OTHER_CALLBACKS)])
def test_a_rank_that_waits_for_another_collective(last, operation, is_in_fit, text):
    assert remedy(last, operation, "result", is_in_fit) == text.format("result")
    assert remedy("", operation, "result", is_in_fit) == deadlocks.NOTHING


def test_each_message_has_one_remedy():
    texts = [text for name, text in vars(deadlocks).items() if name.isupper() and isinstance(text, str) and " " in text]
    texts = [text for text in texts if text not in (deadlocks.SAME_CALLS, deadlocks.SAME_OPTIMIZERS)]
    assert len(texts) == 8
    assert all(text.startswith("it has ") and "; or" not in text for text in texts)
