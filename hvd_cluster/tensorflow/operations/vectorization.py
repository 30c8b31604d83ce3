"""Loops that TensorFlow vectorizes, as ``tf.vectorized_map`` and the jacobian of a tape do: no collective is in one.

TensorFlow would run an op that it cannot vectorize in a loop of its own, where the iterations of a collective run at
the same time under one name.
"""

from __future__ import annotations

from typing import Any, NoReturn

from tensorflow.python.ops.parallel_for.pfor import RegisterPFor

__all__ = ["refuse_all"]

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
