"""Compressors: the conversion of tensors before and after they travel. The same contract for all frameworks.

A *stateless* compressor has ``compress`` and ``decompress``. A :class:`GradientCompressor` serves one parameter of a
DistributedOptimizer; it may keep state from step to step and use several rounds over the network.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable
from typing import Any, TypeAlias

from collectives import HorovodInternalError, InvalidRequestError, override

Tensor: TypeAlias = Any
"""A tensor of the binding's framework."""
Rounds: TypeAlias = Generator[Tensor, Tensor, Tensor]


class Compressor:
    """Turns a tensor into the one that travels, and back. Subclasses are used as classes, never instantiated."""

    elementwise = False
    """Whether each element is treated alone: then one tensor may hold several gradients."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor to send, and the context that :meth:`decompress` needs to undo it."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The received tensor as it was before :meth:`compress`."""
        raise NotImplementedError


class IntoCompressor(Compressor):
    """A compressor that can write into existing memory: new memory for each gradient costs page faults."""

    @staticmethod
    def decompress_into(tensor: Tensor, ctx: Any, target: Tensor) -> None:
        """Overwrite ``target``, which was given to :meth:`compress`, with the result of :meth:`decompress`."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    elementwise = True

    @staticmethod
    @override
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    @override
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class CastCompressor(Compressor):
    """Sends floating-point tensors as ``dtype``, which has 16 bits; others as they are."""

    elementwise = True
    dtype: Any

    @staticmethod
    def float_type(tensor: Tensor) -> Any:
        """The dtype of a floating-point tensor; None for others."""
        raise NotImplementedError

    @staticmethod
    def cast(tensor: Tensor, dtype: Any) -> Tensor:
        """``tensor`` as ``dtype``."""
        raise NotImplementedError

    @classmethod
    @override
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        dtype = cls.float_type(tensor)
        return (tensor, None) if dtype is None else (cls.cast(tensor, cls.dtype), dtype)

    @classmethod
    @override
    def decompress(cls, tensor: Tensor, ctx: Any) -> Tensor:
        return tensor if ctx is None else cls.cast(tensor, ctx)


def _is_stateless(compression: Any) -> bool:
    return callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None))


def require_compressor(compression: Any) -> None:
    """InvalidRequestError unless ``compression`` has ``compress`` and ``decompress``, as any object may."""
    if not _is_stateless(compression):
        raise InvalidRequestError(
            f"compression={compression!r} has no compress and decompress; use Compression.none, fp16 or bf16, or a "
            "subclass of Compressor"
        )


def compressed(compression: type[Compressor], tensor: Tensor) -> tuple[Tensor, Any]:
    """The tensor to send for ``tensor``, and the context that ``decompress`` needs.

    InvalidRequestError if ``compress`` fails, which may be code of the user: nothing was submitted then.
    """
    require_compressor(compression)
    try:
        small, context = compression.compress(tensor)
    except HorovodInternalError:  # of a collective in the compressor
        raise
    except Exception as error:
        reason = traceback.format_exception_only(error)[0].strip()
        raise InvalidRequestError(f"compression={compression!r} failed ({reason}); correct its compress()") from error
    return small, context


def compress_all(compression: type[Compressor], tensors: Iterable[Tensor]) -> tuple[list[Tensor], list[Any]]:
    """The tensors to send for the tensors of a group, and the contexts that :func:`decompress_all` needs."""
    pairs = [compressed(compression, tensor) for tensor in tensors]
    return [small for small, _ in pairs], [context for _, context in pairs]


def decompress_all(compression: type[Compressor], results: Iterable[Tensor], contexts: Iterable[Any]) -> list[Tensor]:
    """The received tensors of a group as they were before :func:`compress_all`."""
    return [compression.decompress(result, context) for result, context in zip(results, contexts, strict=True)]


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
    """Whether it keeps no state and treats each element alone: then one tensor may hold several gradients."""
    has_later_rounds = True
    """Whether it may yield more than once."""
    repeatable = False
    """Whether its state stays the same until it has received the result of its last round. Then its gradients travel
    during backward: the rounds begin again if the script changes a gradient before the step."""
    is_identity = False
    """Whether the gradient itself travels, in one round, and its combination is the result: then nobody has to call
    :meth:`rounds`."""

    @abstractmethod
    def rounds(self, gradient: Tensor) -> Rounds:
        """Yield tensors to be combined over all ranks, one at a time; return the combined gradient.

        ``gradient`` is dense, of any memory layout. Each yield gives the combination (by the ``op`` of the
        optimizer) of the tensors that the ranks yielded; these are overwritten. The returned tensor has the number of
        elements and the dtype of ``gradient``, may be ``gradient`` itself, and belongs to the caller.
        """

    def rounds_beside(self, gradient: Tensor, target: Tensor) -> Rounds:
        """As :meth:`rounds`, but ``gradient`` should not be overwritten; the result may be ``target``."""
        return self.rounds(gradient)


def _writer(compressor: Any) -> Any:
    """Its ``decompress_into``, if it belongs to its ``decompress``: a subclass may have overridden one alone."""
    if not (isinstance(compressor, type) and issubclass(compressor, IntoCompressor)):
        return None
    definers = [
        next(base for base in compressor.__mro__ if name in vars(base)) for name in ("decompress", "decompress_into")
    ]
    return compressor.decompress_into if definers[0] is definers[1] else None


class _Stateless(GradientCompressor):
    """A compressor with ``compress`` and ``decompress``, in one round."""

    has_later_rounds = False
    repeatable = True

    def __init__(self, compressor: Any) -> None:
        self._compressor = compressor
        self._decompress_into = _writer(compressor)
        self.elementwise = bool(getattr(compressor, "elementwise", False))
        self.is_identity = compressor is NoneCompressor

    def rounds(self, gradient: Tensor) -> Rounds:
        return self.rounds_beside(gradient, gradient)

    def rounds_beside(self, gradient: Tensor, target: Tensor) -> Rounds:
        small, context = self._compressor.compress(gradient)
        del gradient  # if nothing else refers to it, ``target`` need not become a copy
        received = yield small
        del small
        if self._decompress_into is None:
            return self._compressor.decompress(received, context)
        self._decompress_into(received, context, target)
        return target


GradientCompression: TypeAlias = Any
"""A stateless compressor, or a function that makes a :class:`GradientCompressor` for a parameter."""


def require_gradient_compression(compression: GradientCompression) -> None:
    """InvalidRequestError for an object that cannot compress gradients."""
    if not (_is_stateless(compression) or callable(compression)):
        raise InvalidRequestError(
            f"compression={compression!r} has no compress and decompress; use one of Compression, a subclass of "
            "Compressor, or a subclass of GradientCompressor"
        )


def compressor_for(compression: GradientCompression, parameter: Tensor) -> GradientCompressor:
    """The compressor for ``parameter``; InvalidRequestError if ``compression`` makes an object of another kind."""
    if _is_stateless(compression):
        return _Stateless(compression)
    made = compression(parameter)
    if not isinstance(made, GradientCompressor):
        raise InvalidRequestError(
            f"compression={compression!r} made a {type(made).__name__}; let it make a GradientCompressor"
        )
    return made
