"""ResNet-18, as torchvision has it.

Source: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", 2015, table 1.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

__all__ = ["resnet18"]

CHANNELS = [64, 64, 128, 256, 512]


def resnet18(classes: int) -> Any:
    """The model, the same on every rank."""
    import torch
    from torch import nn

    class Block(nn.Module):
        """Two convolutions beside a short cut."""

        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(),
                nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
                nn.BatchNorm2d(outputs),
            )
            changes = stride > 1 or inputs != outputs
            short = [nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)] if changes else []
            self.short = nn.Sequential(*short)

        def forward(self, images: Any) -> Any:
            return torch.relu(self.body(images) + self.short(images))

    torch.manual_seed(1)
    layers: list[Any] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    for stage, (inputs, outputs) in enumerate(pairwise(CHANNELS)):
        layers += [Block(inputs, outputs, 1 if stage == 0 else 2), Block(outputs, outputs, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS[-1], classes))
