"""A gradient that one rank alone cannot send: no rank waits, and the step can be repeated."""

import pytest

from collectives.api import HorovodInternalError, InvalidRequestError, MismatchError, RefusedCallError
from hvd_cluster.gradients.compression import Compressor, GradientCompressor, compressor_for
from tests.collectives.engine.job import outcome
from tests.hvd_cluster.torch.optimizer.descent import Descent, backward, leaf, values

pytestmark = pytest.mark.leaves("environment")  # torch sets TORCHINDUCTOR_CACHE_DIR with its first optimizer

LARGE = 40_000


class Broken(Exception):
    """An error of the user's code."""


def failing(rank, where, failures, ranks=(1,)):
    """A compressor that fails ``failures`` times ``where`` on ``ranks``."""
    left = [failures if rank.number in ranks else 0]

    def fail_in(place):
        if where == place and left[0]:
            left[0] -= 1
            raise Broken(place)

    class Failing(Compressor):
        elementwise = True

        @staticmethod
        def compress(tensor):
            fail_in("compress")
            return tensor, None

        @staticmethod
        def decompress(tensor, ctx):
            fail_in("decompress")
            return tensor

    return Failing


def steps(descent, count):
    """The errors of ``count`` steps; None for a step that worked."""
    found = []
    for _ in range(count):
        descent.optimizer.zero_grad()
        descent.backward()
        found.append(outcome(descent.step))
    return found


@pytest.mark.parametrize("patient", [True, False])
@pytest.mark.parametrize("groups", [None, 1])
@pytest.mark.parametrize("before", [0, 2])
def test_a_compressor_that_fails_on_one_rank_is_an_error_on_all(on_ranks, patient, groups, before):
    """At the first step, where the ranks agree on a number, and later; in the first bucket, and in another one."""

    def body(rank):
        parameters = [leaf(3), leaf(LARGE), leaf(LARGE)]
        descent = Descent(parameters, rank, groups=groups)
        assert steps(descent, before) == [None] * before
        compressors = descent.combiner.inventory.compressors
        compressors[parameters[1]] = compressor_for(failing(rank, "compress", 2), parameters[1])
        return steps(descent, 3), values(parameters)

    (others, first), (own, second), (third, last) = on_ranks(3, body, patient)
    assert first == second == last == [{-3.0 * (before + 1)}] * 3
    for errors in (others, third):
        assert [type(error) for error in errors] == [RefusedCallError, RefusedCallError, type(None)]
        assert "rank 1 refused the call: the compressor of the gradient of 'allreduce.noname.0.1' failed" in str(
            errors[0]
        )
        assert "Broken: compress)" in str(errors[0])
    assert [type(error) for error in own] == [InvalidRequestError, InvalidRequestError, type(None)]
    assert isinstance(own[0].__cause__, Broken)


def test_ranks_that_fail_in_different_buckets_hear_of_their_own_failure(on_ranks):
    """Also where that of the other rank comes first: only its own is one that a rank can mend."""

    def body(rank):
        parameters = [leaf(3), leaf(LARGE)]
        descent = Descent(parameters, rank)
        failed = parameters[rank.number]
        descent.combiner.inventory.compressors[failed] = compressor_for(failing(rank, "compress", 1, (0, 1)), failed)
        return steps(descent, 2)

    for first, second in on_ranks(2, body):
        assert isinstance(first, InvalidRequestError)
        assert second is None


def test_a_decompression_that_fails_leaves_nothing_in_flight(on_ranks):
    """The other ranks do not wait for anything then."""

    def body(rank):
        descent = Descent([leaf(3), leaf(LARGE)], rank, compression=failing(rank, "decompress", 1))
        return steps(descent, 2)

    others, own = on_ranks(2, body)
    assert others == [None, None]
    assert [type(error) for error in own] == [InvalidRequestError, type(None)]


class Late(GradientCompressor):
    """Fails after its first round."""

    def __init__(self, parameter):
        del parameter

    def rounds(self, gradient):
        yield gradient.clone()
        if self.fails:
            raise Broken
        return (yield gradient.clone())


def test_a_later_round_that_fails_ends_all_ranks(on_ranks):
    """Other ranks may have stepped."""

    def body(rank):
        descent = Descent([leaf(3)], rank, compression=type("Rank", (Late,), {"fails": rank.number == 0}))
        return steps(descent, 1)[0]

    own, other = on_ranks(2, body)
    assert isinstance(own, InvalidRequestError)
    assert isinstance(other, HorovodInternalError)
    assert "rank 0: the compressor of the gradient of 'allreduce.noname.0.0' failed" in str(other)


def test_a_gradient_that_cannot_travel_is_an_error_on_all(on_ranks):
    """Its memory has been freed on one rank."""

    def body(rank):
        parameters = [leaf(LARGE), leaf(LARGE)]
        descent = Descent(parameters, rank)
        found = []
        for is_freed in (rank.number == 1, False):
            descent.optimizer.zero_grad()
            descent.backward()
            if is_freed:
                parameters[0].grad.untyped_storage().resize_(0)
            found.append(outcome(descent.optimizer.synchronize))
        return found

    (other, *others), (own, *rest) = on_ranks(2, body)
    assert isinstance(own, InvalidRequestError)
    assert isinstance(other, RefusedCallError)
    assert "rank 1 refused the call: " in str(other)
    assert others == rest == [None]


@pytest.mark.parametrize("patient", [True, False])
def test_a_large_parameter_that_one_rank_does_not_train_is_an_error_on_all(on_ranks, patient):
    """Its bucket has a tensor less there."""

    def body(rank):
        parameters = [leaf(LARGE), leaf(LARGE)]
        descent = Descent(parameters, rank, groups=1)
        parameters[0].requires_grad_(rank.number == 0)
        backward(parameters[1], 1.0)
        if rank.number == 0:
            backward(parameters[0], 1.0)
        return outcome(descent.step)

    for error in on_ranks(2, body, patient):
        assert isinstance(error, MismatchError)
        assert "'allreduce.noname.0.0' is dense on rank 0, frozen on rank 1" in str(error)
