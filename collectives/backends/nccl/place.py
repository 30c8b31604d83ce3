"""The GPU that this process works on."""

from __future__ import annotations

__all__ = ["Place", "place"]


class Place:
    """``index`` is the number of the GPU that a binding has chosen; None where none has.

    Written by threads that submit tensors, read by the thread that runs operations.
    """

    def __init__(self) -> None:
        self.index: int | None = None

    def default(self, local_rank: int, count: int) -> int:
        """The GPU of a rank without a tensor, on a host with ``count`` of them."""
        return local_rank % count if self.index is None else self.index


place = Place()
