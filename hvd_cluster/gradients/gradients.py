"""The gradients of a bucket: dense, sparse, or absent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeAlias, TypeVar

from collectives.api import EngineError
from hvd_cluster.gradients.binding import Binding
from hvd_cluster.gradients.bucket import Bucket
from hvd_cluster.gradients.layout import ABSENT, DENSE, FROZEN

P = TypeVar("P")
Tensor: TypeAlias = Any
"""A gradient, or another tensor of the framework."""


def gradient_of(binding: Binding[P], parameter: P) -> Tensor:
    """The gradient of ``parameter``; EngineError if it is gone."""
    gradient = binding.gradient(parameter)
    if gradient is None:
        raise EngineError("a gradient was removed while it was in flight; keep .grad until step() has returned")
    return gradient


class Gradients(Generic[P]):
    """The gradients of ``members`` of ``bucket``. Members without one, the ``absent`` ones, get one of zeros.

    ``agreed`` has the gradients that the ranks agreed to be sparse, and their numbers of sparse dimensions. With
    ``as_dense`` gradients that are sparse have a dense copy until :meth:`restore`.
    """

    def __init__(self, bucket: Bucket[P], members: Sequence[P], binding: Binding[P], as_dense: bool) -> None:
        self.members = dict.fromkeys(members)
        self._bucket = bucket
        self._binding = binding
        self._dense: dict[P, Tensor] = {}
        self.absent = self._complete()
        self._from_sparse = self._densify() if as_dense else {}
        self.agreed: dict[P, int] = {} if as_dense else bucket.sparse

    def _complete(self) -> set[P]:
        """Make gradients sparse where the ranks agreed on that; returns the parameters that get a gradient of zeros."""
        gradient = self._binding.gradient
        absent = {parameter for parameter in self.members if gradient(parameter) is None}
        for parameter in absent:
            self._binding.set_zeros(parameter)
        for parameter, dimensions in self._bucket.sparse.items():
            if parameter in self.members:
                self._sparsify(parameter, dimensions)
        return absent

    def _densify(self) -> dict[P, int]:
        """Make dense copies of sparse gradients; returns the number of sparse dimensions of each."""
        found = {each: self._binding.sparse_dimensions(self.of(each)) for each in self.members}
        sparse = {each: dimensions for each, dimensions in found.items() if dimensions is not None}
        self._bucket.sparse.update(sparse)
        for parameter in sparse:
            self._dense[parameter] = self._binding.to_dense(self.of(parameter))
        return sparse

    def _sparsify(self, parameter: P, dimensions: int) -> None:
        gradient = self.of(parameter)
        if self._binding.sparse_dimensions(gradient) is None:
            self._binding.set_gradient(parameter, self._binding.to_sparse(gradient, dimensions))

    def of(self, parameter: P) -> Tensor:
        """The gradient of ``parameter``, or its dense copy; EngineError if it is gone."""
        dense = self._dense.get(parameter)
        return gradient_of(self._binding, parameter) if dense is None else dense

    def has_unknown(self) -> bool:
        """Whether a gradient is sparse, and the ranks have not agreed on that."""
        dimensions = self._binding.sparse_dimensions
        return any(dimensions(self.of(each)) is not None for each in self.members if each not in self.agreed)

    def agree(self, sparse: dict[P, int]) -> None:
        """The gradients of ``sparse`` are sparse on all ranks that have one."""
        self.agreed.update(sparse)
        for parameter in self.absent & sparse.keys():
            self._sparsify(parameter, sparse[parameter])

    def restore(self) -> None:
        """Make the combined gradients sparse again that became dense."""
        for parameter, dimensions in self._from_sparse.items():
            self._sparsify(parameter, dimensions)

    def entry(self, parameter: P) -> tuple[int, int, int]:
        if parameter not in self.members:
            kind = FROZEN
        elif parameter in self.absent:
            kind = ABSENT
        else:
            dimensions = self._binding.sparse_dimensions(self.of(parameter))
            kind = DENSE if dimensions is None else dimensions
        return kind, self._binding.count(parameter), int(parameter in self.agreed)
