"""The hooks of a distributed optimizer and its step, on ranks that are threads."""

import pytest
import torch

import hvd_cluster.torch as hvd
from collectives.api import MismatchError
from hvd_cluster.gradients.compression import GradientCompressor
from hvd_cluster.torch.optimizer import inventory, transfers
from hvd_cluster.torch.optimizer.hooks import PassCounts
from tests.collectives.engine.job import outcome
from tests.hvd_cluster.torch.optimizer.descent import Descent, backward, leaf, rows, values

pytestmark = pytest.mark.leaves("environment")  # torch sets TORCHINDUCTOR_CACHE_DIR with its first optimizer

LARGE = 40_000


@pytest.mark.parametrize("patient", [True, False])
@pytest.mark.parametrize("groups", [None, 2])
def test_a_step_combines_small_and_large_gradients(on_ranks, patient, groups):
    def body(rank):
        parameters = [leaf(3), leaf(LARGE), leaf(2, 2), leaf(4, dtype=torch.float32)]
        descent = Descent(parameters, rank, groups=groups)
        for _ in range(3):
            descent.backward(rank.number + 1)
            assert descent.combiner.is_in_flight == (descent.combiner.claim.is_agreed and not patient)
            descent.step()
        return values(parameters)

    assert on_ranks(3, body, patient) == [[{-18.0}] * 4] * 3


def test_a_bucket_with_a_frozen_parameter_travels_during_backward(on_ranks):
    def body(rank):
        parameters = lead, frozen, trained = [leaf(3), leaf(2), leaf(2)]
        descent = Descent(parameters, rank, groups=[[lead], [frozen, trained]])
        frozen.requires_grad_(False)
        for step in range(2):
            backward(trained, 1.0)
            assert descent.combiner.is_in_flight == (step > 0)
            backward(lead, 1.0)
            descent.step()
        return values(parameters)

    assert on_ranks(2, body) == [[{-4.0}, {0.0}, {-4.0}]] * 2


def test_a_new_number_of_passes_counts_from_the_next_pass_except_for_gradients_that_are_complete():
    counts, complete, half = PassCounts(2), leaf(1), leaf(1)
    for parameter in (complete, half, complete):
        backward(parameter, 1.0)
        counts.countdown[parameter] = counts.count(parameter)
    assert [counts.countdown.get(each) for each in (complete, half)] == [0, 1]
    counts.set_passes(3)
    assert [counts.countdown.get(each) for each in (complete, half)] == [0, None]


def test_gradients_add_up_over_passes_and_missing_ones_are_zeros(on_ranks):
    def body(rank):
        first, second = leaf(2), leaf(2)
        descent = Descent([first, second], rank, hvd.Average, backward_passes_per_step=2)
        for _ in range(2):
            for _ in range(2):
                backward(first, 1.0)
            if rank.number == 0:
                backward(second, 1.0)
            descent.step()
        return first.tolist(), second.tolist()

    assert on_ranks(2, body) == [([-4.0] * 2, [-1.0] * 2)] * 2


def test_more_passes_than_agreed(on_ranks):
    def body(rank):
        descent = Descent([leaf(2)], rank)
        descent.backward()
        said = r"'allreduce.noname.0.0' was computed more than backward_passes_per_step=1 times.*synchronize"
        with pytest.raises(AssertionError, match=said):
            descent.backward()
        descent.step()

    on_ranks(2, body)


def test_no_gradient_travels_ahead_where_torch_cannot_hold_it(on_ranks, monkeypatch):
    for module in (inventory, transfers):
        monkeypatch.setattr(module, "CAN_HOLD", False)

    def body(rank):
        parameters = [leaf(3), leaf(LARGE)]
        descent = Descent(parameters, rank)
        for _ in range(3):
            descent.backward()
            assert not descent.combiner.is_in_flight
            if rank.number == 0:
                parameters[1].grad.data.mul_(3)
            descent.step()
        return values(parameters)

    assert on_ranks(2, body, False) == [[{-6.0}, {-12.0}]] * 2


@pytest.mark.parametrize("patient", [True, False])
@pytest.mark.parametrize("changing", [(0,), (0, 1, 2), ()])
def test_a_gradient_that_changes_on_its_way(on_ranks, patient, changing):
    """On one rank, on all, or thrown away on one after a part of it was sent."""

    def body(rank):
        parameters = [leaf(LARGE), leaf(3), leaf(LARGE)]
        descent = Descent(parameters, rank)
        descent.step()
        descent.backward()
        if rank.number in changing:
            parameters[2].grad.data.fill_(2)
        elif not changing and rank.number == 0:
            descent.optimizer.zero_grad()
            descent.backward(2.0)
        descent.step()
        descent.backward()
        descent.step()
        return values(parameters)

    changed = {-6.0 - len(changing)} if changing else {-7.0}
    assert on_ranks(3, body, patient) == [[{-6.0}] * 2 + [changed] if changing else [changed] * 3] * 3


def test_a_bucket_that_one_rank_alone_has_thrown_away_in_part(on_ranks):
    """The others do not wait for a bucket that was not complete when the rank gave up."""

    def body(rank):
        parameters = [leaf(LARGE), leaf(LARGE), leaf(LARGE)]
        descent = Descent(parameters, rank)
        descent.step()
        if rank.number == 0:
            backward(parameters[2], 5.0)
            descent.optimizer.zero_grad()
        descent.backward()
        descent.step()
        return values(parameters)

    assert on_ranks(3, body) == [[{-3.0}] * 3] * 3


def test_sparse_gradients_stay_sparse(on_ranks):
    """Also where one rank finds it first, and where ranks remember different ones of equal size."""

    def body(rank):
        first, second, other = leaf(5, 2), leaf(5, 2), leaf(3)
        descent = Descent([first, other, second], rank)
        mine, others = (first, second) if rank.number == 0 else (second, first)
        for step in range(4):
            if step == 2:
                del descent.combiner.buckets[others].sparse[others]
            backward(other, 1.0)
            backward(mine, rows(step))
            descent.optimizer.synchronize()
            assert first.grad.is_sparse
            assert second.grad.is_sparse
            with descent.optimizer.skip_synchronize():
                descent.step()
        return first[:, 0].tolist(), second[:, 0].tolist(), other.tolist()

    found = ([-1.0] * 4 + [0.0], [-1.0] * 4 + [0.0], [-8.0] * 3)
    assert on_ranks(2, body) == [found] * 2


def test_ranks_with_other_parameters_hear_which_ones(on_ranks):
    def body(rank):
        descent = Descent([leaf(2), leaf(3 if rank.number else 4)], rank)
        errors = []
        for _ in range(2):
            descent.backward()
            errors.append(outcome(descent.step))
            descent.optimizer.zero_grad()
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
        def descent():
            return Descent([leaf(2), leaf(LARGE)], rank)

        kept, descents = [], [descent(), descent()]
        for number in range(4):
            if number == 2 and rank.number == 0:
                kept.append(descents[1])
                descents[1] = descent()
            for each in descents:
                each.backward()
                each.step()
        return [each.combiner.claim.number for each in descents], descents[1].parameters[0].tolist()

    (first, start), (second, all_of_it) = on_ranks(2, body, patient)
    assert first == second == [0, 1]
    assert (start, all_of_it) == ([-4.0] * 2, [-8.0] * 2)


@pytest.mark.parametrize("steps", [0, 1])
def test_ranks_that_step_different_optimizers_end_with_an_error(on_ranks, steps):
    """Also where no rank has stepped an optimizer before: the models have equal names and shapes."""

    def body(rank):
        descents = [Descent([leaf(2)], rank) for _ in range(2)]
        for _ in range(steps):
            for descent in descents:
                descent.step()
        return outcome(descents[rank.number].step)

    for error in on_ranks(2, body):
        assert isinstance(error, MismatchError)
        assert "the ranks step different DistributedOptimizers" in str(error)
        assert "numbers [0, 1]" in str(error)


class Halves(GradientCompressor):
    """Sends each gradient in two rounds, one half at a time."""

    def __init__(self, parameter):
        self.middle = parameter.numel() // 2

    def rounds(self, gradient):
        row = gradient.reshape(-1)
        start = yield row[: self.middle].clone()
        end = yield row[self.middle :].clone()
        return torch.cat([start, end])


def test_compressors_may_use_several_rounds(on_ranks):
    def body(rank):
        parameters = [leaf(5), leaf(4)]
        descent = Descent(parameters, rank, hvd.Average, compression=Halves, gradient_predivide_factor=2.0)
        for each in parameters:
            backward(each, torch.arange(each.numel()).double() * (2.0 * rank.number))
        descent.step()
        return [each.tolist() for each in parameters]

    assert on_ranks(2, body) == [[[0.0, -1.0, -2.0, -3.0, -4.0], [0.0, -1.0, -2.0, -3.0]]] * 2
