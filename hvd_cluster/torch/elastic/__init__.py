"""What training with a changing number of ranks needs."""

from hvd_cluster.torch.elastic.sampler import ElasticSampler

__all__ = ["ElasticSampler"]
