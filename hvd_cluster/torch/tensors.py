"""The adapter: torch tensor -> buffer, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from collectives.api import DType, InvalidRequestError
from collectives.buffers import Buffer

__all__ = ["allocator", "as_input", "memory_format", "require_tensor", "require_writable", "to_buffer"]

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
_MEMORY_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def require_tensor(tensor: Any) -> torch.Tensor:
    """``tensor``; InvalidRequestError when it is none."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidRequestError(f"a {type(tensor).__name__} is not a torch.Tensor; use torch.as_tensor(...) first")
    return tensor


def require_writable(tensor: torch.Tensor) -> None:
    """InvalidRequestError for an expanded tensor, several of whose elements are one place in memory."""
    strides = tensor.stride()
    if 0 in strides and any(stride == 0 and length > 1 for stride, length in zip(strides, tensor.shape, strict=True)):
        raise InvalidRequestError(
            f"an expanded tensor of shape {tuple(tensor.shape)} cannot be overwritten; call clone() first"
        )


def as_input(tensor: Any) -> torch.Tensor:
    """``tensor`` detached and contiguous, a copy only where it is not; InvalidRequestError for what cannot travel."""
    require_tensor(tensor)
    if tensor.dtype not in _DTYPES or tensor.layout is not torch.strided or not tensor.is_cpu:
        raise _cannot_travel(tensor)
    plain: torch.Tensor = tensor.detach().contiguous()
    return plain.resolve_conj().resolve_neg() if plain.is_conj() or plain.is_neg() else plain


def _cannot_travel(tensor: torch.Tensor) -> InvalidRequestError:
    if tensor.dtype not in _DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        return InvalidRequestError(
            f"Tensor type {tensor.dtype} is not supported; convert the tensor to one of: {allowed}"
        )
    if tensor.is_meta:
        return InvalidRequestError("a tensor on meta has no data; make it real first, with module.to_empty(device=...)")
    if tensor.layout is torch.sparse_coo:
        return InvalidRequestError(
            "a sparse tensor is not supported here; call to_dense() first, or use sparse_allreduce_async()"
        )
    if tensor.layout is not torch.strided:
        return InvalidRequestError(f"a tensor of layout {tensor.layout} is not supported; call to_dense() first")
    return InvalidRequestError(f"a tensor on {tensor.device} is not supported; move it to the CPU first")


def memory_format(tensor: torch.Tensor) -> torch.memory_format:
    """That of a dense tensor: channels last where it is that, and not the usual one as well."""
    if not tensor.is_contiguous():
        candidate = _MEMORY_FORMATS.get(tensor.dim())
        if candidate is not None and tensor.is_contiguous(memory_format=candidate):
            return candidate
    return torch.contiguous_format


def to_buffer(tensor: torch.Tensor) -> Buffer:
    """View a contiguous, detached tensor on the CPU as a buffer; the tensor is the buffer's owner."""
    is_bfloat16 = tensor.dtype is torch.bfloat16  # which NumPy does not have
    array = tensor.view(torch.int16).numpy().view(np.uint16) if is_bfloat16 else tensor.numpy()
    return Buffer(array.reshape(-1), _DTYPES[tensor.dtype], array.shape, tensor)


def allocator(like: torch.Tensor) -> Callable[[tuple[int, ...]], Buffer]:
    """A function that makes a buffer, of the shape it is given, for a result of the type of ``like``."""

    def allocate(shape: tuple[int, ...]) -> Buffer:
        return to_buffer(torch.empty(shape, dtype=like.dtype))

    return allocate
