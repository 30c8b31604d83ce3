"""The parts of training with a changing number of ranks that are the same in every framework."""

from typing import TYPE_CHECKING

from collectives import facade

if TYPE_CHECKING:
    from hvd_cluster.elastic.batches import GlobalBatches
    from hvd_cluster.elastic.loop import run
    from hvd_cluster.elastic.session import drain
    from hvd_cluster.elastic.state import ObjectState, State
else:
    __getattr__ = facade(
        __name__, {"batches": "GlobalBatches", "loop": "run", "session": "drain", "state": "ObjectState State"}
    )

__all__ = ["GlobalBatches", "ObjectState", "State", "drain", "run"]
