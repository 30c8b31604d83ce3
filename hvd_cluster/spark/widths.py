"""The numbers of elements in columns of arrays and vectors, on which all ranks must agree: they are shapes of a model.

Spark knows only that these are arrays, and each rank sees its own rows. The first rank
that has a row publishes its numbers, and the others compare theirs. So no rank waits for a rank without rows, and no
rank reads a row that does not fit the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from collectives.api import Store

__all__ = ["check_widths"]

FIRST, WIDTHS = "rows/first", "rows/widths"
# For the moment between the two messages of the first rank; if that rank dies in between, the job ends earlier.
FIRST_SECONDS = 30.0


def check_widths(widths: Mapping[str, int], rank: int, store: Store) -> None:
    """Compare the ``widths`` of the columns of ``rank`` with those of the first rank that called this.

    Raises ValueError where they differ, and what ``store`` raises: CollectiveTimeoutError, PeerLostError.
    """
    if not widths:
        return
    if store.add(FIRST, 1) == 1:
        store.set(WIDTHS, json.dumps([rank, widths]).encode())
        return
    # Bound: FIRST_SECONDS; abort: the end of the rendezvous server.
    first, known = json.loads(store.get(WIDTHS, FIRST_SECONDS))
    for name, width in widths.items():
        if width != known[name]:
            raise _difference(name, {first: known[name], rank: width})


def _difference(name: str, widths: Mapping[int, int]) -> ValueError:
    (one, width), (other, other_width) = sorted(widths.items())
    return ValueError(
        f"column {name!r} has {width} elements in the rows of rank {one}, but {other_width} in those of rank {other}; "
        "all rows must have the same number: cut the arrays, fill them up, or drop those of another size first"
    )
