"""A training that may be stopped at any time: it saves when it gets a notice, and the next start goes on from there.

SIGUSR1 and SIGTERM are the notice. ``--folder`` names the checkpoints; all starts of a job have the same one.
"""

from __future__ import annotations

import argparse
import signal
import time
from types import FrameType

import torch

import hvd_cluster.torch as hvd


class Notice:
    """Notes the signals that say that the job will end soon."""

    def __init__(self, *signals: signal.Signals) -> None:
        self._came = False
        for each in signals:
            signal.signal(each, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True

    def on_any_rank(self) -> bool:
        """All ranks ask this after the same step, so all of them stop after the same step."""
        return bool(hvd.allreduce(torch.tensor(float(self._came)), op=hvd.Sum, name="notice"))


def train(options: argparse.Namespace, notice: Notice) -> None:
    """Make the steps that are left, or those before a notice."""
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    found = hvd.checkpoint.load(options.folder, model=model, optimizer=optimizer, missing_ok=True)
    if not found:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    first = found.step + 1 if found else 0
    hvd.print_once(f"begins with step {first} of {options.steps}", flush=True)
    for step in range(first, options.steps):
        inputs = torch.randn(32, 10)
        optimizer.zero_grad()
        (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean().backward()
        optimizer.step()
        time.sleep(options.pause)
        stop = notice.on_any_rank()
        if stop or (step + 1) % options.every == 0 or step + 1 == options.steps:
            hvd.checkpoint.save(options.folder, step=step, model=model, optimizer=optimizer)
        if stop:
            hvd.print_once(f"a notice came: step {step} is saved", flush=True)
            return
    hvd.print_once("all steps are done", flush=True)


def main() -> None:
    """Train on all ranks."""
    parser = argparse.ArgumentParser(description="A training that may be stopped at any time.")
    parser.add_argument("--folder", required=True, help="the checkpoints, on a disk that outlives the job")
    parser.add_argument("--steps", type=int, default=1000, help="steps in all (%(default)s)")
    parser.add_argument("--every", type=int, default=100, help="steps between two checkpoints (%(default)s)")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of work in each step (%(default)s)")
    options = parser.parse_args()
    notice = Notice(signal.SIGUSR1, signal.SIGTERM)  # before init(): a notice may come early
    hvd.init()
    train(options, notice)


if __name__ == "__main__":
    main()
