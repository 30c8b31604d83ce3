"""The parts of training with a changing number of ranks that are the same in every framework."""

from hvd_cluster.elastic.batches import GlobalBatches
from hvd_cluster.elastic.loop import run
from hvd_cluster.elastic.session import drain
from hvd_cluster.elastic.state import ObjectState, State

__all__ = ["GlobalBatches", "ObjectState", "State", "drain", "run"]
