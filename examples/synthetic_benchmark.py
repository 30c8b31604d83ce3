"""How many images per second a network trains on: ``hvdrun -np 2 python examples/synthetic_benchmark.py``.

Each iteration is a number of steps on one random batch. Behind +- is 1.96 sigma, within which 95 % of them should lie.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import hvd_cluster.torch as hvd

CLASSES = 100
SIDE = 32


def mlp() -> nn.Module:
    """Few operations for each of its 7.4 million parameters, so the gradients take most of the time."""
    hidden = [nn.Linear(2048, 512), nn.ReLU(), nn.Linear(512, CLASSES)]
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE**2, 2048), nn.ReLU(), *hidden)


def cnn() -> nn.Module:
    """Many operations for each of its 0.4 million parameters."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

    blocks = [*block(3, 32), *block(32, 64), *block(64, 128), *block(128, 256)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, CLASSES))


class VisionTransformer(nn.Module):
    """Patches of 4 x 4 pixels as words, in two layers of attention."""

    def __init__(self, width: int = 128, depth: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=4, stride=4)
        self.positions = nn.Parameter(torch.zeros(1, (SIDE // 4) ** 2, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the classes."""
        words = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.encoder(words).mean(dim=1))


MODELS: dict[str, Callable[[], nn.Module]] = {"cnn": cnn, "mlp": mlp, "vit": VisionTransformer}


def measure(arguments: argparse.Namespace) -> Tensor:
    """Images per second of every rank in every iteration, of shape [ranks, iterations], on every rank."""
    network = MODELS[arguments.model]()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=0.01 * hvd.size()),
        named_parameters=network.named_parameters(),
        compression=hvd.Compression.fp16 if arguments.fp16_allreduce else hvd.Compression.none,
    )
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    images = torch.randn(arguments.batch_size, 3, SIDE, SIDE)
    labels = torch.randint(CLASSES, (arguments.batch_size,))

    def steps(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(images), labels).backward()
            optimizer.step()
        return count * arguments.batch_size / (time.perf_counter() - start)

    tell("Running warmup...")
    steps(arguments.num_warmup_batches)
    tell("Running benchmark...")
    rates = []
    for number in range(arguments.num_iters):
        rates.append(steps(arguments.num_batches_per_iter))
        tell(f"Iter #{number}: {rates[-1]:.1f} img/sec per rank")
    return hvd.allgather(torch.tensor([rates]), name="rates")


def draw(rates: Tensor, path: str) -> None:
    """A bar for each iteration, with a part for each rank."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    for rank, speeds in enumerate(rates):
        axes.bar(range(rates.shape[1]), speeds, bottom=rates[:rank].sum(dim=0), label=f"rank {rank}")
    axes.set(xlabel="iteration", ylabel="images/s")
    axes.legend(loc="lower right")
    figure.savefig(path)


def spread(rates: Tensor) -> str:
    """Mean and spread, as text."""
    return f"{rates.mean():.1f} +-{1.96 * rates.std(correction=0):.1f}"


def tell(line: str) -> None:
    """Print a line, once."""
    if hvd.rank() == 0:
        print(line, flush=True)


def main() -> None:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(description="Images per second of training on random images.")
    add = parser.add_argument
    add("--model", choices=sorted(MODELS), default="cnn", help="the network (%(default)s)")
    add("--batch-size", type=int, default=32, help="images in a batch of each rank (%(default)s)")
    add("--num-warmup-batches", type=int, default=10, help="steps that do not count (%(default)s)")
    add("--num-batches-per-iter", type=int, default=10, help="steps of an iteration (%(default)s)")
    add("--num-iters", type=int, default=10, help="iterations (%(default)s)")
    add("--fp16-allreduce", action="store_true", help="let gradients travel in 16 bits")
    add("--picture", metavar="FILE", help="draw the iterations into this file, such as speed.svg")
    arguments = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    tell(f"Model: {arguments.model}")
    tell(f"Batch size: {arguments.batch_size}")
    tell(f"Number of ranks: {hvd.size()}")
    rates = measure(arguments)
    tell(f"Img/sec per rank: {spread(rates)}")
    tell(f"Total img/sec on {hvd.size()} rank(s): {spread(rates.sum(dim=0))}")
    if arguments.picture and hvd.rank() == 0:
        draw(rates, arguments.picture)


if __name__ == "__main__":
    main()
