"""Ranks with different numbers of batches: ``hvdrun -np 2 python examples/digits_uneven.py``.

The network and the data are those of ``digits.py``, but each rank has more images than the one before it. A rank that
has used up its own calls ``hvd.join()``; until all have, it takes part in what the others do, without data. All train
to the end, and agree.
"""

from __future__ import annotations

import argparse

import torch
from digits import RATE, Digits, Options, add_options, check, evaluate, fingerprint, model, step
from torch import Tensor, nn

import hvd_cluster.torch as hvd


def train(options: Options) -> nn.Module:
    """Train on every rank; rank 0 prints the result of each epoch."""
    torch.manual_seed(options.seed)
    data, network = Digits(options.seed), model()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(network.parameters(), lr=RATE * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=network.named_parameters())
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)

    for epoch in range(1, options.epochs + 1):
        batches = own_batches(data, options, epoch)
        for batch in batches:
            step(network, optimizer, *batch)
        last = hvd.join()  # returns on all ranks at once, and names the rank that had most to do
        hvd.broadcast_parameters(network.state_dict(), root_rank=last)  # the others have missed its last steps
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
        counts = hvd.allgather_object(len(batches))
        accuracy = evaluate(network, data)
        if hvd.rank() == 0:
            print(f"epoch {epoch:2}   batches by rank {counts}   held-out accuracy {accuracy:.4f}", flush=True)
    return network


def own_batches(data: Digits, options: Options, epoch: int) -> list[tuple[Tensor, Tensor]]:
    """This rank's images: twice as many for rank 1 as for rank 0, three times as many for rank 2..."""
    images, labels = data.training
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(options.seed * 1000 + epoch))
    parts = hvd.size() * (hvd.size() + 1) // 2
    first = hvd.rank() * (hvd.rank() + 1) // 2
    share = order[len(order) * first // parts : len(order) * (first + hvd.rank() + 1) // parts]
    return [(images[part], labels[part]) for part in share.split(options.batch_size)]


def main() -> None:
    """Train and check that all ranks end with the same parameters."""
    parser = argparse.ArgumentParser(description="Learn handwritten digits on ranks with different amounts of data.")
    add_options(parser)
    options = Options(**vars(parser.parse_args()))
    hvd.init()
    torch.set_num_threads(1)
    network = train(options)
    check(fingerprint(network))


if __name__ == "__main__":
    main()
