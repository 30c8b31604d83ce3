"""Seeds of ranks."""

import random

import numpy as np
import pytest

from collectives.api import InvalidRequestError
from hvd_cluster.core import basics, seeds
from hvd_cluster.core.seeds import seed_of


@pytest.fixture(autouse=True)
def states_undone():
    states = random.getstate(), np.random.get_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])


def test_each_rank_has_a_seed_of_its_own():
    assert len({seed_of(seed, rank) for seed in (0, 1, 2) for rank in range(1000)}) == 3000
    assert [seed_of(7, rank) for rank in range(2)] == [2607350393, 966818858]  # a change would change all trainings


def test_the_same_seed_is_the_one_that_was_given():
    assert seed_of(7, None) == 7


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, None, "a"])
def test_seeds_that_are_refused(seed):
    with pytest.raises(InvalidRequestError, match=r"must be an integer from 0 to 4294967295"):
        seed_of(seed, 0)


def test_all_generators_are_seeded(monkeypatch):
    monkeypatch.setattr(basics, "rank", lambda: 1)
    given = []

    def draw():
        own = seeds.set_seed(3, False, given.append)
        return own, random.random(), np.random.rand()

    first = draw()
    assert draw() == first
    assert given == [first[0]] * 2
    assert seeds.set_seed(3, True, given.append) == 3
