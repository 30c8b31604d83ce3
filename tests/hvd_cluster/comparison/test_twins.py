"""Variables that are alike."""

import pytest

from hvd_cluster.comparison.twins import ModelPlace, are_swapped, place_of, plain, stamp_of
from tests.hvd_cluster.comparison.variables import Variable


@pytest.mark.parametrize(
    ("stamps", "places"),
    [
        (["w_9", "w_12", "w_101"], [0, 1, 2]),
        (["dense/kernel", "dense_2/kernel", "dense_10/kernel"], [0, 1, 2]),
        (["sequential/dense/kernel", "sequential_1/dense_3/kernel"], [0, 1]),
    ],
)
def test_older_variables_come_first(stamps, places):
    kept = [Variable(stamp) for stamp in (*stamps, "other/kernel")]
    assert [stamp_of(each) for each in kept[:-1]] == stamps
    assert [place_of(stamp, (3,)) for stamp in stamps] == [ModelPlace(place, len(stamps)) for place in places]
    assert place_of(stamps[0], (4,)) == ModelPlace(0, 1)


def test_names_without_the_numbers_of_a_process():
    assert [plain(name) for name in ("dense_2/kernel:0", "w_12", "a_1b/c")] == ["dense/kernel", "w", "a_1b/c"]


def test_only_equally_many_variables_can_be_swapped():
    assert are_swapped({0: ModelPlace(0, 2), 1: ModelPlace(1, 2)})
    assert not are_swapped({0: ModelPlace(1, 2), 1: ModelPlace(1, 2)})
    assert not are_swapped({0: ModelPlace(1, 2), 1: ModelPlace(0, 1)})
