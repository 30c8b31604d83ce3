"""A GAN with two distributed optimizers learns to draw points on a ring of eight clouds.

::

    hvdrun -np 2 python examples/gan_ring.py --picture gan.svg

Each rank draws its own real points and its own noise, and both networks stay the same on all ranks. A GAN needs two
things besides the five lines. Each network has an optimizer of its own. And while the generator learns, the
discriminator passes gradients on, but must not collect any: ``requires_grad_(False)`` keeps them out of its optimizer.
The table counts the clouds that the generator has found, and how many of its points lie in one.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn

import hvd_cluster.torch as hvd

NOISE = 8
CLOUDS = 8
SPREAD = 0.05
ANGLES = torch.arange(CLOUDS) * (2 * math.pi / CLOUDS)
CENTRES = torch.stack([ANGLES.cos(), ANGLES.sin()], dim=1)


def real(count: int) -> Tensor:
    """Points of the clouds, each of which is a normal distribution."""
    return CENTRES[torch.randint(CLOUDS, (count,))] + SPREAD * torch.randn(count, 2)


def perceptron(inputs: int, outputs: int) -> nn.Sequential:
    """A network with two hidden layers."""
    hidden = [nn.Linear(inputs, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2)]
    return nn.Sequential(*hidden, nn.Linear(128, outputs))


def distributed(network: nn.Module, rate: float) -> torch.optim.Optimizer:
    """An optimizer for a network that is the same on all ranks from here on."""
    optimizer: torch.optim.Optimizer = torch.optim.Adam(network.parameters(), lr=rate, betas=(0.5, 0.9))
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=network.named_parameters())
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return optimizer


def step(network: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    """Let one of the two networks learn from ``loss``."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def found(points: Tensor) -> tuple[int, float]:
    """The number of clouds with at least 2 % of the points in them, and the share of points in any cloud."""
    distances, nearest = torch.cdist(points, CENTRES).min(dim=1)
    inside = nearest[distances < 4 * SPREAD]
    return int((inside.bincount(minlength=CLOUDS) >= 0.02 * len(points)).sum()), len(inside) / len(points)


def train(arguments: argparse.Namespace) -> list[tuple[int, Tensor]]:
    """Points of the generator at five moments, on every rank."""
    hvd.set_seed(arguments.seed)  # another stream of random numbers for each rank
    generator, discriminator = perceptron(NOISE, 2), perceptron(2, 1)
    makes, judges = distributed(generator, arguments.rate), distributed(discriminator, arguments.rate)
    softplus, moments = nn.functional.softplus, []
    for number in range(arguments.steps + 1):
        if number % max(arguments.steps // 4, 1) == 0:
            with torch.no_grad():
                moments.append((number, hvd.allgather(generator(torch.randn(400, NOISE)), name="points")))
            clouds, inside = found(moments[-1][1])
            hvd.print_once(f"step {number:5}   clouds found {clouds} of {CLOUDS}   points in a cloud {inside:5.1%}")
        fakes = generator(torch.randn(arguments.batch_size, NOISE))
        genuine = discriminator(real(arguments.batch_size))
        step(discriminator, judges, (softplus(-genuine) + softplus(discriminator(fakes.detach()))).mean())
        discriminator.requires_grad_(False)  # it only passes the gradient on to the generator
        step(generator, makes, softplus(-discriminator(fakes)).mean())
        discriminator.requires_grad_(True)
    return moments


def draw(moments: list[tuple[int, Tensor]], path: str) -> None:
    """The generator's points over the centres of the clouds, a panel for each moment."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(moments), figsize=(2 * len(moments), 2.3), layout="constrained")
    for panel, (number, points) in zip(panels, moments, strict=True):
        panel.scatter(*CENTRES.T, s=200, color="tab:orange", alpha=0.4, lw=0)
        panel.scatter(*points.T, s=2, color="tab:blue", lw=0)
        panel.set(title=f"step {number}", xlim=(-1.6, 1.6), ylim=(-1.6, 1.6), xticks=[], yticks=[], aspect="equal")
    figure.savefig(path, dpi=150)


def main() -> None:
    """Train; rank 0 prints how far the generator is, and draws its points."""
    parser = argparse.ArgumentParser(description="A GAN with two distributed optimizers.")
    add = parser.add_argument
    add("--steps", type=int, default=1200, help="of each network (%(default)s)")
    add("--batch-size", type=int, default=64, help="points of each rank in a step (%(default)s)")
    add("--rate", type=float, default=0.002, help="the learning rate of both networks (%(default)s)")
    add("--seed", type=int, default=1, help="of all random numbers (%(default)s)")
    add("--picture", metavar="FILE", help="draw the points into this file, such as gan.png")
    arguments = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    moments = train(arguments)
    if arguments.picture and hvd.rank() == 0:
        draw(moments, arguments.picture)


if __name__ == "__main__":
    main()
