"""Every error a user may want to catch, in one place; ``collectives.api`` and ``executors.api`` draw the trees."""

from collectives.api import (
    CollectiveTimeoutError,
    DuplicateNameError,
    EngineError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    InvalidRequestError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    SettingsError,
    ShutDownError,
    UnsupportedRequestError,
)
from executors.api import ExecutorError, PlacementError, RemoteError, StartTimeoutError, WorkerError

__all__ = [
    "CollectiveTimeoutError",
    "DuplicateNameError",
    "EngineError",
    "ExecutorError",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "InvalidRequestError",
    "MismatchError",
    "NotInitializedError",
    "PeerLostError",
    "PlacementError",
    "RemoteError",
    "SettingsError",
    "ShutDownError",
    "StartTimeoutError",
    "UnsupportedRequestError",
    "WorkerError",
]
