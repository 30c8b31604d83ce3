"""The adapter: torch tensor -> buffer, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from collectives.api import DType, InvalidRequestError
from collectives.buffers import Buffer

__all__ = ["allocator", "as_input", "require_tensor", "require_writable", "to_buffer"]

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
}


def require_tensor(tensor: Any) -> torch.Tensor:
    """``tensor``; InvalidRequestError when it is none."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidRequestError(f"a {type(tensor).__name__} is not a torch.Tensor; use torch.as_tensor(...) first")
    return tensor


def require_writable(tensor: torch.Tensor) -> None:
    """InvalidRequestError for an expanded tensor, several of whose elements are one place in memory."""
    if any(stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True)):
        raise InvalidRequestError(
            f"an expanded tensor of shape {tuple(tensor.shape)} cannot be overwritten; call clone() first"
        )


def as_input(tensor: Any) -> torch.Tensor:
    """``tensor`` detached and contiguous, a copy only where it is not; InvalidRequestError for what cannot travel."""
    require_tensor(tensor)
    if tensor.dtype not in _DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise InvalidRequestError(
            f"Tensor type {tensor.dtype} is not supported; convert the tensor to one of: {allowed}"
        )
    if tensor.layout is not torch.strided:
        raise InvalidRequestError(f"a tensor of layout {tensor.layout} is not supported; call to_dense() first")
    if tensor.device.type != "cpu":
        raise InvalidRequestError(f"a tensor on {tensor.device} is not supported; move it to the CPU first")
    plain: torch.Tensor = tensor.detach().contiguous().resolve_neg()
    return plain


def to_buffer(tensor: torch.Tensor) -> Buffer:
    """View a contiguous, detached tensor on the CPU as a buffer; the tensor is the buffer's owner."""
    flat = tensor.view(-1)
    is_bfloat16 = tensor.dtype is torch.bfloat16  # which NumPy does not have
    array = flat.view(torch.int16).numpy().view(np.uint16) if is_bfloat16 else flat.numpy()
    return Buffer(array, _DTYPES[tensor.dtype], tuple(tensor.shape), tensor)


def allocator(like: torch.Tensor) -> Callable[[tuple[int, ...]], Buffer]:
    """A function that makes a buffer, of the shape it is given, for a result of the type of ``like``."""

    def allocate(shape: tuple[int, ...]) -> Buffer:
        return to_buffer(torch.empty(shape, dtype=like.dtype))

    return allocate
