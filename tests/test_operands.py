"""Tensors that one rank cannot describe: the others hear of it instead of waiting."""

import numpy as np
import pytest

from collectives.api import InvalidRequestError, MismatchError, Operation, ReduceOp
from hvd_cluster.operations import operands
from hvd_cluster.operations.handles import synchronize
from hvd_cluster.process_sets import ProcessSet
from tests.collectives.job import outcome
from tests.optimizer.arrays import in_place
from tests.ranks import player

FIELDS = {"op": ReduceOp.SUM, "prescale_factor": 1.0, "postscale_factor": 1.0}


@pytest.fixture
def on_ranks(monkeypatch):
    return player(monkeypatch)


def describe(tensor):
    if tensor is None:
        raise InvalidRequestError("None is no tensor")
    return in_place(tensor)


def run(rank, tensor, name):
    return operands.run(Operation.ALLREDUCE, describe, tensor, name, rank.process_set, **FIELDS)


def start(rank, tensor, name):
    return synchronize(operands.start(Operation.ALLREDUCE, describe, tensor, name, rank.process_set, **FIELDS))


def start_group(rank, tensor, name):
    tensors = [np.ones(2), tensor]
    handle = operands.start_group(Operation.ALLREDUCE, describe, tensors, tuple, name, rank.process_set, **FIELDS)
    return synchronize(handle)[1]


@pytest.mark.parametrize("call", [run, start, start_group])
@pytest.mark.parametrize("name", ["x", None])
def test_a_tensor_that_one_rank_cannot_describe(on_ranks, call, name):
    def body(rank):
        error = outcome(lambda: call(rank, None if rank.number else np.ones(2), name))
        return error, call(rank, np.ones(2), name).tolist()

    (heard, *after), (raised, *_) = on_ranks(2, body)
    assert isinstance(raised, InvalidRequestError)
    assert "None is no tensor" in str(raised)
    assert isinstance(heard, MismatchError)
    assert f"rank 1 refused the call: {raised}" in str(heard)
    assert after == [[2.0, 2.0]]


def test_the_error_is_the_same_where_no_rank_can_wait(on_ranks):
    def body(rank):
        rank.process_set = ProcessSet([0, 1])
        return outcome(lambda: run(rank, None, "x"))

    for error in on_ranks(2, body):
        assert str(error) == "allreduce 'x': None is no tensor"
