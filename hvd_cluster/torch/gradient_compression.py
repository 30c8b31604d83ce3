"""Compressors of gradients, which may remember something from step to step and need several rounds over the network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Any, TypeAlias

import torch

from collectives.api import InvalidRequestError

__all__ = ["GradientCompression", "GradientCompressor", "Rounds", "compressor_for", "require_gradient_compression"]

Rounds: TypeAlias = Generator[torch.Tensor, torch.Tensor, torch.Tensor]


class GradientCompressor(ABC):
    """Compresses the gradients of one parameter. Write your own as a subclass whose constructor takes the parameter::

        class Signs(GradientCompressor):
            def __init__(self, parameter):
                self.error = torch.zeros_like(parameter)

            def rounds(self, gradient):
                wanted = gradient + self.error
                sent = wanted.sign() * wanted.abs().mean()
                self.error = wanted - sent
                return (yield sent)

    and give the class to ``DistributedOptimizer(compression=Signs)``, which makes one object for each parameter; for
    more arguments use ``functools.partial``. All ranks yield tensors of the same shapes in the same rounds.
    """

    elementwise = False
    """Whether it remembers nothing and treats each element alone: then it may be given several gradients as one."""

    @abstractmethod
    def rounds(self, gradient: torch.Tensor) -> Rounds:
        """Yield tensors to be combined over all ranks, one at a time; return the combined gradient.

        ``gradient`` is dense, of any memory layout. Each yield gives the combination (average or sum, as the optimizer
        was told) of the tensors that the ranks yielded; these are overwritten. What is returned has the number of
        elements and the dtype of ``gradient``, may be ``gradient`` itself, and belongs to the caller.
        """


class _Stateless(GradientCompressor):
    """A compressor with ``compress`` and ``decompress``, in one round."""

    def __init__(self, compressor: Any) -> None:
        self._compressor = compressor
        self.elementwise = bool(getattr(compressor, "elementwise", False))

    def rounds(self, gradient: torch.Tensor) -> Rounds:
        small, context = self._compressor.compress(gradient)
        result: torch.Tensor = self._compressor.decompress((yield small), context)
        return result


GradientCompression: TypeAlias = Any
"""A stateless compressor, or a function that makes a :class:`GradientCompressor` for a parameter."""


def _is_stateless(compression: GradientCompression) -> bool:
    return callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None))


def require_gradient_compression(compression: GradientCompression) -> None:
    """InvalidRequestError for what cannot compress gradients."""
    if not (_is_stateless(compression) or callable(compression)):
        raise InvalidRequestError(
            f"compression={compression!r} has no compress and decompress; use one of Compression, a subclass of "
            "Compressor, or a subclass of GradientCompressor"
        )


def compressor_for(compression: GradientCompression, parameter: torch.Tensor) -> GradientCompressor:
    """The one for the gradients of ``parameter``; InvalidRequestError when ``compression`` makes something else."""
    if _is_stateless(compression):
        return _Stateless(compression)
    made = compression(parameter)
    if not isinstance(made, GradientCompressor):
        raise InvalidRequestError(f"compression={compression!r} made a {type(made).__name__}, no GradientCompressor")
    return made
