"""Variables of one process that have the same name, shape and dtype, as those of two models of one class.

Ranks that begin with different ones of them would combine the gradients of different models. A *stamp* tells them
apart: it counts what the process has made. Ranks may have made different numbers of things, so other stamps alone are
no error. It is one where all ranks have equally many such variables, and use that of another :class:`ModelPlace`.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hvd_cluster.comparison.models import Model, entry_of


class ModelPlace(NamedTuple):
    """Of ``total`` variables that are alike on one rank, ``number`` are older than the one in use."""

    number: int
    total: int


def plain(name: str) -> str:
    """``name`` without the numbers with which a framework counts all that one process has made, such as the 2 of
    "dense_2/kernel:0".
    """
    return re.sub(r"_\d+(?=/|$)", "", name.partition(":")[0])


def stamp_of(variable: Any) -> str:
    """The path of a variable of Keras, or the unique name of one of TensorFlow; empty for other objects."""
    return str(getattr(variable, "path", None) or getattr(variable, "_unique_id", None) or "")


def model_of(variables: Sequence[Any]) -> Model:
    """``variables``, as the ranks compare them. The numbers in names count what one process alone has made."""
    entries = [entry_of(plain(stamp_of(each) or each.name), each) for each in variables]
    return Model(tuple(entries), "variable")


def place_of(stamp: str, shape: tuple[int, ...] | None) -> ModelPlace:
    """That of the variable with ``stamp`` and ``shape``. Looks at all objects of this process."""
    gc.collect()
    found = {stamp}
    for each in gc.get_objects():
        if hasattr(type(each), "assign") and hasattr(type(each), "shape"):
            other = stamp_of(each)
            if other and plain(other) == plain(stamp) and tuple(each.shape) == shape:
                found.add(other)
    return ModelPlace(sorted(found, key=_age).index(stamp), len(found))


def _age(stamp: str) -> list[int]:
    return [int(number or 0) for number in re.findall(r"[^/]+?(?:_(\d+))?(?=/|$)", stamp)]


def are_swapped(places: Mapping[int, ModelPlace]) -> bool:
    """Whether ranks use different variables, of equally many."""
    return len({each.total for each in places.values()}) == 1 and len({each.number for each in places.values()}) > 1
