"""The core of distributed optimizers, without a framework: its parameters are NumPy arrays, its ranks are threads."""

import numpy as np
import pytest

from collectives.api import MismatchError, ReduceOp
from hvd_cluster.gradients.compression import GradientCompressor
from tests.collectives.engine.job import outcome
from tests.hvd_cluster.gradients.arrays import ArrayBinding, Parameter, Rows
from tests.hvd_cluster.gradients.descent import Optimizer

LARGE = 40_000


@pytest.mark.parametrize("patient", [True, False])
@pytest.mark.parametrize("groups", [None, 2])
def test_a_step_combines_small_and_large_gradients(on_ranks, patient, groups):
    def body(rank):
        parameters = [Parameter(3), Parameter(LARGE), Parameter(2, 2), Parameter(4, dtype=np.float32)]
        optimizer = Optimizer(parameters, rank, groups=groups)
        for _ in range(3):
            for parameter in reversed(parameters):
                parameter.backward(np.full_like(parameter.data, rank.number + 1))
            assert optimizer.combiner.is_in_flight == (optimizer.combiner.claim.is_agreed and not patient)
            optimizer.step()
        return [set(parameter.data.reshape(-1).tolist()) for parameter in parameters]

    assert on_ranks(3, body, patient) == [[{-18.0}] * 4] * 3


def test_gradients_add_up_over_passes_and_missing_ones_are_zeros(on_ranks):
    def body(rank):
        first, second = Parameter(2), Parameter(2)
        optimizer = Optimizer([first, second], rank, passes=2, op=ReduceOp.AVERAGE)
        for _ in range(2):
            for _ in range(2):
                first.backward(np.ones(2))
            if rank.number == 0:
                second.backward(np.ones(2))
            optimizer.step()
        return first.data.tolist(), second.data.tolist()

    assert on_ranks(2, body) == [([-4.0] * 2, [-1.0] * 2)] * 2


def test_more_passes_than_agreed(on_ranks):
    def body(rank):
        parameter = Parameter(2)
        optimizer = Optimizer([parameter], rank)
        parameter.backward(np.ones(2))
        with pytest.raises(AssertionError, match=r"was computed more than backward_passes_per_step=1 times.*combine"):
            parameter.backward(np.ones(2))
        optimizer.step()

    on_ranks(2, body)


def test_no_gradient_travels_ahead_where_the_framework_cannot_hold_it(on_ranks, monkeypatch):
    monkeypatch.setattr(ArrayBinding, "can_hold", False)

    def body(rank):
        parameters = [Parameter(3), Parameter(LARGE)]
        optimizer = Optimizer(parameters, rank)
        for _ in range(3):
            for parameter in reversed(parameters):
                parameter.backward(np.ones_like(parameter.data))
            assert not optimizer.combiner.is_in_flight
            if rank.number == 0:
                parameters[1].gradient *= 3
            optimizer.step()
        return [set(parameter.data.tolist()) for parameter in parameters]

    assert on_ranks(2, body, False) == [[{-6.0}, {-12.0}]] * 2


@pytest.mark.parametrize("patient", [True, False])
@pytest.mark.parametrize("changing", [(0,), (0, 1, 2), ()])
def test_a_gradient_that_changes_on_its_way(on_ranks, patient, changing):
    """On one rank, on all, or thrown away on one after a part of it was sent."""

    def body(rank):
        parameters = [Parameter(LARGE), Parameter(3), Parameter(LARGE)]
        optimizer = Optimizer(parameters, rank)
        optimizer.step()
        for parameter in reversed(parameters):
            parameter.backward(np.ones_like(parameter.data))
        if rank.number in changing:
            parameters[2].gradient[...] = 2
        elif not changing and rank.number == 0:
            optimizer.combiner.forget()
            for parameter in reversed(parameters):
                parameter.gradient = None
                parameter.backward(np.full_like(parameter.data, 2))
        optimizer.step()
        for parameter in reversed(parameters):
            parameter.backward(np.ones_like(parameter.data))
        optimizer.step()
        return [set(parameter.data.tolist()) for parameter in parameters]

    changed = {-6.0 - len(changing)} if changing else {-7.0}
    assert on_ranks(3, body, patient) == [[{-6.0}] * 2 + [changed] if changing else [changed] * 3] * 3


def test_a_bucket_that_one_rank_alone_has_thrown_away_in_part(on_ranks):
    """The others do not wait for a bucket that was not complete when the rank gave up."""

    def body(rank):
        parameters = [Parameter(LARGE), Parameter(LARGE), Parameter(LARGE)]
        optimizer = Optimizer(parameters, rank)
        optimizer.step()
        if rank.number == 0:
            parameters[2].backward(np.full(LARGE, 5.0))
            optimizer.combiner.forget()
            parameters[2].gradient = None
        for parameter in reversed(parameters):
            parameter.backward(np.ones(LARGE))
        optimizer.step()
        return [set(parameter.data.tolist()) for parameter in parameters]

    assert on_ranks(3, body) == [[{-3.0}] * 3] * 3


def test_sparse_gradients_stay_sparse(on_ranks):
    """Also where one rank finds it first, and where ranks remember different ones of equal size."""

    def body(rank):
        first, second, other = Parameter(5, 2), Parameter(5, 2), Parameter(3)
        optimizer = Optimizer([first, other, second], rank)
        mine, others = (first, second) if rank.number == 0 else (second, first)
        for step in range(4):
            if step == 2:
                del optimizer.combiner.buckets[others].sparse[others]
            other.backward(np.ones(3))
            mine.backward(Rows([step], [[1.0, 1.0]], (5, 2)))
            optimizer.combiner.combine()
            assert isinstance(first.gradient, Rows)
            assert isinstance(second.gradient, Rows)
            optimizer.step()
        return [first.data[:, 0].tolist(), second.data[:, 0].tolist(), other.data.tolist()]

    first, second = on_ranks(2, body)
    assert first == second


def test_ranks_with_other_parameters_hear_which_ones(on_ranks):
    def body(rank):
        sizes = (2, 3) if rank.number else (2, 4)
        parameters = [Parameter(size) for size in sizes]
        optimizer = Optimizer(parameters, rank)
        errors = []
        for _ in range(2):
            for parameter in parameters:
                parameter.backward(np.ones_like(parameter.data))
            errors.append(outcome(optimizer.step))
        return errors

    for errors in on_ranks(2, body):
        for error in errors:
            assert isinstance(error, MismatchError)
            assert (
                "'allreduce.noname.0.1', number 1, is float64 of shape (4,) on rank 0, float64 of shape (3,) on rank 1"
                in str(error)
            )


@pytest.mark.parametrize("patient", [True, False])
def test_one_rank_alone_replaces_its_optimizer_beside_another(on_ranks, patient):
    def body(rank):
        def trained():
            parameters = [Parameter(2), Parameter(LARGE)]
            return parameters, Optimizer(parameters, rank)

        def step(parameters, optimizer):
            for parameter in parameters:
                parameter.backward(np.ones_like(parameter.data))
            optimizer.step()

        kept, optimizers = [], [trained(), trained()]
        for number in range(4):
            if number == 2 and rank.number == 0:
                kept.append(optimizers[1])
                optimizers[1] = trained()
            for each in optimizers:
                step(*each)
        return [optimizer.combiner.claim.number for _, optimizer in optimizers], optimizers[1][0][0].data.tolist()

    (first, start), (second, all_of_it) = on_ranks(2, body, patient)
    assert first == second == [0, 1]
    assert (start, all_of_it) == ([-4.0] * 2, [-8.0] * 2)


def test_ranks_that_step_different_optimizers_end_with_an_error(on_ranks):
    def body(rank):
        optimizers = [Optimizer([Parameter(2)], rank) for _ in range(2)]
        for optimizer in optimizers:
            optimizer.step()
        return outcome(optimizers[rank.number].combiner.combine)

    for error in on_ranks(2, body):
        assert isinstance(error, MismatchError)
        assert "the ranks step different DistributedOptimizers" in str(error)
        assert "numbers [0, 1]" in str(error)


def test_ranks_that_begin_with_another_one_of_two_models_that_are_alike_end_with_an_error(on_ranks):
    """The models have equal names and shapes, and no rank has stepped an optimizer before."""

    def body(rank):
        optimizers = [Optimizer([Parameter(2)], rank) for _ in range(2)]
        return outcome(optimizers[rank.number].step)

    for error in on_ranks(2, body):
        assert isinstance(error, MismatchError)
        assert "the ranks step different DistributedOptimizers" in str(error)
        assert "numbers [0, 1]" in str(error)


class Halves(GradientCompressor):
    """Sends each gradient in two rounds, one half at a time."""

    def __init__(self, parameter):
        self.middle = parameter.data.size // 2

    def rounds(self, gradient):
        row = gradient.reshape(-1)
        start = yield row[: self.middle].copy()
        end = yield row[self.middle :].copy()
        return np.concatenate([start, end])


def test_compressors_may_use_several_rounds(on_ranks):
    def body(rank):
        parameters = [Parameter(5), Parameter(4)]
        optimizer = Optimizer(parameters, rank, compression=Halves, gradient_predivide_factor=2.0, op=ReduceOp.AVERAGE)
        for parameter in parameters:
            parameter.backward(np.arange(parameter.data.size) * (2.0 * rank.number))
        optimizer.step()
        return [parameter.data.tolist() for parameter in parameters]

    assert on_ranks(2, body) == [[[0.0, -1.0, -2.0, -3.0, -4.0], [0.0, -1.0, -2.0, -3.0]]] * 2
