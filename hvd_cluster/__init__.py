"""hvd-cluster: train one model on many processes, with Horovod's API.

The bindings are modules of their own: ``hvd_cluster.torch``, ``hvd_cluster.ray``.
"""

from typing import TYPE_CHECKING

from hvd_cluster.imports import require_neighbours

require_neighbours()

from collectives import VERSION as __version__  # noqa: E402
from collectives import HorovodInternalError, HostsUpdatedInterrupt, facade  # noqa: E402
from hvd_cluster.reports.metrics_reader import count_samples, metrics  # noqa: E402

if TYPE_CHECKING:
    from hvd_cluster.function_job import run
else:
    __getattr__ = facade(__name__, {"function_job": "run"})  # a rank needs no launcher

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "__version__", "count_samples", "metrics", "run"]
