"""Learn handwritten digits on one process or on many.

::

    python examples/digits.py
    hvdrun -np 2 python examples/digits.py

The data are the 1,797 images of 8 x 8 pixels that scikit-learn ships. Five lines make the training a distributed one;
each is marked with its number.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import hvd_cluster.torch as hvd

HELD_OUT = 360
RATE = 0.03


@dataclass(frozen=True)
class Options:
    """How to train."""

    epochs: int = 15
    batch_size: int = 32
    seed: int = 1


@dataclass(frozen=True)
class Epoch:
    """The result of one pass over the data, of all ranks together."""

    number: int
    loss: float
    accuracy: float
    images_per_second: float

    def __str__(self) -> str:
        return (
            f"epoch {self.number:2}   loss {self.loss:.4f}   held-out accuracy {self.accuracy:.4f}   "
            f"{self.images_per_second:,.0f} images/s"
        )


@dataclass(frozen=True)
class Result:
    """The final state of a rank."""

    rank: int
    accuracy: float
    fingerprint: str


class Digits:
    """The images as a training and a held-out part, the same on every rank."""

    def __init__(self, seed: int) -> None:
        bunch = load_digits()
        order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(seed))
        images = torch.tensor(bunch.images, dtype=torch.float32)[order].unsqueeze(1) / 16
        labels = torch.tensor(bunch.target)[order]
        self.held_out = images[:HELD_OUT], labels[:HELD_OUT]
        self.training = images[HELD_OUT:], labels[HELD_OUT:]


def model() -> nn.Module:
    """A small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train(options: Options, report: Callable[[Epoch], object]) -> Result:
    """Train on every rank; rank 0 calls ``report`` after each epoch."""
    hvd.init()  # 1: find the other ranks
    torch.set_num_threads(1)
    torch.manual_seed(options.seed + hvd.rank())  # ranks start apart, so that line 4 has something to do
    data, network = Digits(options.seed), model()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        network.parameters(),
        lr=RATE * hvd.size(),  # 2: each step sees the batches of all ranks, so it may be longer
        momentum=0.9,
    )
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=network.named_parameters())  # 3: average gradients
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)  # 4: start from the same parameters
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # 5: and from the same momentum

    accuracy = 0.0
    for number in range(1, options.epochs + 1):
        start = time.perf_counter()
        losses = [step(network, optimizer, *batch) for batch in batches(data, options, number)]
        seconds = time.perf_counter() - start
        loss = hvd.allreduce(torch.stack(losses).mean(), name="loss").item()
        accuracy = evaluate(network, data)
        if hvd.rank() == 0:
            images = len(losses) * options.batch_size * hvd.size()
            report(Epoch(number, loss, accuracy, images / seconds))
    return Result(hvd.rank(), accuracy, fingerprint(network))


def batches(data: Digits, options: Options, epoch: int) -> list[tuple[Tensor, Tensor]]:
    """This rank's share of the training images, in an order of its own for each epoch.

    All ranks get the same number of batches, all of the same size; the few images that are left over have their turn in
    another epoch.
    """
    images, labels = data.training
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(options.seed * 1000 + epoch))
    count = len(order) // (options.batch_size * hvd.size())
    if count == 0:
        needed = f"{hvd.size()} ranks x batches of {options.batch_size}"
        raise ValueError(f"{len(order)} images are fewer than one step takes: {needed}")
    share = order[hvd.rank() :: hvd.size()][: count * options.batch_size]
    return [(images[part], labels[part]) for part in share.split(options.batch_size)]


def step(network: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> Tensor:
    """One step of the optimizer on one batch; returns the loss."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(network(images), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def evaluate(network: nn.Module, data: Digits) -> float:
    """The share of the held-out images that the network gets right; each rank looks at some of them."""
    images, labels = (part[hvd.rank() :: hvd.size()] for part in data.held_out)
    right = (network(images).argmax(dim=1) == labels).sum()
    return int(hvd.allreduce(right, name="right", op=hvd.Sum)) / HELD_OUT


def fingerprint(network: nn.Module) -> str:
    """The same for two networks only if every bit of their parameters is the same."""
    digest = hashlib.sha256()
    for tensor in network.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


def compare(fingerprints: list[str]) -> str:
    """Say that all ranks have the same parameters; ends the program where they differ."""
    if len(set(fingerprints)) > 1:
        sys.exit(f"the ranks ended with different parameters: {', '.join(fingerprints)}")
    count = len(fingerprints)
    return f"parameters: bit for bit the same on {count} of {count} ranks, sha256 {fingerprints[0]}"


def check(fingerprint: str) -> None:
    """Compare the final states of all ranks; rank 0 prints the result."""
    verdict = compare(hvd.allgather_object(fingerprint))
    if hvd.rank() == 0:
        print(verdict, flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that say how to train."""
    parser.add_argument("--epochs", type=positive, default=Options.epochs, help="passes over the images (%(default)s)")
    parser.add_argument("--batch-size", type=positive, default=Options.batch_size, help="of each rank (%(default)s)")
    parser.add_argument("--seed", type=int, default=Options.seed, help="of all random numbers (%(default)s)")


def positive(text: str) -> int:
    """``text`` as an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 1")
    return int(text)


def main() -> None:
    """Train and check that all ranks end with the same parameters."""
    parser = argparse.ArgumentParser(description="Learn handwritten digits on one process or on many.")
    add_options(parser)
    options = Options(**vars(parser.parse_args()))
    result = train(options, lambda epoch: print(epoch, flush=True))
    check(result.fingerprint)


if __name__ == "__main__":
    main()
