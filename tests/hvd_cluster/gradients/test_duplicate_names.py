"""The numbers of optimizers that use the same parameter names."""

import pytest

from hvd_cluster.gradients.duplicate_names import DuplicateNames, OptimizerEntry, Proposal, choose


class Optimizer:
    """On one rank; ``parameters`` are also their names."""

    def __init__(self, registry, parameters, process_set="all"):
        self.busy = busy = []
        self.claim = registry.add(
            self, OptimizerEntry(process_set, lambda: set(parameters), lambda: parameters, lambda: busy, lambda: None)
        )


def proposal(number, is_agreed=False, busy=0):
    return Proposal(number, is_agreed, busy)


def step(*optimizers):
    """All ranks step, each its own optimizer."""
    number = choose([optimizer.claim.propose() for optimizer in optimizers])
    for optimizer in optimizers:
        optimizer.claim.adopt(number)
    return number


@pytest.mark.parametrize(
    ("proposals", "number"),
    [
        ([proposal(0), proposal(0)], 0),
        ([proposal(0), proposal(2), proposal(1)], 2),
        ([proposal(0, is_agreed=True), proposal(2)], 0),
        ([proposal(3, is_agreed=True), proposal(0), proposal(3, is_agreed=True)], 3),
        ([proposal(1, is_agreed=True), proposal(0, is_agreed=True)], None),
        ([proposal(1, is_agreed=True), proposal(2, busy=0b10)], None),
        ([proposal(1, is_agreed=True, busy=0b10), proposal(2, busy=0b101)], 1),
    ],
)
def test_all_ranks_choose_the_same_number(proposals, number):
    assert choose(proposals) == number


def test_rivals_have_different_numbers():
    registry = DuplicateNames()
    optimizers = [Optimizer(registry, names) for names in ("a", "b", "ab", "b", "c")]
    assert [each.claim.propose().number for each in optimizers] == [0, 0, 1, 2, 0]
    elsewhere = Optimizer(registry, "a", process_set="some")
    assert elsewhere.claim.propose().number == 0
    assert [each.claim.has_duplicates for each in (*optimizers, elsewhere)] == [True] * 4 + [False] * 2
    assert [each.claim.prefix for each in optimizers[1:3]] == ["", "optimizer1."]


def test_an_optimizer_that_is_gone_is_no_rival():
    registry = DuplicateNames()
    first, second = Optimizer(registry, "a"), Optimizer(registry, "a")
    assert first.claim.has_duplicates
    del second
    assert not first.claim.has_duplicates
    assert registry.all() == [first.claim]


def test_one_rank_alone_replaces_its_optimizer():
    here, there = DuplicateNames(), DuplicateNames()
    kept, replaced = Optimizer(here, "a"), Optimizer(there, "a")
    assert step(kept, replaced) == 0
    replacement = Optimizer(there, "a")
    assert replacement.claim.propose().number == 1
    assert step(kept, replacement) == 0
    assert replaced.claim.propose()[:3] == proposal(1)[:3]


def test_one_rank_alone_keeps_an_optimizer_that_all_have_replaced():
    here, there = DuplicateNames(), DuplicateNames()
    kept, gone = Optimizer(here, "a"), Optimizer(there, "a")
    step(kept, gone)
    del gone
    assert step(Optimizer(here, "a"), Optimizer(there, "a")) == 1


def test_optimizers_side_by_side_on_survivors_and_on_a_new_rank():
    here, there = DuplicateNames(), DuplicateNames()
    survivors = [Optimizer(here, "a") for _ in range(3)]
    for each in survivors:
        step(each)
    new = [Optimizer(there, "a") for _ in range(2)]
    assert [step(*pair) for pair in zip(survivors[1:], new, strict=True)] == [1, 2]


def test_an_optimizer_with_gradients_under_way_keeps_its_number():
    here, there = DuplicateNames(), DuplicateNames()
    kept, replaced = Optimizer(here, "a"), Optimizer(there, "a")
    step(kept, replaced)
    replaced.busy.append("gradient")
    assert choose([kept.claim.propose(), Optimizer(there, "a").claim.propose()]) is None
