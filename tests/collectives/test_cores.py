"""When cores are scarce, and when they are crowded."""

import pytest

from collectives.cores import Cores


@pytest.mark.parametrize(
    ("count", "ranks", "crowded", "scarce"),
    [(1, 1, False, True), (2, 1, False, False), (2, 2, False, True), (2, 3, True, True), (8, 4, False, False)],
)
def test_crowded_and_scarce(count, ranks, crowded, scarce):
    cores = Cores(count, ranks)
    assert (cores.are_crowded, cores.are_scarce) == (crowded, scarce)
