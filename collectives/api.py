"""The types of the engine: value objects, protocols and the error tree. Imports no other module of the package.

The error tree; the class gives the cause and the remedy::

    RuntimeError
    ├── HostsUpdatedInterrupt         the membership changed: carry on with the new one, nothing was lost
    └── HorovodInternalError          a collective failed: restore the last good state and retry
        ├── MismatchError             the ranks disagree about a tensor: fix the script; the engine stays usable
        │   └── RefusedCallError      another rank refused the call because of its arguments there: look at that rank
        ├── PeerLostError             a rank died or cannot be reached: form a new job without it
        ├── CollectiveTimeoutError    a rank did not answer in time: look at that rank, or raise the timeout
        ├── ShutDownError             the engine was shut down while the operation was pending
        └── EngineError               a bug in the engine: report it
    ValueError
    ├── InvalidRequestError           this call is wrong, on this rank only: fix the call; nothing was submitted
    │   ├── DuplicateNameError        a tensor of this name is still in flight
    │   └── UnsupportedRequestError   these ranks cannot do it, others could; also a NotImplementedError
    └── SettingsError                 a setting or HOROVOD_* variable cannot be used as it is
    NotInitializedError               use of the engine before ``init()``; a HorovodInternalError and a ValueError
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from typing_extensions import override as override
else:
    Method = TypeVar("Method")

    def override(method: Method) -> Method:
        """:func:`typing.override`, which Python has since 3.12: the method is described in a class above."""
        return method


HOST = "cpu"
"""The device kind of host memory, which always has a backend."""

LONGEST_SECONDS = 1_000_000
"""The longest timeout: the system counts milliseconds in 32 bits."""


class HorovodInternalError(RuntimeError):
    """A collective failed. Restore the last committed state and retry.

    Where it ended the engine, ``tensors`` are the names that were in flight on this rank, and ``batch`` is the number
    of the batch in which an operation failed here, None if none did. The log and the timeline have the same ones.
    """

    tensors: tuple[str, ...] = ()
    batch: int | None = None


class NoDescriptorError(HorovodInternalError):
    """This process has no file descriptor left, so it cannot connect to the other ranks.

    It speaks of this process alone: other ranks get a HorovodInternalError.
    """


class MismatchError(HorovodInternalError):
    """The ranks submitted different things under one name. Every member rank gets the same text.

    ``tensor`` is that name, ``property`` is the property that differs ("shape", "dtype"...), and ``values`` has the
    text that each rank gave for it (rank -> text). All three are empty where the reason is not a difference between
    ranks.
    """

    def __init__(
        self, message: str = "", tensor: str = "", property: str = "", values: Mapping[int, str] | None = None
    ) -> None:
        super().__init__(message)
        self.tensor = tensor
        self.property = property
        self.values = dict(values or {})


class RefusedCallError(MismatchError):
    """Other ranks refused the call because of their arguments; ``values`` has the reason of each of these ranks."""


class PeerLostError(HorovodInternalError):
    """A rank died, left without a message, or cannot be reached any more.

    ``ranks`` are the lost ranks and ``hosts`` their hosts, in the same order; both are empty where they are not known.
    ``has_ended``: whether it is certain that their processes have ended.
    """

    def __init__(
        self, message: str = "", ranks: Iterable[int] = (), hosts: Iterable[str] = (), has_ended: bool = False
    ) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.hosts = tuple(hosts)
        self.has_ended = has_ended


class CollectiveTimeoutError(HorovodInternalError):
    """A rank did not answer within the deadline of :class:`Timeouts`.

    ``ranks`` are the late ones. Where only some of several ranks can be late, and it is not known which, they are all
    of these. Empty where no rank is known.
    """

    def __init__(self, message: str = "", ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class ShutDownError(HorovodInternalError):
    """The engine was shut down, here or on another rank, before the operation finished."""


class EngineError(HorovodInternalError):
    """An invariant of the engine is broken: a bug in the engine."""


class InvalidRequestError(ValueError):
    """The call is wrong on this rank. Nothing was submitted; the engine stays usable."""

    reported = False
    """Whether the other ranks have been told of the call, or do not wait for this rank."""


class DuplicateNameError(InvalidRequestError):
    """A tensor of the same name is still in flight on this rank."""


class UnsupportedRequestError(InvalidRequestError, NotImplementedError):
    """The call is valid, but these ranks cannot do it."""


class SettingsError(ValueError):
    """A setting or a ``HOROVOD_*`` variable has a value that cannot be used."""


class NotInitializedError(HorovodInternalError, ValueError):
    """The engine is used before ``init()`` or after ``shutdown()``."""

    def __init__(self, message: str = "Horovod has not been initialized; use hvd.init().") -> None:
        super().__init__(message)


class HostsUpdatedInterrupt(RuntimeError):
    """The membership changed. State is intact; ``skip_sync`` says whether a sync can be left out."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the membership of the job changed")
        self.skip_sync = skip_sync


class Operation(enum.Enum):
    """The operation of a request."""

    ALLREDUCE = "allreduce"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"
    ALLTOALL = "alltoall"
    REDUCESCATTER = "reducescatter"
    BARRIER = "barrier"
    JOIN = "join"
    ADD_PROCESS_SET = "add process set"
    REMOVE_PROCESS_SET = "remove process set"

    __hash__ = object.__hash__  # members are single objects; Enum's own hash is a Python call

    def __init__(self, label: str) -> None:
        self.label = label  # the same as ``value``, which is a property in Python


class ReduceOp(enum.IntEnum):
    """How elements are combined. The numbers are those of Horovod."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


class DType(enum.Enum):
    """Element types. ``storage`` is the NumPy name of the memory layout (NumPy has no bfloat16).

    ``is_integer``: the numbers are integers. ``has_parts``: the numbers are complex.
    """

    UINT8 = ("uint8", 1, "uint8")
    INT8 = ("int8", 1, "int8")
    INT16 = ("int16", 2, "int16")
    INT32 = ("int32", 4, "int32")
    INT64 = ("int64", 8, "int64")
    FLOAT16 = ("float16", 2, "float16")
    BFLOAT16 = ("bfloat16", 2, "uint16")
    FLOAT32 = ("float32", 4, "float32")
    FLOAT64 = ("float64", 8, "float64")
    BOOL = ("bool", 1, "bool")
    COMPLEX64 = ("complex64", 8, "complex64")
    COMPLEX128 = ("complex128", 16, "complex128")

    __hash__ = object.__hash__  # members are single objects; Enum's own hash is a Python call

    def __init__(self, label: str, itemsize: int, storage: str) -> None:
        self.label = label
        self.itemsize = itemsize
        self.storage = storage
        self.is_integer = label in ("uint8", "int8", "int16", "int32", "int64")
        self.has_parts = label in ("complex64", "complex128")

    @classmethod
    def from_label(cls, label: str) -> DType:
        """The member called ``label``. Raises InvalidRequestError that lists the allowed names."""
        member = _DTYPES.get(label)
        if member is None:
            allowed = ", ".join(_DTYPES)
            raise InvalidRequestError(f"dtype {label!r} is not supported; convert the tensor to one of: {allowed}")
        return member

    @property
    def real(self) -> DType:
        """The type of a complex number's two parts; this one, where numbers have no parts."""
        return _PARTS.get(self.label, self)


_DTYPES: Mapping[str, DType] = {member.label: member for member in DType}
_PARTS = {"complex64": DType.FLOAT32, "complex128": DType.FLOAT64}


@dataclass(frozen=True, slots=True)
class Topology:
    """The place of this rank in the world.

    ``hosts[r]`` is the identity of the host of rank ``r`` (a node id or host name, never compared as an address).
    ``cross_rank`` is the index of this host among the hosts that have a rank with this ``local_rank``; ``cross_size``
    is the number of such hosts. ``cores`` is the number of cores that the ranks of this host may use together.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    hosts: tuple[str, ...] = ("localhost",)
    cores: int = 1

    @property
    def is_homogeneous(self) -> bool:
        """Whether every host has the same number of ranks."""
        return len({*Counter(self.hosts).values()}) == 1


@dataclass(frozen=True, slots=True)
class World:
    """The ranks that work together in one round of a job, as the launcher describes it to one of them.

    ``job`` and ``round`` identify the world: all its ranks have the same two, and no rank of another world has them. A
    launcher that replaces ranks gives the next round to survivors and newcomers. ``topology`` has the numbers of this
    rank; its ``hosts`` and ``cores`` are not known before the ranks have connected. ``host`` is the identity of this
    rank's host. ``rendezvous`` is the address and the port of the rendezvous server; None: a world of one without a
    server.

    Raises SettingsError for inconsistent numbers.
    """

    job: str = "job"
    round: int = 0
    topology: Topology = field(default_factory=lambda: Topology(hosts=(), cores=0))
    host: str = "localhost"
    rendezvous: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        for kind in ("", "local_", "cross_"):
            rank, size = getattr(self.topology, f"{kind}rank"), getattr(self.topology, f"{kind}size")
            if not 0 <= rank < size:
                raise SettingsError(
                    f"{kind}rank {rank} is not in 0..{size - 1} ({kind}size is {size}); "
                    f"the launcher sets HOROVOD_{kind.upper()}RANK and HOROVOD_{kind.upper()}SIZE together"
                )
        if self.topology.size > 1 and self.rendezvous is None:
            raise SettingsError(
                f"size is {self.topology.size} but HOROVOD_GLOO_RENDEZVOUS_ADDR is not set, so the ranks cannot find "
                "each other; start the script with hvdrun, hvd_cluster.run or RayExecutor"
            )

    @property
    def name(self) -> str:
        """Job and round, for messages."""
        return f"round {self.round} of job {self.job!r}"


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Every deadline of the engine, in seconds; ``heartbeat`` is how long a host may be silent."""

    connect: float = 30.0
    collective: float = 30.0
    shutdown: float = 5.0
    heartbeat: float = 5.0

    def __post_init__(self) -> None:
        for name in ("connect", "collective", "shutdown", "heartbeat"):
            value = getattr(self, name)
            if not 0 < value <= LONGEST_SECONDS:
                raise SettingsError(
                    f"timeout {name}={value!r} must be a positive number of seconds, at most {LONGEST_SECONDS}"
                )


@dataclass(frozen=True, slots=True)
class Request:
    """The request of one rank under one name; equal requests on every rank make a collective.

    ``shape`` is the shape on this rank. ``root_rank`` is a global rank. ``splits`` counts the rows for each member of
    the process set (alltoall; reducescatter, where none means equal ones), or lists the ranks of a set to add or to
    remove. ``device`` is "cpu" or "cuda". The ``group_size`` requests with one ``group`` name run, or fail, together.
    ``tag`` is a number of the caller, which must be the same on all ranks. ``offer`` has the addresses of this rank,
    for the other members of a set to add.
    """

    name: str
    operation: Operation
    dtype: DType = DType.UINT8
    shape: tuple[int, ...] = ()
    op: ReduceOp = ReduceOp.SUM
    root_rank: int = -1
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    process_set: int = 0
    splits: tuple[int, ...] = ()
    device: str = HOST
    group: str = ""
    group_size: int = 0
    tag: int = 0
    offer: bytes = field(default=b"", compare=False, repr=False)
    key: tuple[int, str] = field(init=False, compare=False, repr=False)
    nbytes: int = field(init=False, compare=False, repr=False)
    """Bytes of the tensor on this rank."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", (self.process_set, self.name))
        object.__setattr__(self, "nbytes", prod(self.shape) * self.dtype.itemsize)

    def changed(
        self, name: str | None = None, splits: tuple[int, ...] | None = None, group: str | None = None
    ) -> Request:
        """A copy with the given values, without the time that ``dataclasses.replace`` takes to inspect the fields."""
        return Request(
            self.name if name is None else name,
            self.operation,
            self.dtype,
            self.shape,
            self.op,
            self.root_rank,
            self.prescale_factor,
            self.postscale_factor,
            self.process_set,
            self.splits if splits is None else splits,
            self.device,
            self.group if group is None else group,
            self.group_size,
            self.tag,
            self.offer,
        )

    @property
    def count(self) -> int:
        """Number of elements of the tensor on this rank."""
        return prod(self.shape)


class Store(Protocol):
    """A small key-value service for bootstrap, shared by all ranks of a job. Never on the data path."""

    def set(self, key: str, value: bytes, timeout: float | None = None) -> None:
        """Create or replace ``key``. ``timeout``, in seconds, bounds the wait for a service; None is its own bound."""

    def set_all(self, values: Mapping[str, bytes]) -> None:
        """Create or replace all keys of ``values``, at once."""

    def get(self, key: str, timeout: float) -> bytes:
        """Wait up to ``timeout`` seconds for ``key`` and return its value; CollectiveTimeoutError otherwise."""

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the decimal counter at ``key`` (0 when absent), atomically; return the new value."""

    def delete(self, key: str) -> None:
        """Remove ``key`` if it exists; one that ends with "/" stands for all keys that begin with it."""


Subscriber = Callable[[object], None]


PATIENCE_SECONDS = 0.05
MEBIBYTE = 1 << 20
Changes: TypeAlias = Mapping[str, Any]
"""Values for some of the fields of :class:`Parameters`."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Rank 0 makes the first value from its settings; a change travels with the first batch that it holds for.

    Ready tensors are fused into batches of at most ``fusion_threshold`` bytes (0: no fusion). A ready tensor is held
    for at most ``cycle_time`` seconds, in which others may join its batch. A ``patient`` engine has no core of its own:
    for up to ``patience`` seconds it leaves decided batches to callers that wait. ``cache_capacity`` is a number of
    tensor names (0: no cache). ``hierarchical_allreduce`` and ``hierarchical_allgather`` send these operations through
    the stages of a hierarchical backend, where there is one; an allreduce above ``pipeline_piece`` bytes goes through
    them in pieces of at most that size. ``next_round`` is the round of the world that all ranks go to after this step,
    in an elastic job; 0 for none: they stay. ``version`` counts the changes; the coordinator sets it.

    Raises InvalidRequestError for values out of range.
    """

    fusion_threshold: int = 128 * MEBIBYTE
    cycle_time: float = 0.001
    patient: bool = False
    patience: float = PATIENCE_SECONDS
    cache_capacity: int = 1024
    hierarchical_allreduce: bool = True
    hierarchical_allgather: bool = True
    pipeline_piece: int = MEBIBYTE
    next_round: int = 0
    version: int = 0

    def __post_init__(self) -> None:
        for name, least in _LEAST_COUNT.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise InvalidRequestError(f"parameter {name}={value!r} must be an integer of at least {least}")
        for name in ("cycle_time", "patience"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value <= LONGEST_SECONDS:
                raise InvalidRequestError(
                    f"parameter {name}={value!r} must be a number of seconds, 0 to {LONGEST_SECONDS}"
                )


_LEAST_COUNT = {"fusion_threshold": 0, "cache_capacity": 0, "pipeline_piece": 1, "next_round": 0, "version": 0}
