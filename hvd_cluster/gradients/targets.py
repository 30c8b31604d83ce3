"""The variables of a list of gradients, and which gradients travel together. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Sequence
from typing import Any, NamedTuple

from collectives import InvalidRequestError
from hvd_cluster.comparison.models import Entry, Model
from hvd_cluster.comparison.rosters import static_name
from hvd_cluster.comparison.twins import plain
from hvd_cluster.gradients.buckets import Size, plan
from hvd_cluster.gradients.options import Groups


class Target(NamedTuple):
    """A variable, as the ranks agree on it without messages.

    ``key`` is its identity in this process, ``name`` the same on all ranks; ``bytes`` is the size of its gradient, None
    where the shape is not known. ``stamp``: see :mod:`hvd_cluster.comparison.twins`.
    """

    key: int
    name: str
    shape: tuple[int, ...] | None
    dtype: Hashable
    bytes: int | None
    stamp: str = ""


class ListBucket(NamedTuple):
    """The positions of gradients that are sent together, and their static name, see
    :mod:`hvd_cluster.comparison.rosters`.
    """

    positions: tuple[int, ...]
    name: str


def positional(name: str, position: int) -> str:
    """``name`` without the numbers with which a framework counts all that one process has made, such as the 2 of
    "dense_2/kernel:0"; ``position`` in the list, the same on all ranks, takes their place.
    """
    return f"{position}.{plain(name)}"


def buckets(targets: Sequence[Target], groups: Groups, left_out: Collection[int]) -> list[ListBucket]:
    """The buckets for ``targets``, the same on all ranks, in the order of backward.

    ``groups`` has variables, or their number; those whose key is in ``left_out`` do not travel.
    """
    positions = [position for position, target in enumerate(targets) if target.key not in left_out]
    planned = plan(positions, _positions(groups, targets), lambda position: _size(targets[position]))
    places = {position: place for place, position in enumerate(positions)}
    return [ListBucket(tuple(members), static_name([places[each] for each in members])) for members in planned]


def model_of(targets: Sequence[Target], groups: Groups, left_out: Collection[int]) -> Model:
    """``targets`` that travel, as the ranks compare them."""
    travelling = [target for target in targets if target.key not in left_out]
    entries = [Entry(_without_position(target.name), target.shape, _dtype_name(target)) for target in travelling]
    divided = _positions(groups, travelling)
    stamp = travelling[0].stamp if travelling else ""
    return Model(tuple(entries), "variable", "" if divided is None else f"groups={divided}", stamp)


def _without_position(name: str) -> str:
    return re.sub(r"^\d+\.", "", name)


def _dtype_name(target: Target) -> str:
    return str(getattr(target.dtype, "name", target.dtype))


def _positions(groups: Groups, targets: Sequence[Target]) -> int | list[list[int]] | None:
    if groups is None or isinstance(groups, int):
        return groups
    known = {target.key: position for position, target in enumerate(targets)}
    return [[known[id(each)] for each in group if id(each) in known] for group in groups]


def _size(target: Target) -> Size:
    """A gradient of unknown size travels alone."""
    kind: Any = target.dtype
    return Size(1 << 62 if target.bytes is None else target.bytes, kind)


def is_complete(layer: Any) -> bool:
    """Whether no call makes more variables of a layer or a model of Keras.

    ``build()`` of a subclass without one of its own marks it as built, and its layers are not. Layers that a call did
    not reach stay as they are. A vocabulary is no variable, and Keras never builds the table in a layer for text.
    """
    if not getattr(layer, "built", True):
        return False
    inner = getattr(layer, "_flatten_layers", tuple)
    return getattr(layer, "_called", False) or all(each.built or hasattr(each, "get_vocabulary") for each in inner())


def trainable_weights(layers: Any) -> list[Any]:
    """The trainable variables of ``layers``: a Keras layer, a list of them, or None.

    InvalidRequestError for anything else, and for a layer that is not built: its variables do not exist yet.
    """
    if layers is None:
        return []
    found: list[Any] = []
    for layer in layers if isinstance(layers, list | tuple) else [layers]:
        if not hasattr(layer, "trainable_weights"):
            raise InvalidRequestError(
                f"local_layers must be a Keras layer or a list of Keras layers, not of {type(layer).__name__}"
            )
        if not is_complete(layer):
            raise InvalidRequestError(
                f"the local layer {layer.name!r} has no variables yet, or not all: call it on a batch first, or its "
                "build() if it has one of its own"
            )
        found += layer.trainable_weights
    return found
