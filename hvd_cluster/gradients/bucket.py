"""A bucket, and the values that all buckets of an optimizer share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hvd_cluster.gradients.binding import Binding, Pack
from hvd_cluster.gradients.buckets import SMALL_BYTES
from hvd_cluster.gradients.compression import GradientCompressor
from hvd_cluster.gradients.duplicate_names import Claim
from hvd_cluster.gradients.options import Options

P = TypeVar("P")


class Bucket(Generic[P]):
    """Parameters with gradients that are sent together, when all of them are ready.

    ``is_group``: it travels as a group, see :func:`is_group`.
    ``sparse``: the parameters with gradients that are sparse on all ranks -> the number of sparse dimensions.
    ``packs``: memory for small gradients of each kind; each step reuses it, because fresh pages are slow.
    """

    __slots__ = ("is_group", "packs", "parameters", "sparse")

    def __init__(self, parameters: Sequence[P], is_group: bool) -> None:
        self.parameters = tuple(parameters)
        self.is_group = is_group
        self.sparse: dict[P, int] = {}
        self.packs: dict[Any, Pack] = {}


@dataclass(frozen=True)
class Setup(Generic[P]):
    """The values that all reductions of one optimizer share."""

    binding: Binding[P]
    names: Mapping[P, str]
    compressors: Mapping[P, GradientCompressor]
    options: Options
    claim: Claim


def pack_of(binding: Binding[P], compressor: GradientCompressor, tensor: Any) -> Any:
    """The kind of the pack in which ``tensor``, a gradient, travels; None if it travels alone.

    Small gradients of one kind share a pack, if the compressor allows it.
    """
    size = binding.size(tensor)
    return size.kind if size.bytes <= SMALL_BYTES and compressor.elementwise else None


def is_group(binding: Binding[P], parameters: Sequence[P], compressors: Mapping[P, GradientCompressor]) -> bool:
    """Whether several tensors travel for a bucket if each of its ``parameters`` has a gradient.

    Then it always travels as a group, also with one tensor on a rank that does not train the others: groups of
    different lengths are an error, whereas a group and a single tensor would wait for each other.
    """
    packs = [pack_of(binding, compressors[parameter], parameter) for parameter in parameters]
    return len({pack for pack in packs if pack is not None}) + packs.count(None) > 1
