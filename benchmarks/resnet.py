"""ResNet-18 and ResNet-50, as torchvision has them.

Source: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", 2015, table 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["resnet18", "resnet50"]

WIDTHS = (64, 128, 256, 512)


def resnet18(classes: int) -> Any:
    """Blocks of two convolutions; the same model on every rank."""
    return _resnet(classes, (2, 2, 2, 2), _basic, 1)


def resnet50(classes: int) -> Any:
    """Blocks of three convolutions, the middle one narrow; the same model on every rank."""
    return _resnet(classes, (3, 4, 6, 3), _bottleneck, 4)


def _resnet(classes: int, depths: Sequence[int], layers_of: Callable[[int, int, int], list[Any]], wider: int) -> Any:
    """``depths`` blocks in the stages; a block has ``wider`` times as many outputs as its stage has channels."""
    import torch
    from torch import nn

    class Block(nn.Module):
        """Convolutions beside a short cut."""

        def __init__(self, inputs: int, width: int, stride: int) -> None:
            super().__init__()
            outputs = width * wider
            self.body = nn.Sequential(*layers_of(inputs, width, stride))
            changes = stride > 1 or inputs != outputs
            short = [nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)] if changes else []
            self.short = nn.Sequential(*short)

        def forward(self, images: Any) -> Any:
            return torch.relu(self.body(images) + self.short(images))

    torch.manual_seed(1)
    layers: list[Any] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, (width, depth) in enumerate(zip(WIDTHS, depths, strict=True)):
        for index in range(depth):
            layers.append(Block(inputs, width, 2 if stage and not index else 1))
            inputs = width * wider
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def _basic(inputs: int, width: int, stride: int) -> list[Any]:
    from torch import nn

    return [*_convolution(inputs, width, 3, stride), nn.ReLU(), *_convolution(width, width, 3)]


def _bottleneck(inputs: int, width: int, stride: int) -> list[Any]:
    from torch import nn

    narrow = [*_convolution(inputs, width, 1), nn.ReLU(), *_convolution(width, width, 3, stride), nn.ReLU()]
    return [*narrow, *_convolution(width, 4 * width, 1)]


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> list[Any]:
    from torch import nn

    return [nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)]
