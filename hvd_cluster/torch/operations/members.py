"""Operations of ranks, without a tensor."""

from hvd_cluster.operations import members
from hvd_cluster.torch.operations.compilation import uncompiled

__all__ = ["barrier", "join"]

barrier = uncompiled(members.barrier, __name__)
join = uncompiled(members.join, __name__)
