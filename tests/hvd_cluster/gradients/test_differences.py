"""Adasum of differences, without a framework: parameters are NumPy arrays, ranks are threads."""

import numpy as np
import pytest

from collectives.api import InvalidRequestError, MismatchError, ReduceOp, RefusedCallError
from hvd_cluster.gradients.compression import Compressor, NoneCompressor
from hvd_cluster.gradients.differences import DifferenceCombiner
from hvd_cluster.gradients.options import Options
from tests.collectives.engine.job import outcome
from tests.hvd_cluster.gradients.arrays import ArrayDifferences, Parameter


class Optimizer:
    """Plain gradient descent with a rate of 1."""

    def __init__(self, parameters, rank, compression=NoneCompressor):
        self.parameters = parameters
        options = Options(compression, ReduceOp.ADASUM, 1.0, None, False, rank.process_set)
        self.differences = DifferenceCombiner(ArrayDifferences(), lambda: [parameters], {}, 1, options)

    def step(self, *gradients):
        """The step's own result."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.gradient = np.array(gradient, np.float64)
        return self.differences.step(self._descend)

    def _descend(self):
        for parameter in self.parameters:
            if parameter.trained:
                parameter.data -= parameter.gradient
        return "stepped"


def values(optimizer):
    return [parameter.data.tolist() for parameter in optimizer.parameters]


def test_the_changes_of_all_ranks_are_combined(on_ranks):
    """Orthogonal changes add up, equal ones are averaged; that of a scalar, too."""

    def body(rank):
        optimizer = Optimizer([Parameter(2), Parameter()], rank)
        own = [1.0, 0.0] if rank.number == 0 else [0.0, 1.0]
        assert [optimizer.step(own, 2.0) for _ in range(2)] == ["stepped"] * 2
        return values(optimizer)

    assert on_ranks(2, body) == [[[-2.0, -2.0], -4.0]] * 2


def test_a_rank_alone_only_steps(on_ranks):
    def body(rank):
        optimizer = Optimizer([Parameter(2)], rank)
        assert optimizer.step([1.0, 2.0]) == "stepped"
        return values(optimizer)

    assert on_ranks(1, body) == [[[-1.0, -2.0]]]


class Failing(Compressor):
    """Fails on rank 1 for the second tensor of a step, twice."""

    def __init__(self, rank):
        self.calls = 0
        self.fails_in = (2, 4) if rank.number == 1 else ()

    def compress(self, tensor):
        self.calls += 1
        if self.calls in self.fails_in:
            raise ZeroDivisionError("boom")
        return tensor, None

    def decompress(self, tensor, ctx):
        return tensor


def test_a_compressor_that_fails_on_one_rank_is_an_error_on_all(on_ranks):
    """The parameters stay as they were, and the step can be repeated."""

    def body(rank):
        optimizer = Optimizer([Parameter(1), Parameter(1)], rank, Failing(rank))
        found = [outcome(lambda: optimizer.step([1.0], [2.0])) for _ in range(2)]
        assert values(optimizer) == [[0.0], [0.0]]
        assert optimizer.step([1.0], [2.0]) == "stepped"
        return found, values(optimizer)

    (other, first), (own, second) = on_ranks(2, body)
    assert first == second == [[-1.0], [-2.0]]
    assert [type(error) for error in other] == [RefusedCallError] * 2
    assert "rank 1 refused the call: the change of 'allreduce.noname.0.1': compression=" in str(other[0])
    assert [type(error) for error in own] == [InvalidRequestError] * 2
    assert isinstance(own[0].__cause__, ZeroDivisionError)


class Interrupted(NoneCompressor):
    """The user interrupts the step when the changes of all ranks have arrived."""

    @staticmethod
    def decompress(tensor, ctx):
        raise KeyboardInterrupt


def test_the_parameters_stay_as_they_were_after_an_interrupt(on_ranks):
    def body(rank):
        optimizer = Optimizer([Parameter(1)], rank, Interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step([1.0])
        return values(optimizer)

    assert on_ranks(2, body) == [[[0.0]]] * 2


@pytest.mark.parametrize("difference", ["trained", "size"])
def test_ranks_with_other_parameters(on_ranks, difference):
    """A parameter that one rank does not train, or that has another size."""

    def body(rank):
        parameters = [Parameter(2), Parameter(3 if difference == "size" and rank.number else 2)]
        optimizer = Optimizer(parameters, rank)
        parameters[1].trained = difference == "size" or rank.number == 0
        gradients = [np.ones_like(each.data) for each in parameters]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.gradient = gradient if parameter.trained else None
        found = [outcome(lambda: optimizer.differences.step(optimizer._descend)) for _ in range(2)]
        return found, values(optimizer)

    for found, data in on_ranks(2, body):
        assert [type(error) for error in found] == [MismatchError] * 2
        about = "'allreduce.noname.0.1', number 1" if difference == "size" else "allreduce.noname.0.0"
        assert about in str(found[0])
        assert not any(map(any, data))


def test_all_ranks_hear_of_infinities(on_ranks):
    def body(rank):
        optimizer = Optimizer([Parameter(2), Parameter(2)], rank)
        first, second = optimizer.parameters
        first.gradient, second.gradient = np.ones(2), np.ones(2)
        optimizer.differences.share_infinities()
        before = np.isfinite(first.gradient).all()
        second.gradient[0] = np.nan if rank.number == 1 else 1.0
        optimizer.differences.share_infinities()
        return before, np.isfinite(first.gradient).all()

    assert on_ranks(2, body) == [(True, False)] * 2
