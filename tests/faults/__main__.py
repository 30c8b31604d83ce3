"""The command line of ``scripts/faults``."""

import argparse
import statistics
import sys
import time

from tests.faults.arena import LocalArena
from tests.faults.campaign import Campaign
from tests.faults.chronicle import ViolationError
from tests.faults.clusters import RayArena, SparkArena
from tests.faults.hosts import HostsArena

ARENAS = {"local": LocalArena, "hosts": HostsArena, "ray": RayArena, "spark": SparkArena}
SAMPLES = """
sampler (default): an ElasticSampler, of which each sample must be seen once in an epoch; batches: GlobalBatches, which
must give the parameters of a training without events
"""


def main():
    parser = argparse.ArgumentParser(prog="scripts/faults", description="Random faults against elastic jobs.")
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same events (default: 0)")
    parser.add_argument("--events", type=int, default=100, help="how many events (default: 100)")
    parser.add_argument("--ranks", type=int, default=3, choices=[2, 3, 4], help="the most ranks (default: 3)")
    parser.add_argument("--model", choices=["numpy", "torch", "sharded"], default="numpy", help="default: numpy")
    parser.add_argument("--samples", choices=["sampler", "batches"], default="sampler", help=SAMPLES)
    parser.add_argument("--arena", choices=ARENAS, default="local", help="where the jobs run (default: local)")
    arguments = parser.parse_args()
    begin = time.monotonic()
    options = {**vars(arguments), "arena": ARENAS[arguments.arena]}
    campaign = Campaign(**options, tell=lambda line: print(line, flush=True))  # noqa: T201
    try:
        campaign.run()
        campaign.kill_spared_driver()
    except ViolationError as error:
        print(f"FAILED: seed {arguments.seed}, {error}")  # noqa: T201
        return 1
    print(_summary(campaign, arguments, time.monotonic() - begin))  # noqa: T201
    return 0


def _summary(campaign, arguments, seconds):
    pauses = [outcome.pause for outcome in campaign.outcomes] or [0.0]
    lost = max(campaign.lost, sum(outcome.lost for outcome in campaign.outcomes))
    return (
        f"{arguments.events} events with seed {arguments.seed} in {seconds:.0f} s: all is well; pause: median "
        f"{statistics.median(pauses):.2f} s, longest {max(pauses):.2f} s; {lost} steps lost"
    )


if __name__ == "__main__":
    sys.exit(main())
