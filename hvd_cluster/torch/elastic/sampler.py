"""The sampler of torch's DataLoader."""

from torch.utils.data import Sampler

from hvd_cluster.elastic.sampler import ElasticPartition

__all__ = ["ElasticSampler"]


class ElasticSampler(ElasticPartition, Sampler[int]):
    __doc__ = ElasticPartition.__doc__
