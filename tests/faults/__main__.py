"""The command line of ``scripts/faults``."""

import argparse
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

from tests.faults.arena import LocalArena
from tests.faults.campaign import Campaign
from tests.faults.chronicle import ViolationError
from tests.faults.clusters import RayArena, SparkArena
from tests.faults.hosts import HostsArena
from tests.faults.jobs.models import MODELS
from tests.faults.plans import Plan, shrink

ARENAS = {"local": LocalArena, "hosts": HostsArena, "ray": RayArena, "spark": SparkArena}
SAMPLES = """
sampler (default): an ElasticSampler, of which each sample must be seen once in an epoch; batches: GlobalBatches, which
must give the parameters of a training without events
"""
PLAN = """
the plan of a campaign that failed: its events are played again, and no others are drawn
"""


def main():
    arguments = _parser().parse_args()
    if arguments.play and arguments.shrink:
        return _shrink(Plan.decode(arguments.play.read_text()), arguments.play, arguments.shrink)
    if arguments.play:
        plan = Plan.decode(arguments.play.read_text())
        return _run(_campaign(plan), arguments.play)[0]
    drawn = Plan(arguments.arena, arguments.ranks, arguments.model, arguments.samples)
    status, played = _run(_campaign(drawn, arguments.seed, arguments.events), f"seed {arguments.seed}")
    if status:
        plan = Plan(arguments.arena, arguments.ranks, arguments.model, arguments.samples, tuple(played))
        _save(plan, arguments.plan)
    if status and arguments.shrink:
        _shrink(plan, arguments.plan, arguments.shrink)
    return status


def _parser():
    parser = argparse.ArgumentParser(prog="scripts/faults", description="Random faults against elastic jobs.")
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same events (default: 0)")
    parser.add_argument("--events", type=int, default=100, help="how many events (default: 100)")
    parser.add_argument("--ranks", type=int, default=3, choices=[2, 3, 4], help="the most ranks (default: 3)")
    parser.add_argument("--model", choices=MODELS, default="numpy", help="default: numpy")
    parser.add_argument("--samples", choices=["sampler", "batches"], default="sampler", help=SAMPLES)
    parser.add_argument("--arena", choices=ARENAS, default="local", help="where the jobs run (default: local)")
    parser.add_argument("--plan", type=Path, default=Path("faults.json"), help="where to write a plan that failed")
    parser.add_argument("--play", type=Path, metavar="PLAN", help=PLAN)
    parser.add_argument("--shrink", type=int, default=0, metavar="TRIES", help="find the shortest plan that fails")
    return parser


def _campaign(plan, seed=0, events=0):
    return Campaign(
        seed, events, plan.ranks, plan.model, plan.samples, ARENAS[plan.arena], tell=_tell, script=plan.events or None
    )


def _tell(line):
    print(line, flush=True)  # noqa: T201


def _run(campaign, source):
    """The exit status, and the events that were played."""
    begin = time.monotonic()
    try:
        campaign.run()
        campaign.kill_spared_driver()
    except ViolationError as error:
        _tell(f"FAILED: {source}, {error}")
        return 1, campaign.played
    _tell(_summary(campaign, source, time.monotonic() - begin))
    return 0, campaign.played


def _save(plan, path):
    path.write_text(plan.encode())
    _tell(f"the plan is in {path}: scripts/faults --play {path}")


def _shrink(plan, path, tries):
    """A plan fails if it does so in one of ``tries`` tries: the moments of a job are never quite the same."""

    def fails(smaller):
        _tell(f"a plan of {len(smaller.events)} events: {'; '.join(map(str, smaller.events))}")
        if any(_run(_campaign(smaller), "a smaller plan")[0] for _ in range(tries)):
            _save(smaller, path)
            return True
        return False

    found = shrink(plan, fails)
    _save(found, path)
    return 1


def _summary(campaign, source, seconds):
    pauses = [outcome.pause for outcome in campaign.outcomes] or [0.0]
    lost = sum(outcome.lost for outcome in campaign.outcomes)
    kinds = Counter(part.kind for event in campaign.played for part in event.parts)
    points = {part.point for event in campaign.played for part in event.parts if hasattr(part, "point")}
    return (
        f"{len(campaign.played)} events of {source} in {seconds:.0f} s: all is well; pause: median "
        f"{statistics.median(pauses):.2f} s, longest {max(pauses):.2f} s; {lost} steps lost; "
        f"{sum(outcome.missed for outcome in campaign.outcomes)} ambushes missed; {len(points)} points; "
        f"faults: {sum(kinds.values())} ({', '.join(f'{number} {kind}' for kind, number in kinds.most_common())})"
    )


if __name__ == "__main__":
    sys.exit(main())
