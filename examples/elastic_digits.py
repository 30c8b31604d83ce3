"""Learn handwritten digits on ranks that come and go.

::

    hvdrun -np 3 --min-np 1 --blacklist-cooldown-range 1 1 python examples/elastic_digits.py
    kill -9 PID                # of a rank that the script has named: the others go on, and another one comes later
    kill PID                   # that rank hands over after its step, and leaves

The network and the data are those of ``digits.py``. Each step has the same images whatever the number of ranks is, so
the result does not depend on who came and went. Five lines make the training elastic; each is marked with its number.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
from digits import RATE, Digits, add_options, check, evaluate, fingerprint, model
from torch import nn

import hvd_cluster.torch as hvd


@hvd.elastic.run  # 1: called again when the ranks have changed
def train(
    state: hvd.elastic.TorchState, network: nn.Module, optimizer: torch.optim.Optimizer, data: Digits, pause: float
) -> None:
    """Train from where ``state`` is; rank 0 prints the result of each epoch."""
    images, labels = data.training
    print(f"rank {hvd.rank()} of {hvd.size()} is process {os.getpid()}", flush=True)
    while state.batches.epoch < state.epochs:
        for indices in state.batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(network(images[indices]), labels[indices])
            state.batches.weigh(loss).backward()  # 2: ranks may have different numbers of images
            optimizer.step()
            hvd.count_samples(len(indices))  # for hvdrun --dashboard
            epoch = state.batches.epoch
            state.batches.advance()
            state.commit()  # 3: this step counts; ranks come and leave here
            time.sleep(pause)
        accuracy = evaluate(network, data)
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1:2}   ranks {hvd.size()}   held-out accuracy {accuracy:.4f}", flush=True)


def learn(epochs: int, batch_size: int, seed: int, pause: float) -> str:
    """Runs on every rank; returns the fingerprint of its network."""
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    data, network = Digits(seed), model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=RATE, momentum=0.9), named_parameters=network.named_parameters()
    )
    batches = hvd.elastic.GlobalBatches(data.training[1], batch_size, seed=seed)  # 4: by all ranks together
    state = hvd.elastic.TorchState(network, optimizer, batches=batches, epochs=epochs)  # 5: it survives a change
    train(state, network, optimizer, data, pause)
    return fingerprint(network)


def add_elastic_options(parser: argparse.ArgumentParser) -> None:
    """The options of the training."""
    add_options(parser)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step, to have time to kill ranks")


def main() -> None:
    """Train and check that all ranks end with the same parameters."""
    parser = argparse.ArgumentParser(description="Learn handwritten digits on ranks that come and go.")
    add_elastic_options(parser)
    options = parser.parse_args()
    check(learn(options.epochs, options.batch_size, options.seed, options.pause))


if __name__ == "__main__":
    main()
