"""Ranks are killed, leave and join at random; the result is that of a training that nobody disturbed.

::

    python examples/elastic_same_result.py --events 20

The script trains twice in float64, on the digits of ``digits.py``. The first job has one to three ranks, and this
script sends SIGKILL or SIGTERM to a random one, or offers another slot, until it has done so ``--events`` times. The
second one has one rank and the same number of epochs. Each step has the same images in both, because ``GlobalBatches``
shares out the images of a step among the ranks that are there, and ``weigh`` counts each image once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from digits import RATE, Digits
from torch import Tensor, nn

import hvd_cluster
import hvd_cluster.torch as hvd

MOST = 3
BATCH = 48
SEED = 1
TOLERANCE = 1e-9
STEP_SECONDS = 0.05
POLL_SECONDS = 0.01
CHANGE_SECONDS = 120.0


@hvd.elastic.run
def train(
    state: hvd.elastic.TorchState, network: nn.Module, optimizer: torch.optim.Optimizer, data: Digits, folder: Path
) -> None:
    """Train until ``goes_on`` says no."""
    images, labels = data.training[0].double(), data.training[1]
    note_world(folder)
    while goes_on(state, folder):
        for indices in state.batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(network(images[indices]), labels[indices])
            state.batches.weigh(loss).backward()
            optimizer.step()
            state.batches.advance()
            state.commit()
            time.sleep(0 if state.epochs else STEP_SECONDS)


def goes_on(state: hvd.elastic.TorchState, folder: Path) -> bool:
    """Until ``state.epochs``, or, where that is 0, until ``folder`` has a file ``end``; no epoch is left half done.

    Rank 0 looks for the file, so that all ranks end together.
    """
    if state.batches.step > 0:
        return True
    if state.epochs:
        return bool(state.batches.epoch < state.epochs)
    return not hvd.broadcast_object((folder / "end").exists(), name="end")


def note_world(folder: Path) -> None:
    """Rank 0 writes the processes of the ranks into ``folder/world``."""
    processes = hvd.allgather_object(os.getpid(), name="processes")
    if hvd.rank() == 0:
        (folder / "next").write_text(json.dumps(processes))
        (folder / "next").rename(folder / "world")


def learn(folder: Path, epochs: int) -> tuple[int, list[Tensor]]:
    """Runs on every rank; returns the number of epochs and the parameters."""
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    data, network = Digits(SEED), nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=RATE, momentum=0.9), named_parameters=network.named_parameters()
    )
    batches = hvd.elastic.GlobalBatches(data.training[1], BATCH, seed=SEED)
    state = hvd.elastic.TorchState(network, optimizer, batches=batches, epochs=epochs)
    train(state, network, optimizer, data, folder)
    return state.batches.epoch, [parameter.detach() for parameter in network.parameters()]


class Trouble:
    """Random events for the job in ``folder``."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._random = random.Random(seed)
        self._offers = 0
        self.offer()

    def offer(self) -> None:
        """Slots for as many ranks as there may be; a number that is new lets ranks come for those that left."""
        (self._folder / "offer").write_text(f"localhost:{MOST + self._offers}\n")
        (self._folder / "offer").rename(self._folder / "hosts")
        self._offers += 1

    def world(self) -> list[int]:
        """The processes of the ranks, none before the first world."""
        file = self._folder / "world"
        return list(json.loads(file.read_text())) if file.exists() else []

    def strike(self) -> str:
        """Let something happen, and wait until the ranks have changed; the line that says what it was."""
        before = self.await_world(bool)
        if len(before) < 2 or (len(before) < MOST and self._random.random() < 0.5):
            self.offer()
            after = self.await_world(lambda world: len(world) > len(before))
            return f"joined: {len(before)} -> {len(after)} ranks"
        victim = self._random.choice(before)
        number = self._random.choice([signal.SIGKILL, signal.SIGTERM])
        os.kill(victim, number)
        after = self.await_world(lambda world: victim not in world)
        return f"{number.name} to rank {before.index(victim)}: {len(before)} -> {len(after)} ranks"

    def await_world(self, is_there: Callable[[list[int]], bool]) -> list[int]:
        """The world, as soon as it ``is_there``. Raises TimeoutError."""
        deadline = time.monotonic() + CHANGE_SECONDS
        while not is_there(world := self.world()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the ranks did not change within {CHANGE_SECONDS:g} s; they are still {world}")
            time.sleep(POLL_SECONDS)
        return world


def disturbed(folder: Path, events: int, seed: int) -> tuple[int, list[Tensor]]:
    """Epochs and parameters of the elastic job."""
    trouble = Trouble(folder, seed)
    limits = {"num_proc": MOST, "min_num_proc": 1, "max_num_proc": MOST, "cooldown_range": (1, 1)}
    with ThreadPoolExecutor(1) as pool:
        striking = pool.submit(strike_all, trouble, events, folder)
        results = hvd_cluster.run(learn, (folder, 0), host_discovery_script=f"cat '{folder}/hosts'", **limits)
        striking.result()
    return results[0]


def strike_all(trouble: Trouble, events: int, folder: Path) -> None:
    """All events, and then the end of the training, also after an error."""
    try:
        for number in range(1, events + 1):
            print(f"{number:3}  {trouble.strike()}", flush=True)
    finally:
        (folder / "end").touch()


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest relative difference of a parameter tensor, by its norm."""
    return max(((one - other).norm() / other.norm()).item() for one, other in zip(ours, theirs, strict=True))


def main() -> None:
    """Train twice and compare."""
    parser = argparse.ArgumentParser(description="The result of a training does not depend on who comes and goes.")
    parser.add_argument("--events", type=int, default=20, help="how many ranks to kill, end or add (default: 20)")
    parser.add_argument("--seed", type=int, default=1, help="the seed of the events (default: 1)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        epochs, parameters = disturbed(Path(folder), options.events, options.seed)
        ((_, expected),) = hvd_cluster.run(learn, (Path(folder), epochs), num_proc=1)
    found = difference(parameters, expected)
    print(f"{epochs} epochs, {options.events} events: relative difference {found:.1e}")
    if found > TOLERANCE:
        sys.exit(f"the parameters differ by {found:.1e}, but must not differ by more than {TOLERANCE:g}")


if __name__ == "__main__":
    main()
