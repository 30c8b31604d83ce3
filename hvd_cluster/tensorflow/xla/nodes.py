"""Puts collectives into a graph that XLA will compile, in place of the nodes of other graphs.

Each operation is a call that starts it. One more call waits for all operations that are made together, so XLA can
compute in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops.gen_xla_ops import xla_call_module
from tensorflow.python.framework import ops
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops.resource_variable_ops import ResourceVariable
from tensorflow.python.ops.while_v2 import _WhileBodyGradFuncGraph

from collectives import Operation, ReduceOp, UnsupportedRequestError
from hvd_cluster.core import basics
from hvd_cluster.graphs.compiled import next_program
from hvd_cluster.ops.arguments import PLAIN_SUM, Reduction, as_factor
from hvd_cluster.tensorflow.errors import as_status
from hvd_cluster.tensorflow.naming import Naming, attributes_of_name, name_of_node
from hvd_cluster.tensorflow.native import xla_module, xla_registry
from hvd_cluster.tensorflow.native.done import is_known
from hvd_cluster.tensorflow.native.xla_module import SAME, RowRule, TensorType
from hvd_cluster.tensorflow.tensors import DTYPES
from hvd_cluster.tensorflow.xla.handlers import NUMBERS, POSITION, NumberCall, StartCall, WaitCall, calls, handle
from hvd_cluster.tensorflow.xla.scope import CompiledNode, backward

SCALAR = tf.TensorShape([])
ORDER = "_horovod_order"
"""The attribute of a graph for its :class:`_Order`."""
VERSION = 9
"""Of the modules; the oldest that has all that is in them."""
_OPERATIONS = {
    "Allreduce": Operation.ALLREDUCE,
    "Broadcast": Operation.BROADCAST,
    "Allgather": Operation.ALLGATHER,
    "Reducescatter": Operation.REDUCESCATTER,
    "Alltoall": Operation.ALLTOALL,
}
_IN_PLACE = (Operation.ALLREDUCE, Operation.BROADCAST)
_WITH_SECOND_OUTPUT = (Operation.ALLGATHER, Operation.ALLTOALL)
_ELEMENTS = {
    tf.uint8: "ui8",
    tf.int8: "i8",
    tf.int16: "i16",
    tf.int32: "i32",
    tf.int64: "i64",
    tf.float16: "f16",
    tf.bfloat16: "bf16",
    tf.float32: "f32",
    tf.float64: "f64",
    tf.bool: "i1",
    tf.complex64: "complex<f32>",
    tf.complex128: "complex<f64>",
}


def why_not() -> str | None:
    """The reason why XLA cannot compile collectives here; None if it can."""
    if not basics.allows_xla():
        return "HOROVOD_ENABLE_XLA_OPS is 0"
    if tf.config.list_physical_devices("GPU"):
        return "this process has a GPU, and XLA can call collectives on CPUs only"
    return _why_not_registered()


@cache
def _why_not_registered() -> str | None:
    return (
        xla_registry.register(xla_registry.as_function(handle, lambda error: as_status(error)[1]))
        if is_known()
        else UNKNOWN
    )


UNKNOWN = f"this is TensorFlow {tf.__version__}, and the calls are tested with others, on Linux"


def refuse(op: str, reason: str) -> None:
    """Raise the error of an operation that XLA cannot compile."""
    raise UnsupportedRequestError(
        f"XLA cannot compile {op}: {reason}; leave jit_compile=True out of the tf.function that calls it, and give it "
        "to the functions without collectives that are called there; for a train_step() of a Keras model, give "
        "compile() jit_compile=False"
    )


class CompiledOperation(NamedTuple):
    """An operation: an op of ours, its tensors, and its attributes as of a node, with those of its name."""

    op: str
    tensors: Sequence[tf.Tensor]
    attributes: Mapping[str, Any]

    @property
    def is_grouped(self) -> bool:
        """Whether its tensors are a group."""
        return self.op.startswith("HorovodGrouped")

    @property
    def operation(self) -> Operation:
        """The operation of the engine."""
        return _OPERATIONS[self.op.removeprefix("Horovod").removeprefix("Grouped")]

    def outputs(self, results: Sequence[Any]) -> list[Any]:
        """As the outputs of a node: those of all kinds that have a second one in other graphs have None there."""
        return [*results, None] if self.operation in _WITH_SECOND_OUTPUT else list(results)


def part_of(
    op: str, inputs: Mapping[str, Any], attributes: Mapping[str, Any], name: str | None, naming: Naming
) -> CompiledOperation:
    """The operation of a call, with the same arguments as a node has; its name is unique in the graph.

    UnsupportedRequestError for what XLA cannot compile.
    """
    tensors = _tensors(op, inputs)
    graph, label = ops.get_default_graph(), name_of_node(op, tensors, name)
    named = attributes_of_name(graph, label, naming)
    graph.unique_name(label)
    return CompiledOperation(op, tensors, {**named, **attributes})


def _tensors(op: str, inputs: Mapping[str, Any]) -> list[tf.Tensor]:
    reason = why_not()
    if op.removeprefix("Horovod").removeprefix("Grouped") not in _OPERATIONS:
        reason = reason or "it has no tensor"
    elif "splits" in inputs and inputs["splits"].shape != [0]:
        reason = reason or "shapes must be known when it compiles, and those of an alltoall with splits are not"
    if reason is not None:
        refuse(op, reason)
    found = inputs["tensors"] if "tensors" in inputs else [inputs["tensor"]]
    for tensor in found:
        if tensor.shape.rank is None:
            refuse(op, "the number of dimensions of the tensor is not known; give it with tf.ensure_shape")
    return list(found)


def number(op: str, process_set_id: int) -> tf.Tensor:
    """The output of an op without inputs: an int32 scalar, as it is when the program runs."""
    reason = why_not() or (None if op in NUMBERS else "it has no tensor")
    if reason is not None:
        refuse(op, reason)
    text = xla_module.question(calls.number_of(NumberCall(op, process_set_id)))
    [result] = _call(text, [], [tf.int32], [SCALAR])
    return result


@dataclass(frozen=True)
class _Order:
    """Gives the calls of a program one order: each reads the ticket of the last one, and writes its own.

    XLA knows the flow of data only, and runs independent calls on several threads. If each rank had an order of its
    own, calls would wait for one another, and two calls of one name could be exchanged. TensorFlow keeps the order of
    operations on a variable, also through loops, conditions and functions. Only the gradients of a loop cannot use a
    variable that the loop does not use: there, calls have the order of the flow of data.
    """

    program: int
    last: Any
    is_known: bool = True

    @classmethod
    def here(cls) -> _Order:
        """The order of the program that will contain the graph that is being built."""
        graphs = [ops.get_default_graph()]
        while isinstance(graph := getattr(graphs[-1], "outer_graph", None), FuncGraph):
            graphs.append(graph)
        order = getattr(graphs[-1], ORDER, None) or cls._new()
        for each in graphs:
            setattr(each, ORDER, order)  # a function may outlive the one in which it was traced
        return replace(order, is_known=not any(isinstance(each, _WhileBodyGradFuncGraph) for each in graphs))

    @classmethod
    def _new(cls) -> _Order:
        program = next_program()
        with tf.init_scope(), tf.device("/CPU:0"):
            # A tf.Variable would be one of the function that is being traced, which may make them once only.
            return cls(program, ResourceVariable(program, trainable=False, dtype=tf.int64, name="horovod_order"))

    def read(self) -> tf.Tensor:
        """A ticket of the program, the last one if possible."""
        return self.last.read_value() if self.is_known else tf.constant(self.program, tf.int64)

    def write(self, ticket: tf.Tensor) -> None:
        """The next call comes after that of ``ticket``."""
        if self.is_known:
            self.last.assign(ticket)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def together(parts: Sequence[CompiledOperation]) -> list[list[tf.Tensor]]:
    """The results of each of ``parts``, for which one call waits."""
    if not parts:
        return []

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def run(ticket: tf.Tensor, *tensors: tf.Tensor) -> Any:
        last, *results = _made(parts, ticket, tensors)

        def gradients(_: tf.Tensor, *given: tf.Tensor) -> list[Any]:
            with backward():
                both = zip(
                    parts, _divided(tensors, parts), _divided(results, parts), _divided(given, parts), strict=True
                )
                return [None, *[each for part, *values in both for each in _gradients(part, *values)]]

        return [last, *results], gradients

    order = _Order.here()
    last, *results = run(order.read(), *[tensor for part in parts for tensor in part.tensors])
    order.write(last)
    return _divided(results, parts)


def _divided(values: Sequence[Any], parts: Sequence[CompiledOperation]) -> list[list[Any]]:
    remaining: Iterator[Any] = iter(values)
    return [[next(remaining) for _ in part.tensors] for part in parts]


def _gradients(
    part: CompiledOperation, tensors: Sequence[tf.Tensor], results: Sequence[tf.Tensor], given: Sequence[Any]
) -> Sequence[Any]:
    """The rules are those of the ops. None for each tensor where an op has none."""
    rule = ops.gradient_registry.lookup(part.op)
    if rule is None:
        return [None] * len(tensors)
    node = CompiledNode(part.attributes, tensors, results, lambda: number(POSITION, part.attributes["process_set_id"]))
    found = rule(node, *part.outputs(given))
    gradients = list(found) if isinstance(found, list | tuple) else [found]
    return gradients[: len(tensors)]


def _made(parts: Sequence[CompiledOperation], ticket: tf.Tensor, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """A ticket, and the results. Backward makes the last gradients first, so the last operation starts first."""
    started = []
    for part, own in reversed([*zip(parts, _divided(tensors, parts), strict=True)]):
        started.append(_started(part, own, ticket))
        ticket = started[-1][0]
    tickets = [each[0] for each in reversed(started)]
    pending = [each for results in reversed(started) for each in results[1:]]
    both = zip(parts, _divided(tensors, parts), strict=True)
    sources = [each for part, own in both if part.operation not in _IN_PLACE for each in own]
    number = calls.number_of(WaitCall(len(tickets), len(pending)))
    text = xla_module.done(number, len(tickets), [*map(_type_of, pending)], [*map(_type_of, sources)])
    return _call(text, [*tickets, *pending, *sources], [tf.int64, *_dtypes(pending)], [SCALAR, *_shapes(pending)])


def _started(part: CompiledOperation, tensors: Sequence[tf.Tensor], ticket: tf.Tensor) -> list[tf.Tensor]:
    """The ticket, and the memory of the results; it starts after the call of the ``ticket``."""
    call, types = _start_of(part, tensors), [*map(_type_of, tensors)]
    made = [tf.TensorShape(type.with_rows(call.rows).shape) for type in types]
    text = xla_module.start(calls.number_of(call), types, call.rows, call.in_place)
    return _call(text, [*tensors, ticket], [tf.int64, *_dtypes(tensors)], [SCALAR, *made])


def _dtypes(tensors: Sequence[tf.Tensor]) -> list[tf.DType]:
    return [each.dtype for each in tensors]


def _shapes(tensors: Sequence[tf.Tensor]) -> list[tf.TensorShape]:
    return [each.shape for each in tensors]


def _start_of(part: CompiledOperation, tensors: Sequence[tf.Tensor]) -> StartCall:
    id, operation, own = part.attributes["process_set_id"], part.operation, part.attributes
    engine = basics.engine()
    members = engine.process_sets.ranks(id)
    position = members.index(engine.topology.rank) if engine.topology.rank in members else 0
    return StartCall(
        operation,
        part.is_grouped,
        own["tensor_name"],
        own.get("roster", 0),
        id,
        len(members),
        tuple(DTYPES[each.dtype.as_datatype_enum] for each in tensors),
        tuple(tuple(each.shape) for each in tensors),
        _rows(operation, len(members), position),
        operation in _IN_PLACE,
        _reduction(own),
        own.get("root_rank", -1),
        own.get("tag", 0),
    )


def _rows(operation: Operation, size: int, position: int) -> RowRule:
    if operation is Operation.ALLGATHER:
        return RowRule(factor=size)
    if operation is Operation.REDUCESCATTER:  # the first ranks have a row more where they do not divide
        return RowRule(1, size - 1 - position, size)
    return SAME


def _reduction(attributes: Mapping[str, Any]) -> Reduction:
    if "reduce_op" not in attributes:
        return PLAIN_SUM
    factors = (as_factor(attributes[f"{when}scale_factor"]) for when in ("pre", "post"))
    return Reduction(ReduceOp(attributes["reduce_op"]), *factors)


def _type_of(tensor: tf.Tensor) -> TensorType:
    return TensorType(_ELEMENTS[tensor.dtype], tuple(tensor.shape))


def _call(text: str, tensors: Sequence[tf.Tensor], dtypes: Sequence[Any], shapes: Sequence[Any]) -> list[tf.Tensor]:
    results: list[tf.Tensor] = xla_call_module(
        tensors,
        version=VERSION,
        module=text,
        Tout=dtypes,
        Sout=shapes,
        platforms=("CPU",),
    )
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    return results
