"""A run of a kernel, whose errors are those of the engine."""

from __future__ import annotations

from hvd_cluster.tensorflow.errors import ABANDONED, as_status
from hvd_cluster.tensorflow.native.context import Context

__all__ = ["RunContext"]


class RunContext(Context):
    """See :class:`hvd_cluster.graphs.run.Context`."""

    __slots__ = ()

    def report(self, error: BaseException | None = None) -> None:
        """The user gets TensorFlow's error for ``error``; without one, that of an abandoned run."""
        self.fail(*(ABANDONED if error is None else as_status(error)))
