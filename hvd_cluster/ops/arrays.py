"""NumPy arrays as operands, for data of our own that travels beside the user's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives import Buffer, MismatchError, Operation, ReduceOp, Work, as_buffer, empty
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.ops.arguments import Reduction
from hvd_cluster.ops.refused_calls import refusing
from hvd_cluster.ops.submission import Handle, Operand, run_all, start, start_group, synchronize


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


def broadcast_all(
    arrays: Sequence[npt.NDArray[Any]], root_rank: int, name: str, process_set: ProcessSet = global_process_set
) -> list[npt.NDArray[Any]]:
    """The arrays of the global rank ``root_rank``, matched by their position; the given ones may be overwritten.

    HorovodInternalError when they differ in shape or dtype, or a rank is lost.
    """
    given = [np.ascontiguousarray(array) for array in arrays]
    run_all(
        partial(_start, _known(array), f"{name}.{number}", process_set, root_rank) for number, array in enumerate(given)
    )
    return [array.reshape(like.shape) for array, like in zip(given, arrays, strict=True)]


def _start(array: npt.NDArray[Any], name: str, process_set: ProcessSet, root_rank: int) -> Handle:
    with refusing(Operation.BROADCAST, name, process_set):
        return start(Operation.BROADCAST, in_place, array, name, process_set, root_rank=root_rank)


def _known(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """As signed integers of the same size, if the engine may not know the dtype, such as uint32 or float8."""
    return array.view(f"i{array.itemsize}") if array.dtype.kind in "uV" else array


def combined_rows(
    indices: npt.NDArray[np.int64],
    rows: npt.NDArray[Any],
    shape: tuple[int, ...],
    name: str,
    process_set: ProcessSet,
    how: Reduction,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """The sum or the average over all ranks of arrays of one ``shape`` of which each rank has some ``rows``.

    Returns indices, in order and each once, and their rows: the same bits on all ranks. MismatchError, on all ranks,
    where the shapes differ.
    """
    pieces = [indices, rows, np.array([shape], np.int64)]
    all_indices, all_rows, shapes = synchronize(
        start_group(Operation.ALLGATHER, gathered, pieces, list, name, process_set)
    )
    if (shapes != shapes[0]).any():
        raise MismatchError(
            f"sparse tensor {name!r}: the ranks disagree about the shape: {shapes.tolist()}; give them one shape"
        )
    unique, places = np.unique(all_indices, return_inverse=True)
    total = np.zeros((len(unique), *rows.shape[1:]), np.promote_types(rows.dtype, np.float32))
    np.add.at(total, places.reshape(-1), all_rows)
    divisor = process_set.size() or 1 if how.op is ReduceOp.AVERAGE else 1
    total *= how.prescale_factor * how.postscale_factor / divisor
    return unique, total.astype(rows.dtype)
