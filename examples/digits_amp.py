"""Large batches in bfloat16, made of several small ones: ``hvdrun -np 2 python examples/digits_amp.py``.

The network and the data are those of ``digits.py``. The gradients of a few passes add up before they travel, and are
clipped when they have arrived. bfloat16 does not need the GradScaler; it is here to show where one goes.
"""

from __future__ import annotations

import argparse

import torch
from digits import RATE, Digits, Options, add_options, batches, check, evaluate, fingerprint, model, positive
from torch import Tensor, nn

import hvd_cluster.torch as hvd

LARGEST_NORM = 5.0


def train(options: Options, passes: int) -> nn.Module:
    """Train on every rank; rank 0 prints the result of each epoch."""
    torch.manual_seed(options.seed)
    data, network = Digits(options.seed), model()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(network.parameters(), lr=RATE * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=network.named_parameters(), backward_passes_per_step=passes
    )
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    scaler = torch.amp.GradScaler("cpu")

    for epoch in range(1, options.epochs + 1):
        own = batches(data, options, epoch)
        losses = [
            step(network, optimizer, scaler, own[first : first + passes])
            for first in range(0, len(own) - passes + 1, passes)
        ]
        loss = hvd.allreduce(torch.stack(losses).mean(), name="loss").item()
        accuracy = evaluate(network, data)
        if hvd.rank() == 0:
            print(f"epoch {epoch:2}   loss {loss:.4f}   held-out accuracy {accuracy:.4f}", flush=True)
    return network


def step(network: nn.Module, optimizer, scaler: torch.amp.GradScaler, group: list[tuple[Tensor, Tensor]]) -> Tensor:
    """One step of the optimizer on a group of batches; returns their mean loss."""
    optimizer.zero_grad()
    losses = []
    for images, labels in group:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(network(images), labels) / len(group)
        scaler.scale(loss).backward()  # the last one lets the gradients travel
        losses.append(loss.detach())
    optimizer.synchronize()  # wait until they have arrived
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(network.parameters(), LARGEST_NORM)
    with optimizer.skip_synchronize():  # done already
        scaler.step(optimizer)
    scaler.update()
    return torch.stack(losses).sum()


def main() -> None:
    """Train and check that all ranks end with the same parameters."""
    parser = argparse.ArgumentParser(description="Learn handwritten digits with mixed precision and large batches.")
    parser.add_argument("--passes", type=positive, default=2, help="batches that make one step (%(default)s)")
    add_options(parser)
    arguments = vars(parser.parse_args())
    passes, options = arguments.pop("passes"), Options(**arguments)
    hvd.init()
    torch.set_num_threads(1)
    network = train(options, passes)
    check(fingerprint(network))


if __name__ == "__main__":
    main()
