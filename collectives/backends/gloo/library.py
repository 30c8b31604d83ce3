"""Torch's Gloo: importing it, the meaning of its errors, its exact reductions, and what members offer.

Gloo itself rounds a 16-bit sum at each hop, refuses int16, and drops NaN from MIN and MAX or keeps it, depending on the
place in the ring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgpack

from collectives.api import (
    CollectiveTimeoutError,
    DType,
    EngineError,
    HorovodInternalError,
    NoDescriptorError,
    PeerLostError,
    ReduceOp,
    SettingsError,
)
from collectives.backends.base import Group
from collectives.net import interfaces
from collectives.net.descriptors import EXHAUSTED


def import_torch() -> Any:
    """Torch with Gloo; ImportError with the remedy where it is missing."""
    try:
        import torch
        import torch.distributed
    except ImportError as error:
        raise ImportError("the gloo backend needs torch; install it with: pip install 'hvd-cluster[torch]'") from error
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        raise ImportError("this build of torch has no Gloo; install one that has, or choose another backend")
    return torch


def lacks_descriptors(error: Exception) -> bool:
    """Whether an error of Gloo or Python means that no file descriptor is left."""
    return "Too many open files" in str(error)


def cannot_listen(error: Exception, address: str) -> Exception:
    """The error for one that Gloo raised when it should listen on ``address``."""
    if lacks_descriptors(error):
        return NoDescriptorError(f"Gloo cannot listen: {EXHAUSTED} ({error})")
    allowed = ", ".join(interfaces.names())
    return SettingsError(f"Gloo cannot listen on {address!r} ({error}); the interfaces of this host are: {allowed}")


def timed_out(group: Group, text: str) -> CollectiveTimeoutError:
    """The error for an operation of ``group`` that took longer than the timeout; ``text`` describes the failure."""
    return group.late(f"did not answer in time ({text})")


def disconnected(group: Group) -> PeerLostError:
    """The error for an operation of ``group`` whose connection Gloo has closed without a word."""
    return PeerLostError(f"the connection to {group.some_others()} is gone; form a new job")


def translate(error: Exception, group: Group) -> Exception:
    """The engine's error for one that Gloo raised in ``group``. Gloo's errors differ in their text only."""
    if isinstance(error, (HorovodInternalError, SettingsError)):
        return error
    text = str(error)
    if lacks_descriptors(error):
        return NoDescriptorError(f"Gloo failed: {EXHAUSTED} ({text})")
    if "Timed out" in text or "timeout" in text:
        return timed_out(group, text)
    if "/transport/" in text or "onnect" in text:
        return PeerLostError(f"the connection to {group.some_others()} broke; form a new job ({text})")
    return EngineError(f"Gloo refused an operation; report this ({text})")


def pack_offer(binding: str, *parts: bytes) -> bytes:
    """The offer of a member that uses ``binding``: torch or pygloo."""
    offer: bytes = msgpack.packb((binding, *parts))
    return offer


def unpack_offers(binding: str, offers: Sequence[bytes], group: Group) -> list[list[Any]]:
    """The parts of each member's offer, by position. Raises SettingsError where a member has another binding."""
    found = [msgpack.unpackb(offer) for offer in offers]
    for position, (theirs, *_) in enumerate(found):
        if theirs != binding:
            raise SettingsError(
                f"this rank uses Gloo through {binding}, but {group.describe([position])} through {theirs}; install "
                "the same packages on all hosts, or set HOROVOD_CPU_OPERATIONS=pygloo"
            )
    return [parts for _, *parts in found]


GLOO_NAMES: Mapping[ReduceOp, str] = {ReduceOp.SUM: "SUM", ReduceOp.PRODUCT: "PRODUCT"}
"""Gloo's names of the reductions, in all of its bindings."""

_DTYPES = frozenset({"uint8", "int8", "int32", "int64", "float32", "float64"})


def is_exact(dtype: DType, op: ReduceOp) -> bool:
    """Whether Gloo's ring may do ``op`` on elements of ``dtype``."""
    return dtype.label in _DTYPES and op in GLOO_NAMES
