"""Every error that a user may want to catch; ``collectives.api`` and ``executors.api`` show the trees of errors."""

from __future__ import annotations

from typing import Any

from collectives import (
    CollectiveTimeoutError,
    DuplicateNameError,
    EngineError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    InvalidRequestError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    RefusedCallError,
    SettingsError,
    ShutDownError,
    UnsupportedRequestError,
)
from executors import ExecutorError, PlacementError, RemoteError, StartTimeoutError, WorkerError
from hvd_cluster.storage.folders import CheckpointError

__all__ = [
    "CheckpointError",
    "CollectiveTimeoutError",
    "DuplicateNameError",
    "EngineError",
    "ExecutorError",
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "InvalidRequestError",
    "MismatchError",
    "NotInitializedError",
    "PeerLostError",
    "PlacementError",
    "RefusedCallError",
    "RemoteError",
    "SettingsError",
    "ShutDownError",
    "StartTimeoutError",
    "UnsupportedRequestError",
    "WorkerError",
    "get_version_mismatch_message",
]


class HorovodVersionMismatchError(ImportError):
    """Never raised, because nothing is compiled for one version of a framework; scripts for Horovod catch it."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.version, self.installed_version)


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """The message for a framework that had version ``installed_version`` and has ``version`` now."""
    return f"{name} {version} was found where {name} {installed_version} is needed; install {name}=={installed_version}"
