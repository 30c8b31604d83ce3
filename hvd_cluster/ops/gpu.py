"""Which GPU a rank works on."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from collectives import InvalidRequestError, presence
from hvd_cluster.core import basics


class _Place:
    """The GPU of this rank: that of its first tensor, as long as one engine runs."""

    def __init__(self) -> None:
        self._engine: Callable[[], object] = lambda: None
        self._index = -1

    def require(self, index: int) -> None:
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


def require_gpu(index: int) -> None:
    """InvalidRequestError if the GPU with the number ``index`` is not that of the first tensor of this rank."""
    _first.require(index)
