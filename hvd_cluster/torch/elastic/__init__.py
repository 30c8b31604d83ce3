"""Parts for training with a changing number of ranks."""

from hvd_cluster.torch.elastic.sampler import ElasticSampler

__all__ = ["ElasticSampler"]
