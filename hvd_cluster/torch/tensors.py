"""The adapter: torch tensor -> buffer, and back; and operands: the memory that is read, and the one that is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from collectives import Buffer, DType, InvalidRequestError, Work, completion
from hvd_cluster.core import memory
from hvd_cluster.ops.submission import Finish, Operand, at_address
from hvd_cluster.torch import gpu

_DTYPES: dict[torch.dtype, DType] = {
    torch.uint8: DType.UINT8,
    torch.int8: DType.INT8,
    torch.int16: DType.INT16,
    torch.int32: DType.INT32,
    torch.int64: DType.INT64,
    torch.float16: DType.FLOAT16,
    torch.bfloat16: DType.BFLOAT16,
    torch.float32: DType.FLOAT32,
    torch.float64: DType.FLOAT64,
    torch.bool: DType.BOOL,
    torch.complex64: DType.COMPLEX64,
    torch.complex128: DType.COMPLEX128,
}
# ``new_empty`` of a tensor takes half the time of ``torch.empty``, and needs no care for a default device.
_PROTOTYPES = {native: torch.empty(0, dtype=native, device="cpu") for native in _DTYPES}
_MEMORY_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def require_tensor(tensor: Any) -> torch.Tensor:
    """``tensor``; InvalidRequestError if it is no tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidRequestError(f"a {type(tensor).__name__} is not a torch.Tensor; use torch.as_tensor(...) first")
    return tensor


def require_writable(tensor: torch.Tensor) -> None:
    """InvalidRequestError for an expanded tensor: several of its elements share one address."""
    strides = tensor.stride()
    if 0 in strides and any(stride == 0 and length > 1 for stride, length in zip(strides, tensor.shape, strict=True)):
        raise InvalidRequestError(
            f"an expanded tensor of shape {tuple(tensor.shape)} cannot be overwritten; call clone() first"
        )


def as_input(tensor: Any) -> torch.Tensor:
    """``tensor`` detached and contiguous, copied only if necessary; InvalidRequestError if it cannot travel."""
    require_tensor(tensor)
    if not tensor.is_cpu:
        _require_gpu(tensor)
    if tensor.dtype not in _DTYPES or tensor.layout is not torch.strided or tensor.is_nested:
        raise _cannot_travel(tensor)
    plain: torch.Tensor = tensor.detach().contiguous()
    if plain.is_conj() or plain.is_neg():
        return plain.resolve_conj().resolve_neg()
    return plain.clone() if plain._is_zerotensor() else plain


def _require_gpu(tensor: torch.Tensor) -> None:
    if not tensor.is_cuda:
        raise _cannot_travel(tensor)
    gpu.require_usable(tensor)


def _cannot_travel(tensor: torch.Tensor) -> InvalidRequestError:
    if tensor.is_quantized:
        return InvalidRequestError(f"a quantized tensor, of {tensor.dtype}, is not supported; call dequantize() first")
    if tensor.dtype not in _DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        return InvalidRequestError(
            f"Tensor type {tensor.dtype} is not supported; convert the tensor to one of: {allowed}"
        )
    if tensor.is_meta:
        return InvalidRequestError(
            "a tensor on the meta device has no data; create the data first, with module.to_empty(device=...)"
        )
    if tensor.is_nested:
        return InvalidRequestError(
            f"a nested tensor, of layout {tensor.layout}, is not supported; give the list of its tensors, "
            "tensor.unbind(), to a grouped operation, or call to_padded_tensor(0.0) first"
        )
    if tensor.layout is torch.sparse_coo:
        return InvalidRequestError(
            "a sparse tensor is not supported here; call to_dense() first, or use sparse_allreduce_async()"
        )
    if tensor.layout is not torch.strided:
        return InvalidRequestError(f"a tensor of layout {tensor.layout} is not supported; call to_dense() first")
    return InvalidRequestError(f"a tensor on {tensor.device} is not supported; move it to the CPU first")


def memory_format(tensor: torch.Tensor) -> torch.memory_format:
    """The format of a dense tensor: channels last only if it is not contiguous in the usual format as well."""
    if not tensor.is_contiguous():
        candidate = _MEMORY_FORMATS.get(tensor.dim())
        if candidate is not None and tensor.is_contiguous(memory_format=candidate):
            return candidate
    return torch.contiguous_format


def to_buffer(tensor: torch.Tensor) -> Buffer:
    """View a contiguous, detached tensor as a buffer; the tensor is the buffer's owner.

    InvalidRequestError if its numbers are not in its own memory.
    """
    if tensor.is_cuda:
        return gpu.buffer(tensor, _DTYPES[tensor.dtype])
    is_bfloat16 = tensor.dtype is torch.bfloat16  # which NumPy does not have
    try:
        array = tensor.view(torch.int16).numpy().view(np.uint16) if is_bfloat16 else tensor.numpy()
    except RuntimeError as error:
        raise InvalidRequestError(
            f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} has no memory of its own here ({error}); give "
            "the plain tensors that it stands for, such as to_local() of a DTensor"
        ) from error
    if not tensor.data_ptr() and array.size:
        raise InvalidRequestError(
            f"the memory of a tensor of shape {tuple(tensor.shape)} has been freed, as a sharding library does between "
            "uses; gather its elements first"
        )
    return Buffer(array if array.ndim == 1 else array.reshape(-1), _DTYPES[tensor.dtype], array.shape, tensor)


def shared_buffer(tensor: torch.Tensor, address: int) -> Buffer:
    """As :func:`to_buffer`, to read only: a tensor that shares its memory, from ``address``, keeps sharing it."""
    dtype = _DTYPES[tensor.dtype]
    if tensor.is_cuda:
        return gpu.buffer(tensor, dtype, address)
    array = at_address(address, tensor.numel() * tensor.element_size(), False).view(dtype.storage)
    return Buffer(array, dtype, tuple(tensor.shape), tensor)


def fresh(shape: tuple[int, ...], native: torch.dtype) -> Buffer:
    """A new tensor of ``shape`` on the CPU, with any content; the tensor is the buffer's owner.

    Memory of at least ``memory.MINIMUM`` bytes is used again for later results, once no tensor views it; such a tensor
    cannot be resized in place.
    """
    nbytes = math.prod(shape) * native.itemsize
    if nbytes < memory.MINIMUM:
        return to_buffer(_PROTOTYPES[native].new_empty(shape))
    block = memory.results.take(nbytes)
    # Not a view of another tensor, which autograd would treat differently.
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    tensor = _PROTOTYPES[native].new_empty(0).set_(torch.from_numpy(block).untyped_storage(), 0, shape, strides)
    dtype = _DTYPES[native]
    return Buffer(block.view(dtype.storage), dtype, shape, tensor)


def allocator(like: torch.Tensor) -> Callable[[tuple[int, ...]], Buffer]:
    """A function that makes a buffer, of the shape it is given, for a result of the type of ``like``."""
    native = like.dtype
    if like.is_cuda:
        return gpu.allocator(like, _DTYPES[native])
    return lambda shape: fresh(shape, native)


def in_place(tensor: torch.Tensor) -> Operand:
    """The result overwrites ``tensor``, and autograd learns of the change, in case it saved ``tensor`` for backward."""
    source = as_input(tensor)
    require_writable(tensor)
    buffer = to_buffer(source)

    def finish(work: Work) -> torch.Tensor:
        _await(work)
        if source.data_ptr() != tensor.data_ptr():
            with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
                tensor.copy_(source)
        elif not tensor.is_inference():  # which has no version
            increment_version(tensor)
        return tensor

    return Operand(buffer, buffer, finish)


def of_same_shape(tensor: torch.Tensor) -> Operand:
    """The result is a new tensor of the shape of ``tensor``."""
    source = as_input(tensor)
    shape = tuple(source.shape)
    destination = fresh(shape, source.dtype) if source.is_cpu else allocator(source)(shape)
    return Operand(to_buffer(source), destination, _output_like(tensor))


def of_other_shape(tensor: torch.Tensor) -> Operand:
    """The result is a new tensor; its number of rows depends on the tensors of all ranks."""
    source = as_input(tensor)
    return Operand(to_buffer(source), allocator(source), _output_like(tensor))


def _await(work: Work) -> None:
    """Let what the caller does next with the result wait for it, where that is on a GPU."""
    if work.end is not completion.DONE:
        gpu.await_end(work)


def output(work: Work) -> torch.Tensor:
    """The result of ``work``, in memory of its own."""
    _await(work)
    tensor: torch.Tensor = work.result().owner
    return tensor


def _output_like(tensor: torch.Tensor) -> Finish:
    form = memory_format(tensor)
    if form is torch.contiguous_format:
        return output
    return lambda work: output(work).contiguous(memory_format=form)


def with_splits(tensor: torch.Tensor) -> Operand:
    """The result is a pair: the tensor of other shape, and the number of its rows from each member, in int32."""
    operand = of_other_shape(tensor)

    def finish(work: Work) -> tuple[Any, torch.Tensor]:
        return operand.finish(work), torch.tensor(work.received_splits, dtype=torch.int32, device="cpu")

    return Operand(operand.source, operand.destination, finish)
