"""The adapter: MXNet's NDArray -> buffer, and back.

Memory is looked up late: an array may have none before its first write, and oneDNN may move it into a *blocked* layout,
which has no plain address. Inside a node of MXNet's engine nothing may wait, so that is an error there.
"""

from __future__ import annotations

import ctypes as c
from functools import partial
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, check_call

from collectives import Buffer, DType, InvalidRequestError
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.ops.arguments import Reduction, require_sparse_op
from hvd_cluster.ops.arrays import combined_rows
from hvd_cluster.ops.submission import Operand, at_address

NDArray = mx.nd.NDArray
Array = Any
"""An NDArray."""

_DTYPES = {
    np.dtype(dtype.storage): dtype
    for dtype in (DType.FLOAT16, DType.FLOAT32, DType.FLOAT64, DType.UINT8, DType.INT8, DType.INT32, DType.INT64)
}
_DTYPES[np.dtype(bool)] = DType.BOOL
_DEVICES = ("cpu", "cpu_pinned", "cpu_shared")


def checked(tensor: Any, stype: str = "default") -> Array:
    """``tensor``; InvalidRequestError unless it is an NDArray, in host memory, of a dtype and a layout that travel."""
    if not isinstance(tensor, NDArray):
        raise InvalidRequestError(f"a {type(tensor).__name__} is not an mxnet NDArray; use mx.nd.array(...) first")
    if tensor.ctx.device_type not in _DEVICES:
        raise InvalidRequestError(f"an array on {tensor.ctx} is not supported; call as_in_context(mx.cpu()) first")
    if np.dtype(tensor.dtype) not in _DTYPES:
        allowed = ", ".join(dtype.label for dtype in _DTYPES.values())
        raise InvalidRequestError(f"dtype {tensor.dtype} is not supported; convert the array to one of: {allowed}")
    if tensor.stype != stype:
        raise InvalidRequestError(
            f"an array of storage type {tensor.stype!r} is not supported here; call tostype('default') first, or give "
            "a 'row_sparse' one to allreduce"
        )
    return tensor


def is_sparse(tensor: Any) -> bool:
    """Whether it has some rows only, as the gradient of ``Embedding(sparse_grad=True)``."""
    return getattr(tensor, "stype", None) == "row_sparse"


def may_be_blocked(tensor: Array) -> bool:
    """Whether oneDNN may have moved the array into a layout that no other library reads: outputs of convolutions."""
    return 3 <= len(tensor.shape) <= 5


def _buffer(array: Array, address: int) -> Buffer:
    dtype, shape = _DTYPES[np.dtype(array.dtype)], tuple(array.shape)
    memory = at_address(address, array.size * dtype.itemsize).view(dtype.storage)
    return Buffer(memory, dtype, shape, array)


def buffer_in_node(array: Array) -> Buffer:
    """The memory of ``array``, in a node that writes it; no wait. InvalidRequestError for a blocked layout."""
    tensor = c.POINTER(c.c_void_p)()
    if _LIB.MXNDArrayToDLPack(array.handle, c.byref(tensor)):
        raise InvalidRequestError(
            f"an array of shape {array.shape} has a layout of oneDNN, which cannot be combined in place; use "
            "allreduce_(), or set MXNET_MKLDNN_ENABLED=0"
        )
    try:
        return _buffer(array, tensor[0] or 0)
    finally:
        _LIB.MXNDArrayCallDLPackDeleter(tensor)


def buffer_now(array: Array) -> Buffer:
    """The memory of ``array``, after a wait for those that write it; not in a node. MXNet raises their errors."""
    array.wait_to_read()
    address = c.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, c.byref(address)))
    return _buffer(array, address.value or 0)


def _fresh(like: Array, shape: tuple[int, ...]) -> Buffer:
    """That of a new array of ``shape``, with any content, of the type of ``like``."""
    with mx.util.np_shape(mx.util.is_np_shape() or 0 in shape):
        array = mx.nd.empty(shape, like.ctx, like.dtype)
    return buffer_now(array.as_np_ndarray() if isinstance(like, mx.np.ndarray) else array)


def resized(tensor: Any) -> Operand:
    """The result is a new array; its number of rows depends on the arrays of all ranks."""
    source = checked(tensor)
    return Operand(buffer_now(source), partial(_fresh, source), lambda work: work.result().owner)


def with_splits(tensor: Any) -> Operand:
    """The result is a pair: the array of other shape, and the number of its rows from each member, in int32."""
    operand = resized(tensor)
    splits = partial(mx.nd.array, dtype="int32")
    return operand._replace(finish=lambda work: (operand.finish(work), splits(work.received_splits)))


def combined(tensor: Array, name: str, process_set: ProcessSet, how: Reduction) -> Array:
    """A new row_sparse array with the rows of all ranks; waits for them.

    InvalidRequestError for an op other than Average and Sum. MismatchError, on all ranks, where their shapes differ.
    """
    require_sparse_op(how.op, False)
    checked(tensor, "row_sparse")
    indices = tensor.indices.asnumpy().astype(np.int64)
    rows = tensor.data.asnumpy() if indices.size else np.empty((0, *tensor.shape[1:]), tensor.dtype)
    unique, total = combined_rows(indices, rows, tensor.shape, name, process_set, how)
    if not unique.size:
        return mx.nd.sparse.zeros("row_sparse", tensor.shape, tensor.ctx, tensor.dtype)
    return mx.nd.sparse.row_sparse_array((total, unique), tensor.shape, tensor.ctx, tensor.dtype)
