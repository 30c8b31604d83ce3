"""A ResNet on images of the shape of CIFAR-10: 3 x 32 x 32 pixels, ten classes.

::

    hvdrun -np 2 python examples/resnet_cifar.py --picture resnet.png

The script makes the images itself, and downloads nothing: the handwritten digits that scikit-learn ships, four times as
large, in a random colour on another one, with noise. To train on CIFAR-10 itself, let ``images()`` return its tensors,
and give ``--blocks 3 --width 16``, which makes a ResNet-20. The script has what large runs have: a warm-up of the
learning rate, which then falls along a cosine, momentum, weight decay, random shifts, and batch normalization over the
batches of all ranks.
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import hvd_cluster.torch as hvd

HELD_OUT = 360


def images(seed: int) -> tuple[Tensor, Tensor]:
    """Coloured digits of shape [1797, 3, 32, 32] with values around 0, and their labels, the same on all ranks."""
    bunch, generator = load_digits(), torch.Generator().manual_seed(seed)
    order = torch.randperm(len(bunch.target), generator=generator)
    strokes = torch.tensor(bunch.images, dtype=torch.float32)[order].unsqueeze(1) / 16
    strokes = nn.functional.interpolate(strokes, scale_factor=4, mode="bilinear")
    dark, bright = 0.5 * torch.rand(2, len(order), 3, 1, 1, generator=generator)
    noise = 0.05 * torch.randn(len(order), 3, 32, 32, generator=generator)
    return (dark + (0.5 + bright - dark) * strokes + noise - 0.5) / 0.25, torch.tensor(bunch.target)[order]


class ResidualBlock(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([hvd.SyncBatchNorm(outputs), hvd.SyncBatchNorm(outputs)])
        self.around = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """The images of the next layer."""
        inner = self.norms[1](self.second(self.norms[0](self.first(x)).relu()))
        return (inner + self.around(x)).relu()


def resnet(blocks: int, width: int) -> nn.Sequential:
    """Three stages of blocks; each halves the side of the images and doubles their channels."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), hvd.SyncBatchNorm(width), nn.ReLU()]
    for stage in range(3):
        channels, stride = width * 2**stage, 2 if stage else 1
        layers.append(ResidualBlock(channels // stride, channels, stride))
        layers += [ResidualBlock(channels, channels, 1) for _ in range(blocks - 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


def shifted(batch: Tensor, generator: torch.Generator) -> Tensor:
    """The images, moved by up to two pixels: what falls out at one side comes in at the other."""
    down, right = torch.randint(-2, 3, (2,), generator=generator).tolist()
    return batch.roll((down, right), dims=(2, 3))


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """The rate rises for a tenth of the steps, then falls along a cosine."""
    warm = max(steps // 10, 1)

    def factor(step: int) -> float:
        return (step + 1) / warm if step < warm else 0.5 + 0.5 * math.cos(math.pi * (step - warm) / (steps - warm))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def train(network: nn.Module, arguments: argparse.Namespace) -> list[tuple[float, float]]:
    """Loss and held-out accuracy of each epoch, of all ranks together."""
    pixels, labels = images(arguments.seed)
    each = (len(labels) - HELD_OUT) // (arguments.batch_size * hvd.size())  # steps of an epoch, on every rank
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        network.parameters(), lr=arguments.rate * hvd.size(), momentum=0.9, weight_decay=1e-4, nesterov=True
    )
    falling = schedule(optimizer, each * arguments.epochs)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=network.named_parameters())
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    generator, shifts = torch.Generator().manual_seed(arguments.seed), torch.Generator().manual_seed(hvd.rank())
    history = []
    for epoch in range(1, arguments.epochs + 1):
        start, losses = time.perf_counter(), []
        network.train()
        mine = HELD_OUT + torch.randperm(len(labels) - HELD_OUT, generator=generator)[hvd.rank() :: hvd.size()]
        for batch in mine.split(arguments.batch_size)[:each]:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(network(shifted(pixels[batch], shifts)), labels[batch])
            loss.backward()
            optimizer.step()
            falling.step()
            losses.append(loss.detach())
        speed = each * arguments.batch_size * hvd.size() / (time.perf_counter() - start)
        mean = hvd.allreduce(torch.stack(losses).mean(), name="loss").item()
        history.append((mean, accuracy(network, pixels[:HELD_OUT], labels[:HELD_OUT])))
        hvd.print_once(
            f"epoch {epoch:2}   loss {mean:.4f}   held-out accuracy {history[-1][1]:.4f}   {speed:,.0f} images/s"
        )
    return history


@torch.no_grad()
def accuracy(network: nn.Module, pixels: Tensor, labels: Tensor) -> float:
    """The share of the images that the network gets right; each rank looks at its own."""
    network.eval()
    right = network(pixels[hvd.rank() :: hvd.size()]).argmax(dim=1) == labels[hvd.rank() :: hvd.size()]
    return int(hvd.allreduce(right.sum(), name="right", op=hvd.Sum)) / len(labels)


@torch.no_grad()
def draw(network: nn.Module, history: list[tuple[float, float]], arguments: argparse.Namespace) -> None:
    """Loss and accuracy by epoch, and images that the network has not seen, with its guesses."""
    import matplotlib.pyplot as plt

    figure, (curves, gallery) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for values, label in zip(zip(*history, strict=True), ("loss", "held-out accuracy"), strict=True):
        curves.plot(range(1, len(values) + 1), values, "o-", label=label)
    curves.set(xlabel="epoch", xticks=range(1, len(history) + 1), ylim=0)
    curves.legend()
    pixels = images(arguments.seed)[0][:18]
    guesses = network.eval()(pixels).argmax(dim=1).tolist()
    rows = (pixels * 0.25 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).reshape(3, 6, 32, 32, 3)
    gallery.imshow(rows.permute(0, 2, 1, 3, 4).reshape(96, 192, 3))
    for place, guess in enumerate(guesses):
        gallery.text(place % 6 * 32 + 2, place // 6 * 32 + 9, guess, color="white", backgroundcolor="black", size=7)
    gallery.set_title("the network reads")
    gallery.axis("off")
    figure.savefig(arguments.picture)


def main() -> None:
    """Train; rank 0 prints a line for each epoch, and draws."""
    parser = argparse.ArgumentParser(description="A ResNet on images of the shape of CIFAR-10.")
    add = parser.add_argument
    add("--blocks", type=int, default=1, help="of each of the three stages (%(default)s)")
    add("--width", type=int, default=8, help="channels of the first stage; 16 in the paper (%(default)s)")
    add("--epochs", type=int, default=5, help="passes over the images (%(default)s)")
    add("--batch-size", type=int, default=16, help="of each rank (%(default)s)")
    add("--rate", type=float, default=0.05, help="learning rate of one rank (%(default)s)")
    add("--seed", type=int, default=1, help="of all random numbers (%(default)s)")
    add("--picture", metavar="FILE", help="draw curves and images into this file, such as resnet.png")
    arguments = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    network = resnet(arguments.blocks, arguments.width)
    history = train(network, arguments)
    if arguments.picture and hvd.rank() == 0:
        draw(network, history, arguments)


if __name__ == "__main__":
    main()
