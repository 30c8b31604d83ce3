"""Control messages and their bytes in a training step: the first, a later one, and one without the response cache.

    python -m benchmarks.traffic --ranks 2 4

The step submits the 161 gradients of ResNet-50, last layer first, and waits for all. Messages are counted where a rank
hands them to its channel, with the 4 bytes that frame each; "in full" are those that hold more than integers.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any, TypeAlias

import hvd_cluster
from benchmarks.gradients import resnet50
from benchmarks.measure import add_json_argument, tabulate
from collectives.controller.messages import Leave, Left, Message, Ready, Run, Stop, decode
from collectives.net.frames import HEADER_BYTES
from collectives.net.sockets import SocketChannel

COORDINATOR = 0

Traffic: TypeAlias = Counter[tuple[int, str, str]]
"""(receiver, kind of message, "messages" or "bytes") -> count"""


def measure(steps: int) -> tuple[Traffic, Traffic]:
    """Runs on every rank; the messages of this rank in the first step and in all of ``steps`` later ones."""
    import torch

    import hvd_cluster.torch as hvd

    torch.set_num_threads(1)
    sent = count_messages()
    hvd.init()
    gradients = {name: torch.ones(elements) for name, elements in reversed(resnet50().items())}
    _step(gradients)
    first = sent.copy()
    for _ in range(steps):
        _step(gradients)
    later = sent - first
    hvd.shutdown()
    return first, later


def _step(gradients: dict[str, Any]) -> None:
    import hvd_cluster.torch as hvd

    handles = [hvd.allreduce_async_(gradient, name=f"gradient.{name}") for name, gradient in gradients.items()]
    for handle in handles:
        hvd.synchronize(handle)


def count_messages() -> Traffic:
    """The messages that this process sends through its channels from now on."""
    traffic: Traffic = Counter()
    send = SocketChannel.send

    def counting_send(channel: SocketChannel, rank: int, data: bytes) -> None:
        message = decode(data)
        if not isinstance(message, Leave | Stop | Left):  # of another rank that has shut down already
            traffic[rank, kind_of(message), "messages"] += 1
            traffic[rank, kind_of(message), "bytes"] += HEADER_BYTES + len(data)
        send(channel, rank, data)

    SocketChannel.send = counting_send  # type: ignore[method-assign]
    return traffic


def kind_of(message: Message) -> str:
    """The class of a message; with " in full" where it holds more than integers."""
    is_full = (isinstance(message, Ready) and (message.requests or message.urgent)) or (
        isinstance(message, Run) and message.responses
    )
    return type(message).__name__ + (" in full" if is_full else "")


def summarize(sent: list[Traffic], steps: int) -> dict[str, Any]:
    """Messages and bytes of a step: of a rank other than 0, on average, and of rank 0 (the coordinator)."""
    heard = [_total(sent[1:], what, COORDINATOR) / steps for what in ("messages", "bytes")]
    told = [_total(sent[:1], what) / steps for what in ("messages", "bytes")]
    kinds: Counter[str] = Counter()
    for traffic in sent:
        for (_, kind, what), count in traffic.items():
            kinds[kind] += count if what == "messages" else 0
    return {
        "a rank sends": heard[0] / (len(sent) - 1),
        "bytes": heard[1] / (len(sent) - 1),
        "0 receives": heard[0],
        "bytes in": heard[1],
        "0 sends": told[0],
        "bytes out": told[1],
        "messages": ", ".join(f"{count / steps:.3g} {kind}" for kind, count in sorted(kinds.items())),
    }


def _total(sent: list[Traffic], wanted: str, to: int | None = None) -> int:
    return sum(
        count
        for traffic in sent
        for (receiver, _, what), count in traffic.items()
        if what == wanted and to in (None, receiver)
    )


def launch(ranks: int, steps: int) -> list[dict[str, Any]]:
    """The rows of a number of ranks."""
    rows = []
    for capacity in (1024, 0):
        environment = {"HOROVOD_CACHE_CAPACITY": str(capacity)}
        results = hvd_cluster.run(measure, (steps,), num_proc=ranks, env=environment)
        first, later = ([result[part] for result in results] for part in (0, 1))
        cache = "cache" if capacity else "no cache"
        rows.append({"ranks": ranks, "step": f"first, {cache}", **summarize(first, 1)})
        rows.append({"ranks": ranks, "step": f"later, {cache}", **summarize(later, steps)})
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of processes (default: 2 4)")
    parser.add_argument("--steps", type=int, default=20, help="later steps, to take the mean of (default: 20)")
    add_json_argument(parser)
    arguments = parser.parse_args()
    rows = [row for ranks in arguments.ranks for row in launch(ranks, arguments.steps)]
    tabulate("control messages of a step", rows, arguments)


if __name__ == "__main__":
    from benchmarks.traffic import main as importable_main

    importable_main()
