"""Operations of ranks, without a tensor."""

from collectives.api import Operation
from hvd_cluster.operations import members
from hvd_cluster.torch.operations.compilation import collective

__all__ = ["barrier", "join"]

barrier = collective(Operation.BARRIER, home=__name__)(members.barrier)
join = collective(Operation.JOIN, home=__name__)(members.join)
