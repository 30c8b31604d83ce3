"""The control messages between workers and the coordinator, and their msgpack form (never pickle).

A steady step sends ``Ready`` and ``Run`` messages that hold integers only.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import msgpack

from collectives.api import (
    DType,
    EngineError,
    MismatchError,
    Operation,
    Parameters,
    ReduceOp,
    RefusedCallError,
    Request,
)
from collectives.controller.errors import ErrorData
from collectives.controller.waits import Activity, CallInFlight, Frame, RankStatus

__all__ = [
    "ABANDONED",
    "ARGUMENTS",
    "COORDINATOR",
    "Abort",
    "Accusation",
    "Connected",
    "Inquiry",
    "Leave",
    "Left",
    "Locate",
    "Message",
    "Ping",
    "Pong",
    "RankStatus",
    "Ready",
    "Refuse",
    "Rejection",
    "Response",
    "Run",
    "Status",
    "Stop",
    "Together",
    "Unknown",
    "WaitReport",
    "Waits",
    "Withdraw",
    "decode",
    "encode",
]


@dataclass(frozen=True, slots=True)
class Response:
    """A collective that every member agreed on.

    ``id`` names the tensor from now on. ``request`` is that of the first member rank. ``sizes`` holds, in set order,
    each member's first dimension (allgather) or the splits of all members, row by row (alltoall). ``offers`` has the
    addresses of each member of a set that is added.
    """

    id: int
    request: Request
    sizes: tuple[int, ...] = ()
    offers: tuple[bytes, ...] = ()


class Rejection(NamedTuple):
    """A call that failed on one rank alone, because of its arguments there; other ranks may have submitted it."""

    process_set: int
    name: str
    group: str
    reason: str

    @property
    def key(self) -> tuple[int, str]:
        """Like the key of a :class:`Request`."""
        return self.process_set, self.name


@dataclass(frozen=True, slots=True)
class Ready:
    """Worker to coordinator: these tensors were submitted here; ``urgent`` ones have a caller waiting.

    ``answered`` are ids of an :class:`Unknown`, for which the whole requests are here, or were sent before. The
    answer to each of ``rejected`` is a :class:`Refuse`, when all members have submitted or rejected the tensor. The
    answer to each of ``abandoned``, which were submitted before, is a :class:`Refuse`, too, unless all members have
    submitted the tensor.
    """

    requests: tuple[Request, ...] = ()
    ids: tuple[int, ...] = ()
    urgent: tuple[tuple[int, str], ...] = ()
    urgent_ids: tuple[int, ...] = ()
    answered: tuple[int, ...] = ()
    rejected: tuple[Rejection, ...] = ()
    abandoned: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Together:
    """Host to coordinator: each of ``ranks``, all those of this host in the tensors' set, has these tensors ready.

    ``requests`` are those of new tensors, the same on all ``ranks``.
    """

    ranks: tuple[int, ...]
    ids: tuple[int, ...] = ()
    urgent_ids: tuple[int, ...] = ()
    requests: tuple[Request, ...] = ()
    urgent: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """Coordinator to workers: run these batches, in this order. ``responses`` are new; ``forget`` are dropped ids.

    ``begins_rounds``: after these batches, the ranks may agree among themselves, in rounds. ``first`` is the number of
    the first batch in the order of all batches; the others follow. ``parameters`` hold from this message on; None where
    every receiver has them.
    """

    batches: tuple[tuple[int, ...], ...]
    responses: tuple[Response, ...] = ()
    forget: tuple[int, ...] = ()
    begins_rounds: bool = False
    first: int = 0
    parameters: Parameters | None = None


@dataclass(frozen=True, slots=True)
class Refuse:
    """Coordinator to workers: this tensor does not run.

    Where the ranks disagree, ``values`` has the text that each rank gave for ``property``, as (rank, text).
    """

    process_set: int
    name: str
    text: str
    property: str = ""
    values: tuple[tuple[int, str], ...] = ()
    tensor: str = ""

    def error(self) -> MismatchError:
        """The error of the tensor."""
        kind = RefusedCallError if self.property == ARGUMENTS else MismatchError
        return kind(self.text, self.tensor or self.name, self.property, dict(self.values))


@dataclass(frozen=True, slots=True)
class Unknown:
    """Coordinator to one worker: these ids were dropped meanwhile; send the whole requests."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Leave:
    """Worker to coordinator: this rank wants to shut down.

    ``cause`` is what made its process end, if that is known, and ``last`` the name of the collective that it submitted
    last, empty for none.
    """

    cause: str = ""
    last: str = ""


@dataclass(frozen=True, slots=True)
class Stop:
    """Coordinator to workers: run the batches decided before this, then stop; ``rank`` asked for it by :class:`Leave`.

    Members that submit one of the ``refused`` tensors later must learn that another rank has refused that call.
    """

    rank: int
    refused: tuple[Refuse, ...] = ()
    cause: str = ""
    last: str = ""


@dataclass(frozen=True, slots=True)
class Left:
    """Both ways: everything decided before the stop is done here (worker), or everywhere (coordinator)."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Either way: ranks that wait in this round ask the absent ranks to decline it."""

    round: int


@dataclass(frozen=True, slots=True)
class Inquiry:
    """Worker to coordinator: tensors have waited here for long; why?"""


@dataclass(frozen=True, slots=True)
class Status:
    """Coordinator to workers: the tensors that have waited for long, or the ``silent`` ranks; may be empty."""

    text: str
    silent: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ping:
    """Coordinator to workers: does this rank run? The answer is a :class:`Pong`, also inside an operation."""


@dataclass(frozen=True, slots=True)
class Pong:
    """Worker to coordinator: this rank runs."""


@dataclass(frozen=True, slots=True)
class Locate:
    """Coordinator to workers: where does this rank stand? The answer is :class:`RankStatus`."""


@dataclass(frozen=True, slots=True)
class Accusation:
    """Worker to coordinator: an operation failed here because of other ranks; the error may name the wrong ones.

    The answer is an :class:`Abort`.
    """

    error: ErrorData


class Waits(NamedTuple):
    """The waits of one rank for the others of a process set: seconds until all were there, and inside of operations.

    ``times`` batches had a wait of a millisecond or longer.
    """

    process_set: int
    late: float
    inside: float
    times: int


@dataclass(frozen=True, slots=True)
class WaitReport:
    """Worker to coordinator: how long this rank waited in the last ``seconds``; sets with short waits are left out.

    For ``queued`` of these seconds its main thread could have run, but had no core.
    """

    seconds: float
    waits: tuple[Waits, ...] = ()
    queued: float = 0.0


@dataclass(frozen=True, slots=True)
class Connected:
    """Both ways: the backends of this rank (worker), or of all ranks (coordinator), are connected."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Either way: the job failed with this error."""

    error: ErrorData


Message: TypeAlias = (
    Ready
    | Together
    | Run
    | Refuse
    | Unknown
    | Leave
    | Stop
    | Left
    | Withdraw
    | Inquiry
    | Status
    | Ping
    | Pong
    | Locate
    | RankStatus
    | Accusation
    | Abort
    | Connected
    | WaitReport
)

COORDINATOR = 0
"""The rank with the coordinator."""
ABANDONED = "this rank does not want the tensor any more"
"""The text of a :class:`Refuse` for a tensor that a rank has abandoned."""
ARGUMENTS = "arguments"
"""The property of a :class:`Refuse` for a call that some ranks refused because of their arguments."""

LONGEST_INTERNED = 512
"""In bytes of the wire form."""

_OPERATIONS = list(Operation)
_DTYPES = list(DType)
_OPERATION_CODES = {member: code for code, member in enumerate(_OPERATIONS)}
_DTYPE_CODES = {member: code for code, member in enumerate(_DTYPES)}


def _pack_request(request: Request) -> bytes:
    """As bytes, so that the receiver recognizes equal requests of many ranks without decoding them."""
    fields = (
        request.name,
        _OPERATION_CODES[request.operation],
        _DTYPE_CODES[request.dtype],
        request.shape,
        int(request.op),
        request.root_rank,
        request.prescale_factor,
        request.postscale_factor,
        request.process_set,
        _pack_splits(request),
        request.device,
        request.group,
        request.group_size,
        request.tag,
        *((request.offer,) if request.offer else ()),
    )
    packed: bytes = msgpack.packb(fields)
    return packed


def _unpack_request(packed: bytes) -> Request:
    """One object for equal requests: the coordinator keeps those of every rank.

    Long ones are mostly alltoalls on many ranks, with new splits each time: keeping them would only use memory.
    """
    return _interned(packed) if len(packed) <= LONGEST_INTERNED else _read_request(packed)


def _read_request(packed: bytes) -> Request:
    fields = msgpack.unpackb(packed)
    name, operation, dtype, shape, op, root, prescale, postscale, process_set, splits, *rest = fields
    return Request(
        name,
        _OPERATIONS[operation],
        _DTYPES[dtype],
        tuple(shape),
        ReduceOp(op),
        root,
        prescale,
        postscale,
        process_set,
        _unpack_ranks(splits) if isinstance(splits, bytes) else tuple(splits),
        *rest,
    )


SHORT_SET = 64


def _pack_splits(request: Request) -> Any:
    """Each rank of the world names all members of a set that it adds; a long list of them travels as its steps."""
    splits = request.splits
    if len(splits) <= SHORT_SET or request.operation not in (Operation.ADD_PROCESS_SET, Operation.REMOVE_PROCESS_SET):
        return splits
    steps = [splits[0], *(after - before for before, after in pairwise(splits))]
    return zlib.compress(msgpack.packb(steps), LEVEL)


@lru_cache(maxsize=16)
def _unpack_ranks(packed: bytes) -> tuple[int, ...]:
    """One object for the same list of all ranks."""
    return tuple(accumulate(msgpack.unpackb(inflated(packed))))


_interned = lru_cache(maxsize=8192)(_read_request)


def _pack_ready(message: Ready) -> tuple[Any, ...]:
    requests = [_pack_request(request) for request in message.requests]
    abandoned = (message.abandoned,) if message.abandoned else ()
    return requests, message.ids, message.urgent, message.urgent_ids, message.answered, message.rejected, *abandoned


def _unpack_ready(
    requests: Any, ids: Any, urgent: Any, urgent_ids: Any, answered: Any, rejected: Any, abandoned: Any = ()
) -> Ready:
    return Ready(
        tuple(_unpack_request(fields) for fields in requests),
        tuple(ids),
        tuple((process_set, name) for process_set, name in urgent),
        tuple(urgent_ids),
        tuple(answered),
        tuple(Rejection(*fields) for fields in rejected),
        tuple((process_set, name) for process_set, name in abandoned),
    )


def _pack_together(message: Together) -> tuple[Any, ...]:
    new = ([_pack_request(request) for request in message.requests], message.urgent)
    return (message.ranks, message.ids, message.urgent_ids, *(new if any(new) else ()))


def _unpack_together(ranks: Any, ids: Any, urgent_ids: Any, requests: Any = (), urgent: Any = ()) -> Together:
    return Together(
        tuple(ranks),
        tuple(ids),
        tuple(urgent_ids),
        tuple(_unpack_request(fields) for fields in requests),
        tuple((process_set, name) for process_set, name in urgent),
    )


def _pack_response(response: Response) -> tuple[Any, ...]:
    offers = (response.offers,) if response.offers else ()
    return (response.id, _pack_request(response.request), response.sizes, *offers)


def _unpack_response(id: int, request: bytes, sizes: Any, offers: Any = ()) -> Response:
    return Response(id, _unpack_request(request), tuple(sizes), tuple(offers))


def _pack_run(message: Run) -> tuple[Any, ...]:
    responses = [_pack_response(response) for response in message.responses]
    parameters = None if message.parameters is None else astuple(message.parameters)
    return message.batches, responses, message.forget, message.begins_rounds, message.first, parameters


def _unpack_run(batches: Any, responses: Any, forget: Any, begins_rounds: Any, first: Any, parameters: Any) -> Run:
    return Run(
        tuple(tuple(batch) for batch in batches),
        tuple(_unpack_response(*fields) for fields in responses),
        tuple(forget),
        begins_rounds,
        first,
        None if parameters is None else Parameters(*parameters),
    )


def _pack_refuse(message: Refuse) -> tuple[Any, ...]:
    return message.process_set, message.name, message.text, message.property, message.values, message.tensor


def _unpack_refuse(process_set: int, name: str, text: str, property: str, values: Any, tensor: str) -> Refuse:
    return Refuse(process_set, name, text, property, tuple((rank, value) for rank, value in values), tensor)


def _pack_status(message: RankStatus) -> tuple[Any, ...]:
    activity, busy, held = message.activity.value, message.busy, message.is_held
    return message.rank, activity, message.thread, busy, message.last, message.waits, message.frames, held


def _unpack_status(
    rank: int, activity: str, thread: str, busy: float, last: Any, waits: Any, frames: Any, held: bool
) -> RankStatus:
    return RankStatus(
        rank,
        Activity(activity),
        thread,
        busy,
        None if last is None else CallInFlight(*last),
        tuple(CallInFlight(*fields) for fields in waits),
        tuple(Frame(*fields) for fields in frames),
        held,
    )


_PACK: dict[type, tuple[int, Callable[[Any], tuple[Any, ...]]]] = {
    Ready: (0, _pack_ready),
    Run: (1, _pack_run),
    Refuse: (2, _pack_refuse),
    Unknown: (3, lambda m: (m.ids,)),
    Leave: (4, lambda m: (m.cause, m.last)),
    Stop: (5, lambda m: (m.rank, [_pack_refuse(refuse) for refuse in m.refused], m.cause, m.last)),
    Left: (6, lambda m: ()),
    Abort: (7, lambda m: (m.error.kind, m.error.text, m.error.details)),
    Together: (8, _pack_together),
    Withdraw: (9, lambda m: (m.round,)),
    Inquiry: (10, lambda m: ()),
    Status: (11, lambda m: (m.text, m.silent)),
    Ping: (12, lambda m: ()),
    Pong: (13, lambda m: ()),
    Accusation: (14, lambda m: (m.error.kind, m.error.text, m.error.details)),
    Connected: (15, lambda m: ()),
    WaitReport: (16, lambda m: (m.seconds, m.waits, *((m.queued,) if m.queued else ()))),
    Locate: (17, lambda m: ()),
    RankStatus: (18, _pack_status),
}
_UNPACK: dict[int, Callable[..., Message]] = {
    0: _unpack_ready,
    1: _unpack_run,
    2: _unpack_refuse,
    3: lambda ids: Unknown(tuple(ids)),
    4: Leave,
    5: lambda rank, refused, *rest: Stop(rank, tuple(_unpack_refuse(*fields) for fields in refused), *rest),
    6: Left,
    7: lambda kind, text, details: Abort(ErrorData(kind, text, tuple(details))),
    8: _unpack_together,
    9: Withdraw,
    10: Inquiry,
    11: lambda text, silent: Status(text, tuple(silent)),
    12: Ping,
    13: Pong,
    14: lambda kind, text, details: Accusation(ErrorData(kind, text, tuple(details))),
    15: Connected,
    16: lambda seconds, waits, *rest: WaitReport(seconds, tuple(Waits(*fields) for fields in waits), *rest),
    17: Locate,
    18: _unpack_status,
}
COMPRESSED = 19
LONG = 1 << 16
"""Bytes. Longer messages are compressed, such as the addresses of the members of a large process set."""
LEVEL = 1
"""Of compression: rank 0 does it while the ranks wait."""
LARGEST = 1 << 28
"""Bytes that compressed ones may become: few bytes of a peer must not fill the memory."""


def encode(message: Message) -> bytes:
    """The wire form of ``message``."""
    tag, pack = _PACK[type(message)]
    packed: bytes = msgpack.packb((tag, *pack(message)))
    if len(packed) > LONG:
        packed = msgpack.packb((COMPRESSED, zlib.compress(packed, LEVEL)))
    return packed


def decode(data: bytes) -> Message:
    """The message in ``data``; EngineError if it is not a valid message."""
    try:
        tag, *fields = msgpack.unpackb(data)
        if tag == COMPRESSED:
            tag, *fields = msgpack.unpackb(inflated(*fields))
        unpack: Callable[..., Message] = _UNPACK[tag]
        return unpack(*fields)
    except (ValueError, TypeError, LookupError, msgpack.UnpackException) as error:
        raise EngineError(f"a control message of {len(data)} bytes cannot be read: {error}") from error


def inflated(data: bytes) -> bytes:
    """The reverse of :func:`zlib.compress`. Raises ValueError for a result of more than LARGEST bytes, or for none."""
    inflater = zlib.decompressobj()
    try:
        found = inflater.decompress(data, LARGEST)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not inflater.eof:
        raise ValueError(f"it is cut off, or of more than {LARGEST} bytes")
    return found
