"""The parts of a list of gradients that a binding inherits. Tensors are NumPy arrays."""

import numpy as np
import pytest

from collectives.api import InvalidRequestError, ReduceOp
from hvd_cluster.core.process_sets import global_process_set
from hvd_cluster.gradients.lists import ListBinding, Shipment, by_shipment
from hvd_cluster.gradients.targets import Target


class ArrayLists(ListBinding):
    """The part of a binding with dense gradients, as far as nothing travels."""

    @staticmethod
    def concatenate(tensors):
        return np.concatenate(tensors)

    @staticmethod
    def split(packed, sizes):
        return np.split(packed, np.cumsum(sizes)[:-1])


def target(shape):
    return Target(0, "x", shape, "float32", None)


def test_packed_gradients_come_back_in_their_shapes():
    shapes = [(2, 3), (), (0, 4), (5,)]
    given = [np.full(shape, number, np.float32) for number, shape in enumerate(shapes)]
    packed = ArrayLists().pack(given)
    assert packed.shape == (12,)
    parts = ArrayLists().unpack(packed, [target(shape) for shape in shapes])
    assert [part.shape for part in parts] == shapes
    assert all(np.array_equal(part, each) for part, each in zip(parts, given, strict=True))


def test_combined_tensors_are_those_of_their_shipment():
    shipments = [Shipment("a", [1, 2]), Shipment("none", []), Shipment("b", [3])]
    assert by_shipment(iter("xyz"), shipments) == [["x", "y"], [], ["z"]]


def test_a_gradient_of_a_framework_without_sparse_ones_is_dense():
    gradient = np.ones(3)
    assert not ArrayLists().is_sparse(gradient)
    assert ArrayLists().to_dense(gradient, target((3,))) is gradient
    with pytest.raises(InvalidRequestError, match="'x' is not sparse"):
        ArrayLists().gather(gradient, "x", ReduceOp.SUM, global_process_set, None)
