"""Starts the ranks of one host of a SageMaker training job: ``python entry.py train.py [ARGUMENTS...]``.

Every host runs it. The variables of SageMaker say which hosts there are; each rank gets those of torchrun, by which
``hvd.init()`` finds the others. SIGTERM goes on to the ranks; the first rank that fails ends those of this host.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

CONFIG = Path("/opt/ml/input/config/resourceconfig.json")  # for images without the toolkit that sets the variables
PORT = "29500"
LOOK_SECONDS = 0.2
GRACE_SECONDS = 100  # SageMaker kills the container 120 s after SIGTERM


def cluster(environment: Mapping[str, str], config: Path = CONFIG) -> tuple[list[str], str, str]:
    """The hosts of the job in an order that all of them see, this host, and the interface between them."""
    if "SM_HOSTS" in environment:
        hosts, this = json.loads(environment["SM_HOSTS"]), environment["SM_CURRENT_HOST"]
        interface = environment.get("SM_NETWORK_INTERFACE_NAME", "")
    else:
        told = json.loads(config.read_text())
        hosts, this, interface = told["hosts"], told["current_host"], told.get("network_interface_name", "")
    return sorted(hosts), this, interface


def variables(environment: Mapping[str, str], config: Path = CONFIG) -> list[dict[str, str]]:
    """The environment of each rank of this host: one for each GPU, or RANKS_PER_HOST, or one."""
    hosts, this, interface = cluster(environment, config)
    count = int(environment.get("RANKS_PER_HOST") or environment.get("SM_NUM_GPUS") or 0) or 1
    place = hosts.index(this)
    common = {
        "MASTER_ADDR": hosts[0],
        "MASTER_PORT": PORT,
        "WORLD_SIZE": str(count * len(hosts)),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": str(place),
    }
    if interface:
        common["HOROVOD_GLOO_IFACE"] = interface
    ranks = [{"RANK": str(place * count + local), "LOCAL_RANK": str(local)} for local in range(count)]
    return [{**environment, **common, **rank} for rank in ranks]


def run(command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
    """The exit status of the ranks: 0, or that of the first one that failed."""
    ranks = [subprocess.Popen(command, env=dict(each)) for each in environments]

    def pass_on(number: int, frame: FrameType | None) -> None:
        for rank in ranks:
            rank.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    while True:
        ended = [status for rank in ranks if (status := rank.poll()) is not None]
        failed = next((status for status in ended if status), 0)
        if failed:
            end(ranks)
        if failed or len(ended) == len(ranks):
            return 128 - failed if failed < 0 else failed
        time.sleep(LOOK_SECONDS)


def end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask the ranks that are left to end, and kill them where they do not."""
    for rank in ranks:
        rank.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


if __name__ == "__main__":
    sys.exit(run([sys.executable, "-u", *sys.argv[1:]], variables(os.environ)))
