"""Where the processes of a data service meet those that train: who serves, at which address, and until when.

One process has the :class:`ComputeService`; all others reach it by a :class:`ComputeClient`.
"""

from hvd_cluster.data.compute.client import ComputeClient
from hvd_cluster.data.compute.service import ComputeService

__all__ = ["ComputeClient", "ComputeService"]
