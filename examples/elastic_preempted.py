"""Train on nodes that a cloud takes away, and see that no step is lost: ``python examples/elastic_preempted.py``.

The script plays the cloud, too. It starts an elastic job on three nodes, which are processes of this machine here. Then
one node is preempted with a notice: the discovery script does not print it any more. A spare node comes. Another one
dies without a notice. Its successor comes last. Rank 0 writes down each step that is done, and who did it. The table
says for each event how long the others waited for the next step, and whether a step is missing or was counted twice.

On nodes of yours, give ``hvd_cluster.run`` or ``hvdrun`` a discovery script of your cloud, and ``ssh {host}`` as the
remote shell. ``train`` stays as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import hvd_cluster
import hvd_cluster.torch as hvd

BATCH = 48
NODES = ["spot-1", "spot-2", "spot-3"]
EVENTS = (
    ("spot-2 gets a notice", ["spot-1", "spot-3"]),
    ("spot-4 comes", ["spot-1", "spot-3", "spot-4"]),
    ("spot-3 dies", ["spot-1", "spot-4"]),
    ("spot-5 comes", ["spot-1", "spot-4", "spot-5"]),
)
"""What the cloud does, and the nodes that are there afterwards."""


@hvd.elastic.run
def train(state: hvd.elastic.TorchState, network: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Train until the cloud has no more events; rank 0 writes a line for each step."""
    images, labels = digits()
    nodes = hvd.allgather_object((os.environ["HOROVOD_HOSTNAME"], os.getpid()))
    while state.batches.step > 0 or goes_on(folder):
        for indices in state.batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(network(images[indices]), labels[indices])
            state.batches.weigh(loss).backward()
            optimizer.step()
            state.done += 1
            if hvd.rank() == 0:
                note(folder, {"step": state.done, "time": time.time(), "nodes": dict(nodes)})
            state.batches.advance()
            state.commit()  # ranks come and leave here
            time.sleep(0.05)  # so that there is time to see something


def goes_on(folder: Path) -> bool:
    """Whether to train for another epoch. Rank 0 looks for the file ``end``, so that all ranks end together."""
    return not hvd.broadcast_object((folder / "end").exists(), name="end")


def digits() -> tuple[Tensor, Tensor]:
    """The images as rows of pixels, and their labels."""
    bunch = load_digits()
    return torch.tensor(bunch.data, dtype=torch.float32) / 16, torch.tensor(bunch.target)


def note(folder: Path, line: dict[str, Any]) -> None:
    """Append a line to the record of the job."""
    with (folder / "steps").open("a") as file:
        file.write(json.dumps(line) + "\n")


def learn(folder: Path) -> float:
    """Runs on every rank; returns the accuracy."""
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.3), network.named_parameters())
    images, labels = digits()
    batches = hvd.elastic.GlobalBatches(labels, BATCH, seed=1)
    train(hvd.elastic.TorchState(network, optimizer, batches=batches, done=0), network, optimizer, folder)
    return (network(images).argmax(dim=1) == labels).float().mean().item()


def read(folder: Path) -> list[dict[str, Any]]:
    """The lines that are there."""
    file = folder / "steps"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def offer(folder: Path, nodes: list[str]) -> None:
    """What the discovery script prints from now on."""
    (folder / "next").write_text("".join(f"{node}:1\n" for node in nodes))
    (folder / "next").rename(folder / "nodes")


def play(folder: Path, pause: int) -> None:
    """Be the cloud: each event comes when the ranks have made some steps."""
    nodes = NODES
    try:
        for what, there in EVENTS:
            last = wait(folder, nodes, pause)
            offer(folder, there)
            if what.endswith("dies"):
                [victim] = set(nodes) - set(there)
                os.kill(last["nodes"][victim], signal.SIGKILL)
            nodes = there
        wait(folder, nodes, pause)
    finally:
        (folder / "end").touch()


def wait(folder: Path, nodes: list[str], pause: int) -> dict[str, Any]:
    """The last line of the record, as soon as exactly these nodes have made that many steps. Raises TimeoutError."""
    for _ in range(3000):
        lines = read(folder)[-pause:]
        if len(lines) == pause and all(set(line["nodes"]) == set(nodes) for line in lines):
            return lines[-1]
        time.sleep(0.04)
    raise TimeoutError(f"after two minutes the ranks are not those of {nodes}")


def changes(lines: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs of steps, one after the other, between which the nodes have changed."""
    return [(old, new) for old, new in pairwise(lines) if set(old["nodes"]) != set(new["nodes"])]


def tell(lines: list[dict[str, Any]]) -> None:
    """A table of the events."""
    print("event                  after step   nodes    next step after   steps lost   counted twice")
    for (what, _), (old, new) in zip(EVENTS, changes(lines), strict=True):
        gap, nodes = new["step"] - old["step"] - 1, f"{len(old['nodes'])} -> {len(new['nodes'])}"
        seconds = new["time"] - old["time"]
        print(f"{what:22} {old['step']:10}   {nodes}   {seconds:14.2f} s   {max(gap, 0):10}   {max(-gap, 0):13}")


def draw(lines: list[dict[str, Any]], path: str) -> None:
    """A row for each node with a mark for each of its steps, over time."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
    for node in sorted({node for line in lines for node in line["nodes"]}, reverse=True):
        times = [line["time"] - lines[0]["time"] for line in lines if node in line["nodes"]]
        axes.plot(times, [node] * len(times), "|", ms=16, mew=0.5)
    for (what, _), (old, _) in zip(EVENTS, changes(lines), strict=True):
        node, _, verb = what.partition(" ")
        side = {"ha": "right", "xytext": (-6, 0)} if verb == "comes" else {"ha": "left", "xytext": (6, 0)}
        axes.annotate(verb, (old["time"] - lines[0]["time"], node), textcoords="offset points", va="center", **side)
    axes.set(xlabel="seconds; each mark is a step that counts", ylim=(-0.6, 4.6))
    figure.savefig(path)


def main() -> None:
    """Train while nodes come and go, and show what became of the steps."""
    parser = argparse.ArgumentParser(description="Train on nodes that a cloud takes away.")
    add = parser.add_argument
    add("--pause", type=int, default=20, help="steps between two events (%(default)s)")
    add("--picture", metavar="FILE", help="draw the steps into this file, such as preempted.png")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(1) as pool:
        folder = Path(name)
        offer(folder, NODES)
        cloud = pool.submit(play, folder, arguments.pause)
        accuracies = hvd_cluster.run(
            learn,
            (folder,),
            num_proc=3,
            min_num_proc=1,
            max_num_proc=3,
            host_discovery_script=f"cat '{folder}/nodes'",
            remote_shell="env NODE={host}",  # on other machines: ssh {host}
        )
        cloud.result()
        lines = read(folder)
    tell(lines)
    print(f"{lines[-1]['step']} steps, accuracy {accuracies[0]:.4f}")
    if arguments.picture:
        draw(lines, arguments.picture)


if __name__ == "__main__":
    main()
