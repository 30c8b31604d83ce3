"""Which workers are in the next world of a job, and what the end of one means: pure, without clock, thread or socket.

The driver reports events and executes actions. A worker keeps its id for the life of its process; its rank belongs to a
world. A static job is the same with as many workers at least as at most, and no resets.
"""

from executors.membership.events import (
    Action,
    End,
    Event,
    HostDraining,
    HostFound,
    HostLost,
    HostUnusable,
    Members,
    Overdue,
    Publish,
    Start,
    StopWorker,
    Tick,
    WorkerBehind,
    WorkerDone,
    WorkerDraining,
    WorkerFailed,
    WorkerLeaves,
    WorkerRaised,
    WorkerReady,
    WorldFailed,
    WorldFormed,
)
from executors.membership.hosts import Cooldown
from executors.membership.limits import ElasticCounts, Limits
from executors.membership.membership import Membership

__all__ = [
    "Action",
    "Cooldown",
    "ElasticCounts",
    "End",
    "Event",
    "HostDraining",
    "HostFound",
    "HostLost",
    "HostUnusable",
    "Limits",
    "Members",
    "Membership",
    "Overdue",
    "Publish",
    "Start",
    "StopWorker",
    "Tick",
    "WorkerBehind",
    "WorkerDone",
    "WorkerDraining",
    "WorkerFailed",
    "WorkerLeaves",
    "WorkerRaised",
    "WorkerReady",
    "WorldFailed",
    "WorldFormed",
]
