"""The collective engine: negotiation, fusion, backends, rendezvous. Knows buffers, imports no framework.

The layers above import from this page only, not from the modules below it.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING


def facade(package: str, names: Mapping[str, str], modules: Mapping[str, str] | None = None) -> Callable[[str], object]:
    """The ``__getattr__`` of ``package``. It imports a name at its first use, so a process loads what it uses only.

    ``names`` has the names of each module, ``modules`` the module that a name stands for; both count from ``package``.
    """
    homes = {name: module for module, listed in names.items() for name in listed.split()}

    def load(name: str) -> object:
        if modules and name in modules:
            value: object = importlib.import_module(f"{package}.{modules[name]}")
        elif name in homes:
            value = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    return load


if TYPE_CHECKING:
    from collectives.api import (
        LONGEST_SECONDS,
        CollectiveTimeoutError,
        DType,
        DuplicateNameError,
        EngineError,
        HorovodInternalError,
        HostsUpdatedInterrupt,
        InvalidRequestError,
        MismatchError,
        NoDescriptorError,
        NotInitializedError,
        Operation,
        PeerLostError,
        ReduceOp,
        RefusedCallError,
        Request,
        SettingsError,
        ShutDownError,
        Store,
        Topology,
        UnsupportedRequestError,
        World,
        override,
    )
    from collectives.backends import completion, phases, registry
    from collectives.backends.mpi import communicators
    from collectives.backends.mpi import library as mpi_library
    from collectives.backends.nccl import bootstrap as nccl_bootstrap
    from collectives.backends.nccl import presence
    from collectives.buffers import Buffer, as_buffer, empty
    from collectives.controller.agreement import name_ranks, with_ranks
    from collectives.controller.process_sets import GLOBAL
    from collectives.cores import usable_cores
    from collectives.engine import start
    from collectives.engine.engine import Engine
    from collectives.engine.shutdown import ProcessExit
    from collectives.engine.work import Destination, Watch, Work, fresh
    from collectives.handshake.entries import EndNotes, Starts
    from collectives.kernels import conversion
    from collectives.logs import LOG_LEVELS
    from collectives.net import descriptors, frames, interfaces, wire
    from collectives.net.acceptor import Acceptor, streams
    from collectives.net.attempts import ConnectAttempt, attempts
    from collectives.net.frames import Frames, Opener, Sealer
    from collectives.net.interfaces import LOOPBACK
    from collectives.net.sockets import end_in_silence
    from collectives.observe.autotune import journal
    from collectives.observe.autotune.autotuner import Autotuner
    from collectives.observe.live.sender import RecordTimeline, SnapshotSender
    from collectives.observe.live.snapshot import LAST_RECORDING, SNAPSHOT_PREFIX, Recording, Snapshot, recording_key
    from collectives.observe.metrics.exposition import Exposition
    from collectives.observe.metrics.families import Family, families
    from collectives.observe.metrics.meter import process_meter
    from collectives.observe.metrics.values import Metrics
    from collectives.observe.timeline.recorder import Recorder
    from collectives.observe.timeline.spans import Step
    from collectives.settings import ENVIRONMENT_SECRET, MpiChoice, Settings, world_from_environment
    from collectives.stalls.deadlocks import CALL_MISMATCH
    from collectives.store.client import RendezvousClient
    from collectives.store.memory import MemoryStore, Observer
    from collectives.store.server import RendezvousServer
    from collectives.version import VERSION
else:
    __getattr__ = facade(
        __name__,
        {
            "api": "CollectiveTimeoutError DType DuplicateNameError EngineError HorovodInternalError "
            "HostsUpdatedInterrupt InvalidRequestError LONGEST_SECONDS MismatchError NoDescriptorError "
            "NotInitializedError Operation PeerLostError ReduceOp RefusedCallError Request SettingsError "
            "ShutDownError Store Topology UnsupportedRequestError World override",
            "buffers": "Buffer as_buffer empty",
            "controller.agreement": "name_ranks with_ranks",
            "controller.process_sets": "GLOBAL",
            "cores": "usable_cores",
            "engine.engine": "Engine",
            "engine.shutdown": "ProcessExit",
            "engine.work": "Destination Watch Work fresh",
            "handshake.entries": "EndNotes Starts",
            "logs": "LOG_LEVELS",
            "net.acceptor": "Acceptor streams",
            "net.attempts": "ConnectAttempt attempts",
            "net.frames": "Frames Opener Sealer",
            "net.interfaces": "LOOPBACK",
            "net.sockets": "end_in_silence",
            "observe.autotune.autotuner": "Autotuner",
            "observe.live.sender": "RecordTimeline SnapshotSender",
            "observe.live.snapshot": "LAST_RECORDING Recording SNAPSHOT_PREFIX Snapshot recording_key",
            "observe.metrics.exposition": "Exposition",
            "observe.metrics.families": "Family families",
            "observe.metrics.meter": "process_meter",
            "observe.metrics.values": "Metrics",
            "observe.timeline.recorder": "Recorder",
            "observe.timeline.spans": "Step",
            "settings": "ENVIRONMENT_SECRET MpiChoice Settings world_from_environment",
            "stalls.deadlocks": "CALL_MISMATCH",
            "store.client": "RendezvousClient",
            "store.memory": "MemoryStore Observer",
            "store.server": "RendezvousServer",
            "version": "VERSION",
        },
        {
            "communicators": "backends.mpi.communicators",
            "completion": "backends.completion",
            "conversion": "kernels.conversion",
            "descriptors": "net.descriptors",
            "frames": "net.frames",
            "interfaces": "net.interfaces",
            "journal": "observe.autotune.journal",
            "mpi_library": "backends.mpi.library",
            "nccl_bootstrap": "backends.nccl.bootstrap",
            "phases": "backends.phases",
            "presence": "backends.nccl.presence",
            "registry": "backends.registry",
            "start": "engine.start",
            "wire": "net.wire",
        },
    )
