"""Calls of the engine from functions that JAX compiles for a CPU: XLA calls back and hands over its own memory."""

from __future__ import annotations

import ctypes as c
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from collectives import Buffer, DType, HorovodInternalError, Operation, Work, fresh
from hvd_cluster.comparison.rosters import Roster
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.elastic.steps import watchers
from hvd_cluster.gradients.lists import Shipment
from hvd_cluster.graphs.compiled import CallTable, buffer_at, let_end
from hvd_cluster.jax import arrays
from hvd_cluster.jax.frames import EXECUTE, METADATA, CallFrame, FFIBuffer, MetadataExtension, create_error
from hvd_cluster.ops import submission
from hvd_cluster.ops.arguments import Reduction

TARGET = "hvd_cluster_allreduce"
ABORTED = 10

_DTYPES = {
    1: DType.BOOL,
    2: DType.INT8,
    3: DType.INT16,
    4: DType.INT32,
    5: DType.INT64,
    6: DType.UINT8,
    10: DType.FLOAT16,
    11: DType.FLOAT32,
    12: DType.FLOAT64,
    15: DType.COMPLEX64,
    16: DType.BFLOAT16,
    18: DType.COMPLEX128,
}


class _Size(NamedTuple):
    """The question how many members a process set has; in an elastic job, they change after a function is compiled."""

    process_set: ProcessSet

    def run(self, frame: Any) -> None:
        """Answer it."""
        _result(frame, 0).host[0] = self.process_set.size() or 1


class _Allreduce(NamedTuple):
    """An allreduce of the tensors of several shipments: the name of each and how many tensors it has.

    With a ``roster`` the names are static, see :class:`Shipment`. The ``readers`` come after these: variables that it
    saves if it fails. A step with other calls destroys its variables where one of those fails, so it counts as one that
    has begun to change them.
    """

    names: tuple[str, ...]
    roster: Roster | None
    counts: tuple[int, ...]
    process_set: ProcessSet
    how: Reduction
    readers: tuple[arrays.VariableReader, ...]

    def run(self, frame: Any) -> None:
        """Wait for the results."""
        if not self.readers:
            watchers.step_began(in_graph=True)
        try:
            _run(self, _pairs(frame))
        except BaseException:
            arrays.save(self.readers, _addresses(frame))
            raise
        arrays.drop()
        watchers.step_began(in_graph=True)


_Call: TypeAlias = "_Allreduce | _Size"
_calls: CallTable[_Call] = CallTable()
# Owned by this module, held for a registration.
_lock = threading.Lock()
_errors: list[BaseException] = []


def last_error() -> BaseException | None:
    """The engine's error behind the last XlaRuntimeError of an allreduce; None if there was none."""
    return _errors[-1] if _errors else None


def allreduce(shipments: Sequence[Shipment], process_set: ProcessSet, how: Reduction) -> list[Any]:
    """The combined tensors of all ``shipments``, one after the other; in a compiled function, or outside of one.

    XLA raises XlaRuntimeError with the text of the engine's error.
    """
    tensors = [tensor for shipment in shipments for tensor in shipment.tensors]
    readers, values = arrays.readers()
    call = _Allreduce(
        tuple(shipment.name for shipment in shipments),
        next((shipment.roster for shipment in shipments), None),
        tuple(len(shipment.tensors) for shipment in shipments),
        process_set,
        how,
        readers,
    )
    shapes = [jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for tensor in tensors]  # type: ignore[no-untyped-call]
    aliases = {index: index for index in range(len(tensors))}
    return list(_call(call, shapes, [*tensors, *values], input_output_aliases=aliases))


def size(process_set: ProcessSet) -> Any:
    """The number of members when the function runs, an int32 scalar."""
    shape = jax.ShapeDtypeStruct((), np.int32)  # type: ignore[no-untyped-call]
    return _call(_Size(process_set), [shape], [])[0]


def _call(call: _Call, shapes: Sequence[Any], tensors: Sequence[Any], **options: Any) -> Sequence[Any]:
    _register()
    run = jax.ffi.ffi_call(TARGET, shapes, has_side_effect=True, **options)
    results: Sequence[Any] = run(*tensors, call=np.int64(_calls.number_of(call)))
    return results


def _register() -> None:
    with _lock:
        if not _registered:
            capsule = jax.ffi.pycapsule(_handler)  # type: ignore[no-untyped-call]
            jax.ffi.register_ffi_target(TARGET, capsule, platform="cpu")
            _registered.append(capsule)


_registered: list[Any] = []


def _handle(pointer: Any) -> int | None:
    frame = pointer.contents
    try:
        if _is_question(frame) or frame.stage != EXECUTE:
            return None
        _calls[frame.attributes.items[0].contents.value[0]].run(frame)
    except BaseException as error:  # noqa: BLE001 - XLA raises it
        _errors[:] = [error.with_traceback(None)]
        return create_error(frame, ABORTED, f"{type(error).__name__}: {error}")
    return None


_handler = c.CFUNCTYPE(c.c_void_p, c.POINTER(CallFrame))(_handle)


def _is_question(frame: Any) -> bool:
    """Whether XLA asks which version of its interface the handler speaks: the one that it has."""
    if not frame.extension or frame.extension.contents.type != METADATA:
        return False
    metadata = c.cast(frame.extension, c.POINTER(MetadataExtension)).contents.metadata.contents
    metadata.version.major, metadata.version.minor = frame.api.contents.version.major, frame.api.contents.version.minor
    return True


def _pairs(frame: Any) -> list[tuple[Buffer, Buffer]]:
    count = frame.results.size
    sources = [_buffer(frame.arguments.items[index].contents) for index in range(count)]
    return [(source, _result(frame, index)) for index, source in enumerate(sources)]


def _addresses(frame: Any) -> list[int]:
    """Of the operands without a result."""
    found = [frame.arguments.items[index].contents.data for index in range(frame.results.size, frame.arguments.size)]
    return [address or 0 for address in found]


def _result(frame: Any, index: int) -> Buffer:
    return _buffer(frame.results.items[index].contents)


def _buffer(given: FFIBuffer) -> Buffer:
    return buffer_at(given.data, _DTYPES[given.dtype], tuple(given.dims[: given.rank]))


def _run(call: _Allreduce, pairs: Sequence[tuple[Buffer, Buffer]]) -> None:
    remaining = iter(pairs)
    names: Sequence[str] = call.names
    if call.roster is not None:
        call.roster.enter()
        names = [call.roster.name_in_flight(name) for name in names]
    works: list[Work] = []
    try:
        for name, count in zip(names, call.counts, strict=True):
            members = [next(remaining) for _ in range(count)]
            if count == 1:
                works.append(submission.submit(Operation.ALLREDUCE, *members[0], name, call.process_set, call.how))
            else:
                works += submission.submit_group(Operation.ALLREDUCE, members, name, call.process_set, call.how)
        for work in works:
            basics.engine().synchronize(work)
    except BaseException:
        let_end(basics.engine(), works)
        raise


@contextmanager
def engine_errors() -> Iterator[None]:
    """Raises the HorovodInternalError of an allreduce for which an error of XLA stands; all other errors pass."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        cause = last_error()
        if not isinstance(cause, HorovodInternalError) or str(cause) not in str(error):
            raise
        raise fresh(cause) from error
