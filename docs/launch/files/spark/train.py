"""Trains in the executors of Spark; spark-submit runs it on Kubernetes and on YARN.

``--workers 4`` is the number of ranks. ``--fewest 1`` makes the job elastic: it goes on with so many when executors go.
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

import torch
from pyspark.sql import SparkSession

import hvd_cluster.torch as hvd
from hvd_cluster.spark import run, run_elastic


def train(epochs: int) -> tuple[int, int, float]:
    """Runs on each rank: its rank, the number of ranks, and the norm of the weights."""
    hvd.init()
    torch.manual_seed(0)  # the same samples on all ranks; your script loads its own
    inputs = torch.randn(2048, 10)
    model = torch.nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    batches = hvd.elastic.GlobalBatches(inputs, global_batch_size=64)
    state = hvd.elastic.TorchState(model, optimizer, batches=batches)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while batches.epoch < epochs:
            for indices in batches:
                optimizer.zero_grad()
                batches.weigh(model(inputs[indices]).square().mean()).backward()
                optimizer.step()
                batches.advance()
                state.commit()  # in an elastic job ranks come and leave here

    loop(state)
    return hvd.rank(), hvd.size(), model.weight.norm().item()


def main() -> None:
    """Train, and log what the ranks return."""
    parser = argparse.ArgumentParser(description="Trains in the executors of Spark.")
    parser.add_argument("--workers", type=int, default=4, help="ranks (%(default)s)")
    parser.add_argument("--fewest", type=int, help="ranks with which an elastic job goes on")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the samples (%(default)s)")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    for name in ("executors", "hvd_cluster._executors"):  # in a checkout, and in a wheel
        logging.getLogger(name).setLevel(logging.INFO)  # a line for each change of the ranks
    spark = SparkSession.builder.appName("train").getOrCreate()  # spark-submit names the master
    arguments = (options.epochs,)
    if options.fewest:
        ranks = {"num_proc": options.workers, "max_num_proc": options.workers, "min_num_proc": options.fewest}
        results = run_elastic(train, arguments, **ranks)
    else:
        results = run(train, args=arguments, num_proc=options.workers)
    for rank, size, norm in results:
        logging.warning("rank %d of %d: norm of the weights %.4f", rank, size, norm)
    spark.stop()


if __name__ == "__main__":
    main()
