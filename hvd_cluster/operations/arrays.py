"""NumPy arrays as operands, for data of our own that travels beside the user's tensors."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from collectives.buffers import Buffer, as_buffer, empty
from collectives.engine.work import Work
from hvd_cluster.operations.operands import Operand

__all__ = ["gathered", "in_place"]


def gathered(array: npt.NDArray[Any]) -> Operand:
    """For an allgather: the result is a new array with the rows of all members."""
    source = as_buffer(array)

    def allocate(shape: tuple[int, ...]) -> Buffer:
        return empty(source.dtype, shape)

    return Operand(source, allocate, _owner)


def in_place(array: npt.NDArray[Any]) -> Operand:
    """The result overwrites ``array``."""
    buffer = as_buffer(array)
    return Operand(buffer, buffer, _owner)


def _owner(work: Work) -> npt.NDArray[Any]:
    result: npt.NDArray[Any] = work.result().owner
    return result
