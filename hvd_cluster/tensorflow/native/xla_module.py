"""The calls of our function in the language of XLA's modules, StableHLO. Pure.

Where a dimension is not known before the program runs, XLA wants the shape of each result as one more operand, which
the function does not get; so it gets it a second time where it needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

TICKET = "tensor<i64>"


@dataclass(frozen=True, slots=True)
class RowRule:
    """The first dimension of a result, from that of the tensor: ``(rows * factor + addend) // divisor``."""

    factor: int = 1
    addend: int = 0
    divisor: int = 1

    def of(self, rows: int) -> int:
        """The number of rows of the result."""
        return (rows * self.factor + self.addend) // self.divisor

    @property
    def are_same(self) -> bool:
        """Whether the result always has the rows of the tensor."""
        return self == RowRule()


SAME = RowRule()


@dataclass(frozen=True, slots=True)
class TensorType:
    """``element`` is a type of StableHLO, such as f32; unknown dimensions are None."""

    element: str
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        return f"tensor<{''.join(f'{_dimension(each)}x' for each in self.shape)}{self.element}>"

    @property
    def is_static(self) -> bool:
        """Whether all dimensions are known."""
        return None not in self.shape

    def with_rows(self, rows: RowRule) -> TensorType:
        """The type of the result for this tensor."""
        if not self.shape or rows.are_same:
            return self
        first = self.shape[0]
        return TensorType(self.element, (None if first is None else rows.of(first), *self.shape[1:]))


def _dimension(size: int | None) -> str:
    return "?" if size is None else str(size)


@dataclass
class _Body:
    """The lines of a function, and the number of values so far."""

    lines: list[str] = field(default_factory=list)
    count: int = 0

    def value(self, operation: str, type: str) -> str:
        """Add an operation with one result; returns the name of that."""
        self.count += 1
        self.lines.append(f"%v{self.count} = {operation}")
        return f"%v{self.count}"

    def number(self, value: int) -> str:
        return self.value(f"stablehlo.constant dense<{value}> : tensor<i32>", "tensor<i32>")

    def binary(self, operation: str, left: str, right: str) -> str:
        return self.value(f"stablehlo.{operation} {left}, {right} : tensor<i32>", "tensor<i32>")

    def shape(self, tensor: str, type: TensorType, rows: RowRule = SAME) -> str:
        """The shape of the result for ``tensor``, as a vector of int32."""
        parts = [self._vector(self._size(tensor, type, axis, rows)) for axis in range(len(type.shape))]
        if len(parts) == 1:
            return parts[0]
        types = ", ".join(["tensor<1xi32>"] * len(parts))
        text = f"stablehlo.concatenate {', '.join(parts)}, dim = 0 : ({types}) -> tensor<{len(parts)}xi32>"
        return self.value(text, f"tensor<{len(parts)}xi32>")

    def known_shape(self, shape: Sequence[int]) -> str:
        """As :meth:`shape`, of a type without unknown dimensions."""
        content = f"[{', '.join(map(str, shape))}]" if shape else ""
        return self.value(f"stablehlo.constant dense<{content}> : tensor<{len(shape)}xi32>", "")

    def _vector(self, number: str) -> str:
        return self.value(f"stablehlo.reshape {number} : (tensor<i32>) -> tensor<1xi32>", "tensor<1xi32>")

    def _size(self, tensor: str, type: TensorType, axis: int, rows: RowRule) -> str:
        known = type.shape[axis]
        if known is not None:
            return self.number(known if axis else rows.of(known))
        size = self.value(f"stablehlo.get_dimension_size {tensor}, dim = {axis} : ({type}) -> tensor<i32>", "")
        if axis or rows.are_same:
            return size
        product = self.binary("multiply", size, self.number(rows.factor))
        return self.binary("divide", self.binary("add", product, self.number(rows.addend)), self.number(rows.divisor))


def start(number: int, tensors: Sequence[TensorType], rows: RowRule, in_place: bool) -> str:
    """A call that gets ``tensors``, the shapes of those with unknown dimensions, and the ticket of an earlier call.

    It returns a ticket, and memory for the results: that of the tensors themselves if ``in_place``.
    """
    results = [each.with_rows(rows) for each in tensors]
    body = _Body()
    inputs = [*map(str, tensors), TICKET]
    names = [f"%a{index}" for index in range(len(inputs))]
    pairs = list(zip(tensors, names, strict=False))
    shapes = [body.shape(name, each) for each, name in pairs if not each.is_static]
    vectors = [f"tensor<{len(each.shape)}xi32>" for each in tensors if not each.is_static]
    sizes = _result_shapes(body, [(each, rows, name) for each, name in pairs])
    aliases = {index + 1: index for index in range(len(tensors))} if in_place else {}
    own = list(zip(names, inputs, strict=True))
    operands = [*own[:-1], *zip(shapes, vectors, strict=True), own[-1]]
    return _module(body, number, inputs, operands, [TICKET, *map(str, results)], aliases, sizes)


def done(number: int, tickets: int, results: Sequence[TensorType], sources: Sequence[TensorType]) -> str:
    """A call that gets ``tickets`` and ``results`` and returns a ticket, and these when the operations are over.

    ``sources`` are tensors whose memory the operations read until then.
    """
    body = _Body()
    inputs = [*[TICKET] * tickets, *map(str, results), *map(str, sources)]
    names = [f"%a{index}" for index in range(len(inputs))]
    own = names[tickets : tickets + len(results)]
    sizes = _result_shapes(body, [(each, SAME, name) for each, name in zip(results, own, strict=True)])
    aliases = {index + 1: tickets + index for index in range(len(results))}
    made = [TICKET, *map(str, results)]
    return _module(body, number, inputs, list(zip(names, inputs, strict=True)), made, aliases, sizes)


def question(number: int) -> str:
    """A call that returns a number, an int32 scalar."""
    return _module(_Body(), number, [], [], ["tensor<i32>"], {}, [])


def _result_shapes(body: _Body, results: Sequence[tuple[TensorType, RowRule, str]]) -> list[tuple[str, str]]:
    """The shapes of a ticket and of all results with their types, if one has unknown dimensions."""
    if all(each.is_static for each, _, _ in results):
        return []
    found = [(body.known_shape(()), "tensor<0xi32>")]
    for type, rows, name in results:
        made = type.with_rows(rows)
        known = [size for size in made.shape if size is not None]
        shape = body.known_shape(known) if made.is_static else body.shape(name, type, rows)
        found.append((shape, f"tensor<{len(type.shape)}xi32>"))
    return found


def _module(
    body: _Body,
    number: int,
    inputs: Sequence[str],
    operands: Sequence[tuple[str, str]],
    results: Sequence[str],
    aliases: dict[int, int],
    shapes: Sequence[tuple[str, str]],
) -> str:
    """A module whose main function gets ``inputs`` and returns the ``results`` of one call."""
    given = ", ".join(f"%a{index}: {each}" for index, each in enumerate(inputs))
    all_operands = [*operands, *shapes]
    names, types = ", ".join(name for name, _ in all_operands), ", ".join(type for _, type in all_operands)
    made = ", ".join(results)
    returned = ", ".join(f"%r#{index}" for index in range(len(results))) if len(results) > 1 else "%r"
    return "\n".join(
        [
            f"module attributes {{{'jax.uses_shape_polymorphism = true' if shapes else ''}}} {{",
            f"func.func public @main({given}) -> ({made}) {{",
            *body.lines,
            f"%r{f':{len(results)}' if len(results) > 1 else ''} = stablehlo.custom_call @hvd_cluster({names}) "
            f"{{{_attributes(number, aliases, len(results), len(operands), len(shapes))}}} : ({types}) -> ({made})",
            f"return {returned} : {made}",
            "}",
            "}",
        ]
    )


def _attributes(number: int, aliases: dict[int, int], results: int, operands: int, shapes: int) -> str:
    found = ["api_version = 3 : i32", f'backend_config = "{number}"', "has_side_effect = true"]
    if aliases:
        found.append(f"output_operand_aliases = [{', '.join(_alias(*each, results) for each in aliases.items())}]")
    if shapes:
        indices = ", ".join(str(operands + index) for index in range(shapes))
        found.append(f"indices_of_shape_operands = dense<[{indices}]> : tensor<{shapes}xi64>")
    return ", ".join(found)


def _alias(result: int, operand: int, results: int) -> str:
    place = str(result) if results > 1 else ""
    return (
        f"#stablehlo.output_operand_alias<output_tuple_indices = [{place}], operand_index = {operand}, "
        "operand_tuple_indices = []>"
    )
