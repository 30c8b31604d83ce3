"""The gradients of ResNet-50: their names and sizes, as torchvision has them."""

from __future__ import annotations

from math import prod

__all__ = ["resnet50"]

LAYERS = ((3, 64), (4, 128), (6, 256), (3, 512))
EXPANSION = 4


def resnet50() -> dict[str, int]:
    """name -> number of elements of the 161 parameters, in the order of the model."""
    shapes = _convolution("conv1", "bn1", 64, 3, 7)
    inputs = 64
    for number, (blocks, width) in enumerate(LAYERS, start=1):
        for block in range(blocks):
            shapes.update(_bottleneck(f"layer{number}.{block}", inputs, width, block == 0))
            inputs = width * EXPANSION
    shapes.update({"fc.weight": (1000, inputs), "fc.bias": (1000,)})
    return {name: prod(shape) for name, shape in shapes.items()}


def _bottleneck(name: str, inputs: int, width: int, has_downsample: bool) -> dict[str, tuple[int, ...]]:
    outputs = width * EXPANSION
    shapes = {
        **_convolution(f"{name}.conv1", f"{name}.bn1", width, inputs, 1),
        **_convolution(f"{name}.conv2", f"{name}.bn2", width, width, 3),
        **_convolution(f"{name}.conv3", f"{name}.bn3", outputs, width, 1),
    }
    if has_downsample:
        shapes.update(_convolution(f"{name}.downsample.0", f"{name}.downsample.1", outputs, inputs, 1))
    return shapes


def _convolution(name: str, norm: str, outputs: int, inputs: int, kernel: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (outputs, inputs, kernel, kernel)}
    return {**shapes, f"{norm}.weight": (outputs,), f"{norm}.bias": (outputs,)}
