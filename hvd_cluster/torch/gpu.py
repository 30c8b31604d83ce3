"""Torch's tensors on a GPU: their streams and events, and which GPU is that of this rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from collectives import Buffer, DType, InvalidRequestError, Work, completion, override, presence
from hvd_cluster.core import basics

_cuda: Any = torch.cuda  # which is not annotated


class Recorded(completion.Polled):
    """The end of all that was enqueued on the current stream of GPU ``index``."""

    def __init__(self, index: int) -> None:
        self._event = _cuda.Event()
        self._event.record(_cuda.current_stream(index))
        self._index = index

    @property
    @override
    def is_done(self) -> bool:
        return bool(self._event.query())

    @override
    def precede(self, stream: int) -> None:
        self._event.wait(_cuda.ExternalStream(stream, self._index))


class _Place:
    """The GPU of this rank: that of its first tensor, as long as one engine runs."""

    def __init__(self) -> None:
        self._engine: Callable[[], object] = lambda: None
        self._index = -1

    def require(self, index: int) -> None:
        """InvalidRequestError if ``index`` is not that GPU."""
        engine = basics.engine()
        if engine is not self._engine():
            self._engine, self._index = weakref.ref(engine), index
            presence.place.index = index
        if index != self._index:
            raise InvalidRequestError(
                f"the tensor is on cuda:{index}, but the first one of this rank was on cuda:{self._index}; "
                "call torch.cuda.set_device(hvd.local_rank()) first, and move the model and the data there"
            )


_first = _Place()


def require_usable(tensor: torch.Tensor) -> None:
    """InvalidRequestError for a tensor on another GPU than the earlier ones, and while a CUDA graph is captured."""
    _first.require(tensor.get_device())
    if _cuda.is_current_stream_capturing():
        raise InvalidRequestError(
            "an operation between ranks cannot be captured in a CUDA graph: the ranks agree on its order each time; "
            "capture the model alone, and call the operation or optimizer.step() after the replay"
        )


def buffer(tensor: torch.Tensor, dtype: DType, address: int | None = None) -> Buffer:
    """View a contiguous, detached tensor as a buffer, which is ready when the current stream has come so far.

    To ask a tensor for its ``address`` counts as writing to it.
    """
    ready = Recorded(tensor.get_device())
    address = tensor.data_ptr() if address is None else address
    return Buffer(None, dtype, tuple(tensor.shape), tensor, "cuda", address, ready)


def allocator(like: torch.Tensor, dtype: DType) -> Callable[[tuple[int, ...]], Buffer]:
    """A function that makes a tensor on the GPU of ``like``, as if the present stream were still the current one.

    So the memory belongs to the stream of the caller, who uses the result.
    """
    index = like.get_device()
    stream = _cuda.current_stream(index)

    def allocate(shape: tuple[int, ...]) -> Buffer:
        with _cuda.device(index), _cuda.stream(stream):  # stream alone would go back to GPU 0, and make a context there
            return buffer(torch.empty(shape, dtype=like.dtype, device=like.device), dtype)

    return allocate


def await_end(work: Work) -> None:
    """Let the current stream wait for the operation of ``work``; this thread does not."""
    work.end.precede(_cuda.current_stream(work.result().owner.get_device()).cuda_stream)
