"""The samplers of torch's DataLoader."""

from __future__ import annotations

import functools
from typing import Any

from torch.utils.data import DistributedSampler, Sampler

from hvd_cluster.core import basics
from hvd_cluster.elastic.sampler import ElasticPartition, samplers

__all__ = ["ElasticSampler"]


class ElasticSampler(ElasticPartition, Sampler[int]):
    __doc__ = ElasticPartition.__doc__


_init = DistributedSampler.__init__


@functools.wraps(_init)
def _watched(self: DistributedSampler[Any], *args: Any, **kwargs: Any) -> None:
    """Horovod's elastic examples make a DistributedSampler once, with the numbers of ranks of that moment."""
    _init(self, *args, **kwargs)
    if basics.worlds() is not None:
        samplers.add(self, _adapt)


def _adapt(sampler: DistributedSampler[Any], before: tuple[int, int]) -> None:
    """Give ``sampler`` the present numbers, if it had those of all ranks, and a subclass computes nothing from them."""
    if (sampler.rank, sampler.num_replicas) != before or type(sampler).__init__ is not _watched:
        return
    epoch = sampler.epoch
    _init(sampler, sampler.dataset, basics.size(), basics.rank(), sampler.shuffle, sampler.seed, sampler.drop_last)
    sampler.set_epoch(epoch)


DistributedSampler.__init__ = _watched  # type: ignore[method-assign]
