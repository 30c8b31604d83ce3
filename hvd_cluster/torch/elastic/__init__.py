"""Parts for training with a changing number of ranks."""

from hvd_cluster.elastic.batches import GlobalBatches
from hvd_cluster.elastic.loop import run
from hvd_cluster.elastic.session import drain
from hvd_cluster.elastic.state import ObjectState, State
from hvd_cluster.torch.elastic.sampler import ElasticSampler
from hvd_cluster.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "GlobalBatches", "ObjectState", "State", "TorchState", "drain", "run"]
