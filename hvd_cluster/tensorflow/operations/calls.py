"""Calls an op of ours: at once in eager mode, or as a node of the graph that is being built.

TensorFlow would run an op that it cannot vectorize in a loop of its own, where the iterations of a collective run at
the same time under one name.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NoReturn

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context as eager_context
from tensorflow.python.eager import core, execute
from tensorflow.python.framework import op_def_library, ops
from tensorflow.python.ops.parallel_for.pfor import RegisterPFor

from hvd_cluster.comparison.rosters import Roster
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.gradients.lists import ListCombiner
from hvd_cluster.ops.arguments import Reduction, as_group
from hvd_cluster.tensorflow.errors import TEXT, engine_error
from hvd_cluster.tensorflow.kernels.entry import calling
from hvd_cluster.tensorflow.naming import Naming, attributes_of_name, chosen, name_of_node
from hvd_cluster.tensorflow.native.done import can_take
from hvd_cluster.tensorflow.native.error_texts import put_first
from hvd_cluster.tensorflow.operations.attributes import reduction_attributes, set_attribute
from hvd_cluster.tensorflow.tensors import as_tensor
from hvd_cluster.tensorflow.xla.scope import is_compiled

FAMILIES = ("Allgather", "Allreduce", "Broadcast", "Reducescatter")
OPS = (*FAMILIES, *(f"Grouped{family}" for family in FAMILIES), "Alltoall", "Barrier", "Join")


def refuse_all() -> None:
    """Let TensorFlow call :func:`_refuse` where it vectorizes a collective; once in a process."""
    for op in OPS:
        RegisterPFor(f"Horovod{op}")(_refuse)


def _refuse(node: Any) -> NoReturn:
    """No ValueError, as those of ours are: a tape replaces these by one that does not name the operation."""
    raise NotImplementedError(
        f"TensorFlow cannot vectorize {node.op_type} (pfor, which tf.vectorized_map, tape.jacobian and "
        "tape.batch_jacobian use); give the tape's method experimental_use_pfor=False, or use tf.map_fn in place of "
        "tf.vectorized_map"
    )


def makes_nodes() -> bool:
    """Whether a call makes a node of a graph now."""
    return not eager_context.executing_eagerly()


def call(
    op: str,
    inputs: dict[str, Any],
    attributes: dict[str, Any],
    name: Any = None,
    ignore_name_scope: bool = False,
    by_path: bool = False,
    named: bool = True,
    independent: bool = True,
    roster: Roster | None = None,
    tag: int = 0,
) -> Any:
    """The output or the list of outputs of ``op``; in a graph, the node of an op without outputs.

    ``inputs`` are tensors or lists of tensors by the names in the definition. ``named``: the op has a ``tensor_name``:
    ``name`` as text.
    ``by_path``: ``name`` is not the user's own, so that of a graph begins with the calls that lead to the node.
    With a ``roster``, of gradients, ``name`` is a static one of it in a graph, and the path belongs to it, too.
    ``tag``: see :class:`collectives.api.Request`.
    ``independent``: it does not matter when the op runs, relative to others with side effects.
    """
    context = eager_context.context()
    text = None if name is None else str(name)
    if not context.executing_eagerly():
        naming = chosen(text, ignore_name_scope, by_path or roster is not None) if named else None
        if named:
            attributes = {**_attributes_of_roster(roster, tag), **attributes}
        return _node(op, inputs, attributes, text, naming, independent)
    if named:
        attributes = {"tensor_name": text or "", "naming": 0, **attributes}
    if tag:
        attributes["tag"] = tag
    return _run(context, op, inputs, attributes)


def combine(op: str, tensor: Any, how: Reduction, process_set: ProcessSet, **naming: Any) -> tf.Tensor:
    """The output of an op that combines the tensors of the ranks. ``naming``: as in :func:`call`."""
    attributes = {**reduction_attributes(how), **set_attribute(process_set)}
    return call(op, {"tensor": as_tensor(tensor)}, attributes, **naming)


def combine_group(
    op: str, tensors: Sequence[Any], how: Reduction, process_set: ProcessSet, **naming: Any
) -> list[tf.Tensor]:
    """As :func:`combine`, for a group. That of no tensors is empty: there is nothing to wait for."""
    attributes = {**reduction_attributes(how), **set_attribute(process_set)}
    given = as_group(tensors, tf.Tensor, as_tensor)
    results: list[tf.Tensor] = call(op, {"tensors": given}, attributes, **naming) if given else []
    return results


def combine_together(
    groups: Sequence[tuple[str, Sequence[Any], dict[str, Any]]], how: Reduction, process_set: ProcessSet
) -> list[list[tf.Tensor]]:
    """As :func:`combine_group` of each op with its tensors and its naming, by a roster, in a compiled function."""
    from hvd_cluster.tensorflow.xla import nodes

    shared = {**reduction_attributes(how), **set_attribute(process_set)}
    parts = []
    for op, tensors, naming in groups:
        attributes = {**_attributes_of_roster(naming["roster"], naming["tag"]), **shared}
        given = {"tensors": as_group(tensors, tf.Tensor, as_tensor)}
        parts.append(nodes.part_of(op, given, attributes, naming["name"], chosen(naming["name"], False, True)))
    results: list[list[tf.Tensor]] = nodes.together(parts)
    return results


def _attributes_of_roster(roster: Roster | None, tag: int) -> dict[str, Any]:
    return {"roster": 0 if roster is None else roster.number, "tag": tag}


def _run(context: Any, op: str, inputs: dict[str, Any], attributes: dict[str, Any]) -> Any:
    context.ensure_initialized()
    with calling():
        try:
            flat = chain.from_iterable(attributes.items())
            return pywrap_tfe.TFE_Py_FastPathExecute(context, op, None, *inputs.values(), *flat)
        except core._NotOkStatusException as error:
            status = error
    _raise(status)


def _raise(status: Any) -> None:
    """Raise TensorFlow's error, caused by the engine's own; or an interrupt, which is no error."""
    error = core._status_to_exception(status)
    put_first(error, TEXT)
    cause = engine_error(error)
    if cause is not None and not isinstance(cause, Exception):
        raise cause
    raise error from cause


def _node(
    op: str,
    inputs: dict[str, Any],
    attributes: dict[str, Any],
    name: str | None,
    naming: Naming | None,
    independent: bool,
) -> Any:
    if is_compiled():
        return _compiled(op, inputs, attributes, name, naming)
    graph = ops.get_default_graph()
    label = name_of_node(op, _flat(inputs), name)
    if naming is not None:
        attributes = {**attributes_of_name(graph, label, naming), **attributes}
    structure, _, node, outputs = op_def_library._apply_op_helper(op, name=label, **inputs, **attributes)
    if independent:
        _let_run_independently(graph, node)
    if execute.must_record_gradient():
        execute.record_gradient(op, node.inputs, tuple(chain.from_iterable(attributes.items())), outputs)
    return _structured(structure, outputs) if outputs else node


def _compiled(
    op: str, inputs: dict[str, Any], attributes: dict[str, Any], name: str | None, naming: Naming | None
) -> Any:
    """As :func:`_node`, in a function that XLA is to compile. UnsupportedRequestError where it cannot.

    A function that was traced before does not pass here when a compiled one calls it: that is TensorFlow's error.
    """
    from hvd_cluster.tensorflow.xla import nodes

    if naming is None or not inputs:
        return nodes.number(op, attributes.get("process_set_id", 0))
    part = nodes.part_of(op, inputs, attributes, name, naming)
    [results] = nodes.together([part])
    outputs = part.outputs(results if part.is_grouped else results[:1])
    if not part.is_grouped:
        return outputs if len(outputs) > 1 else outputs[0]
    return [results, None] if len(outputs) > len(results) else results


def _let_run_independently(graph: Any, node: Any) -> None:
    """Let ``node`` run in any case, and at the same time as others.

    A tf.function runs nodes with side effects one after the other. Collectives that wait in turn would neither overlap
    nor fuse, and two ranks that trace them in different orders would wait for one another for ever.
    """
    manager = graph.experimental_acd_manager
    if manager is not None and can_take():
        manager.run_independently(node)


def _flat(inputs: dict[str, Any]) -> Sequence[Any]:
    return [tensor for value in inputs.values() for tensor in (value if isinstance(value, list) else [value])]


def _structured(structure: Sequence[int | None], outputs: Sequence[Any]) -> Any:
    """As eager mode returns them: a tensor, or a list in which the value of a list of tensors is a list."""
    remaining = iter(outputs)
    values = [next(remaining) if size is None else [next(remaining) for _ in range(size)] for size in structure]
    return values[0] if len(values) == 1 else values


for _function in (call, combine, combine_group, combine_together, ListCombiner.combine):
    setattr(_function, "autograph_info__", {})  # noqa: B010 - AutoGraph shall call it, and not take seconds to convert it
