"""A model, no measurement: the efficiency of training on 8 to 10,000 GPUs, beside what Horovod has published.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --plot docs/scaling.svg

Horovod's paper (Sergeev and Del Balso, 2018, arXiv:1802.05799) has the efficiency of 512 Pascal GPUs, four on a host,
with a network of 25 Gbit/s: 0.90 with Inception V3 and ResNet-101, and 0.68 with VGG-16. The model has the same hosts.
Its assumptions:

* A step without any exchange takes as long as TensorFlow's benchmarks say for one P100 with 64 images. Backward takes
  two thirds of it, and gradients travel meanwhile, but for the last 64 MB.
* Each of h hosts sends and receives 2 (h - 1) / h times the bytes of the gradients, at 0.9 of the speed of its link.
  All links have that speed at the same time. Inside of a host nothing costs time.
* Each step waits for the whole work of the coordinator, which overlaps with nothing. Its CPU time is that of
  ``benchmarks.simulation`` on the machine on which this runs. In reality up to 64 hosts agree on a steady step without
  it, and tensors are negotiated while backward computes others.

The efficiency is the time without any exchange divided by the time of a step.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import add_json_argument, tabulate
from benchmarks.simulation import simulate

GPUS_OF_A_HOST = 4
BACKWARD = 2 / 3
LINE_RATE = 0.9
LAST_BYTES = 64 << 20
GBITS = (10, 25, 100)
SIZES = (8, 64, 512, 4096, 10_000)
PUBLISHED_AT = 512


@dataclass(frozen=True)
class Network:
    """A network to train: the bytes of its gradients, the seconds of a step of one GPU, and Horovod's efficiency."""

    name: str
    parameters: float
    images_per_second: float
    published: float

    @property
    def gradient_bytes(self) -> float:
        """Of float32."""
        return 4 * self.parameters

    @property
    def step_seconds(self) -> float:
        """Of 64 images."""
        return 64 / self.images_per_second


NETWORKS = (
    Network("Inception V3", 23.8e6, 142, 0.90),
    Network("ResNet-101", 44.5e6, 130, 0.90),
    Network("VGG-16", 138.4e6, 154, 0.68),
)


def exchange_seconds(network: Network, gpus: int, gbits: float) -> float:
    """How long the gradients travel, if nothing else happens."""
    hosts = -(-gpus // GPUS_OF_A_HOST)
    return 2 * (hosts - 1) / hosts * network.gradient_bytes * 8 / (gbits * 1e9 * LINE_RATE)


def efficiency(network: Network, gpus: int, gbits: float, control_seconds: float) -> float:
    """The part of a step that is training; ``control_seconds`` is the coordinator's work."""
    exchange = exchange_seconds(network, gpus, gbits)
    last = exchange * min(1.0, LAST_BYTES / network.gradient_bytes)
    exposed = max(last, exchange - BACKWARD * network.step_seconds)
    return network.step_seconds / (network.step_seconds + exposed + control_seconds)


def rows_of(sizes: Sequence[int], control: Sequence[float]) -> list[dict[str, Any]]:
    """A row for each network and link; ``control`` has the coordinator's seconds for each size."""
    return [
        {
            "network": network.name,
            "Gbit/s": gbits,
            **{
                f"{size:,}": efficiency(network, size, gbits, seconds)
                for size, seconds in zip(sizes, control, strict=True)
            },
            f"Horovod, {PUBLISHED_AT}": network.published if gbits == 25 else "",
        }
        for network in NETWORKS
        for gbits in GBITS
    ]


def _plot(sizes: Sequence[int], control: Sequence[float], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, columns = pyplot.subplots(1, len(NETWORKS), figsize=(10, 3.6), sharey=True)
    for axes, network in zip(columns, NETWORKS, strict=True):
        for gbits in GBITS:
            found = [efficiency(network, size, gbits, seconds) for size, seconds in zip(sizes, control, strict=True)]
            axes.semilogx(sizes, found, "o-", label=f"model, {gbits} Gbit/s")
        axes.plot([PUBLISHED_AT], [network.published], "k*", markersize=12, label="Horovod, published, 25 Gbit/s")
        axes.set(title=network.name, xlabel="GPUs", ylim=(0, 1))
    columns[0].set_ylabel("efficiency (a model)")
    columns[-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=list(SIZES), help="default: 8 to 10000")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the efficiency into an SVG file, too")
    add_json_argument(parser)
    arguments = parser.parse_args()
    control = [simulate(size, "hosts", 5)["CPU, ms"] / 1e3 for size in arguments.gpus]
    tabulate("efficiency: a model, see --help", rows_of(arguments.gpus, control), arguments)
    if arguments.plot:
        _plot(arguments.gpus, control, arguments.plot)


if __name__ == "__main__":
    main()
