"""Makes TensorFlow know an op and its kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_int32, c_int64, create_string_buffer
from dataclasses import dataclass
from typing import Any

from hvd_cluster.tensorflow.native.library import CREATE, DELETE, RUN_ASYNC, calls, checked


class Construction:
    """A kernel that is being made, and its node."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    @property
    def name(self) -> str:
        """The name of the node in the graph that runs, in which functions are inlined."""
        view = calls.TF_OpKernelConstruction_GetName(self._pointer)
        return ctypes.string_at(view.data, view.length).decode()

    def text(self, attribute: str) -> str:
        """The value of an attribute of the type string."""
        name, items, size = attribute.encode(), c_int32(), c_int32()
        with checked() as status:
            calls.TF_OpKernelConstruction_GetAttrSize(self._pointer, name, byref(items), byref(size), status)
        value = create_string_buffer(size.value + 1)
        with checked() as status:
            calls.TF_OpKernelConstruction_GetAttrString(self._pointer, name, value, size.value, status)
        return value.raw[: size.value].decode()

    def integer(self, attribute: str) -> int:
        """The value of an attribute of the type int."""
        value = c_int64()
        with checked() as status:
            calls.TF_OpKernelConstruction_GetAttrInt64(self._pointer, attribute.encode(), byref(value), status)
        return value.value

    def fail(self, status: int) -> None:
        """The kernel cannot be made."""
        calls.TF_OpKernelConstruction_Failure(self._pointer, status)


DEVICES = (b"CPU", b"GPU")


@dataclass(frozen=True)
class Definition:
    """An op. ``inputs``, ``outputs`` and ``attributes`` are in the language of TensorFlow, such as "tensor: T".

    ``shape`` is a function of ``shapes``, or None for an op without outputs.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[str, ...]
    shape: Callable[..., None] | None

    @property
    def arguments(self) -> list[str]:
        """The names of the inputs and outputs."""
        return [text.partition(":")[0] for text in (*self.inputs, *self.outputs)]


_callbacks: list[Any] = []
"""TensorFlow calls them as long as the process lives."""


def register(
    definition: Definition, create: Callable[[int], int], run: Callable[..., None], delete: Callable[[int], None]
) -> None:
    """Register the op, which is stateful, and a kernel for each kind of device; EngineError if TensorFlow refuses.

    ``create(construction)`` returns the number that ``run(number, context, done)`` and ``delete(number)`` get. None of
    them may raise. The tensors are in host memory: TensorFlow copies those of a GPU there and back.
    """
    _define(definition)
    functions = CREATE(create), RUN_ASYNC(run), DELETE(delete)
    _callbacks.append(functions)
    for device in DEVICES:
        builder = calls.TF_NewAsyncKernelBuilder(definition.name.encode(), device, *functions)
        _add_kernel(definition, device, builder)


def _define(definition: Definition) -> None:
    builder = calls.TF_NewOpDefinitionBuilder(definition.name.encode())
    for text in definition.inputs:
        calls.TF_OpDefinitionBuilderAddInput(builder, text.encode())
    for text in definition.outputs:
        calls.TF_OpDefinitionBuilderAddOutput(builder, text.encode())
    for text in definition.attributes:
        calls.TF_OpDefinitionBuilderAddAttr(builder, text.encode())
    # Nobody may compute it in advance, merge two of them into one, or leave it out: another rank would wait.
    calls.TF_OpDefinitionBuilderSetIsStateful(builder, True)
    if definition.shape is not None:
        calls.TF_OpDefinitionBuilderSetShapeInferenceFunction(builder, definition.shape)
    with checked() as status:
        calls.TF_RegisterOpDefinition(builder, status)


def _add_kernel(definition: Definition, device: bytes, builder: int) -> None:
    if device != b"CPU":
        for argument in definition.arguments:
            calls.TF_KernelBuilder_HostMemory(builder, argument.encode())
    with checked() as status:
        calls.TF_RegisterKernelBuilder(definition.name.encode(), builder, status)
