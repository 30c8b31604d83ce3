"""Tensors inside dicts, lists and tuples; here they are NumPy arrays."""

from typing import NamedTuple

import numpy as np
import pytest

from collectives.api import InvalidRequestError
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import global_process_set
from hvd_cluster.ops.structures import broadcast_structure, mapped, named, paired, plain


class Pair(NamedTuple):
    first: object
    second: object


def test_every_leaf_changes_and_the_structure_stays():
    value = {"a": [1, (2, 3)], 4: Pair(5, {"b": 6})}
    changed = mapped(value, lambda leaf: leaf * 10)
    assert changed == {"a": [10, (20, 30)], 4: Pair(50, {"b": 60})}
    assert type(changed[4]) is Pair
    assert type(mapped(value, lambda leaf: leaf, plain)[4]) is tuple


def test_leaves_in_the_same_place_are_paired():
    assert paired({"a": [1, Pair(2, 3)]}, {"a": (4, (5, 6))}, lambda one, other: one + other) == {"a": [5, Pair(7, 9)]}


ARRAY, OTHER = np.ones(2), np.ones(3)


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ({"b": ARRAY, "a": OTHER, "none": None}, ["a", "b"]),
        ([("b", ARRAY), ("a", OTHER)], ["b", "a"]),
        ([ARRAY, None, OTHER], [0, 2]),
        (iter([ARRAY]), [0]),
    ],
)
def test_tensors_have_the_names_of_the_user_or_their_positions(params, names):
    assert [name for name, _ in named(params, np.ndarray, "")] == names


@pytest.mark.parametrize("params", [ARRAY, "text", 3])
def test_an_object_that_holds_no_tensors(params):
    with pytest.raises(InvalidRequestError, match=f"params is a {type(params).__name__}; give a dict"):
        named(params, np.ndarray, "give a dict")


def test_a_value_that_is_no_tensor_is_named():
    with pytest.raises(InvalidRequestError, match=r"params\['lr'\] is a float; .* go through broadcast_object"):
        named({"lr": 0.1}, np.ndarray, "")


def test_code_of_the_user_that_fails_on_the_root():
    def fail():
        raise KeyError("no state")

    basics.init()
    try:
        assert broadcast_structure(lambda: {"a": 1}, "the state", 0, "name", global_process_set) == {"a": 1}
        with pytest.raises(InvalidRequestError, match=r"rank 0: the state cannot be read \(KeyError: 'no state'\)"):
            broadcast_structure(fail, "the state", 0, "name", global_process_set)
    finally:
        basics.shutdown()
