"""hvd-cluster: train one model on many processes, with Horovod's API.

The bindings are modules of their own: ``hvd_cluster.torch``, ``hvd_cluster.ray``.
"""

from importlib.metadata import PackageNotFoundError, version

from hvd_cluster.neighbours import require_neighbours

require_neighbours()

from collectives.api import HorovodInternalError, HostsUpdatedInterrupt  # noqa: E402
from hvd_cluster.run import run  # noqa: E402

try:
    __version__ = version("hvd-cluster")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.1.0"

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "__version__", "run"]
