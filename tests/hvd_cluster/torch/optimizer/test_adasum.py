"""Adasum of the changes that the ranks' steps made, on ranks that are threads."""

import pytest
import torch

import hvd_cluster.torch as hvd
from collectives.api import InvalidRequestError, MismatchError, RefusedCallError
from hvd_cluster.gradients.compression import Compressor, NoneCompressor
from tests.collectives.engine.job import outcome
from tests.hvd_cluster.torch.optimizer.descent import Descent, leaf

pytestmark = pytest.mark.leaves("environment")  # torch sets TORCHINDUCTOR_CACHE_DIR with its first optimizer


def descent_of(parameters, rank, compression=NoneCompressor):
    return Descent(parameters, rank, hvd.Adasum, compression=compression)


def step(descent, *gradients):
    """The step's own result."""
    for parameter, gradient in zip(descent.parameters, gradients, strict=True):
        parameter.grad = torch.tensor(gradient, dtype=parameter.dtype)
    return descent.optimizer.step(lambda: "stepped")


def values(descent):
    return [parameter.tolist() for parameter in descent.parameters]


def test_the_changes_of_all_ranks_are_combined(on_ranks):
    """Orthogonal changes add up, equal ones are averaged; that of a scalar, too."""

    def body(rank):
        descent = descent_of([leaf(2), leaf()], rank)
        own = [1.0, 0.0] if rank.number == 0 else [0.0, 1.0]
        assert [step(descent, own, 2.0) for _ in range(2)] == ["stepped"] * 2
        return values(descent)

    assert on_ranks(2, body) == [[[-2.0, -2.0], -4.0]] * 2


def test_a_rank_alone_only_steps(on_ranks):
    def body(rank):
        descent = descent_of([leaf(2)], rank)
        assert step(descent, [1.0, 2.0]) == "stepped"
        return values(descent)

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
        descent = descent_of([leaf(1), leaf(1)], rank, Failing(rank))
        found = [outcome(lambda: step(descent, [1.0], [2.0])) for _ in range(2)]
        assert values(descent) == [[0.0], [0.0]]
        assert step(descent, [1.0], [2.0]) == "stepped"
        return found, values(descent)

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
        descent = descent_of([leaf(1)], rank, Interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(descent, [1.0])
        return values(descent)

    assert on_ranks(2, body) == [[[0.0]]] * 2


@pytest.mark.parametrize("difference", ["trained", "size"])
def test_ranks_with_other_parameters(on_ranks, difference):
    """A parameter that one rank does not train, or that has another size."""

    def body(rank):
        parameters = [leaf(2), leaf(3 if difference == "size" and rank.number else 2)]
        descent = descent_of(parameters, rank)
        parameters[1].requires_grad_(difference == "size" or rank.number == 0)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
        found = [outcome(descent.optimizer.step) for _ in range(2)]
        return found, values(descent)

    for found, data in on_ranks(2, body):
        assert [type(error) for error in found] == [MismatchError] * 2
        about = "'allreduce.noname.0.1', number 1" if difference == "size" else "allreduce.noname.0.0"
        assert about in str(found[0])
        assert not any(map(any, data))


def test_all_ranks_hear_of_infinities(on_ranks):
    def body(rank):
        descent = descent_of([leaf(2), leaf(2)], rank)
        first, second = descent.parameters
        first.grad, second.grad = torch.ones_like(first), torch.ones_like(second)
        descent.optimizer._differences.share_infinities()
        before = first.grad.isfinite().all().item()
        second.grad[0] = torch.nan if rank.number == 1 else 1.0
        descent.optimizer._differences.share_infinities()
        return before, first.grad.isfinite().all().item()

    assert on_ranks(2, body) == [(True, False)] * 2
