"""The cost of a change of the ranks: a rank is killed, gets SIGTERM, or joins.

    python -m benchmarks.elastic
    python -m benchmarks.elastic --hosts --ray --peers --step 0.05

A model of 1 M parameters trains in steps of ``--step`` seconds and commits after each. The cases take turns: in each
round, each of them starts a job, in which its event happens. The hosts are two network namespaces of this machine, with
two ranks each: root only, and it needs iproute2. On Ray, a node joins a cluster of one node on this machine. The peers
are torchrun and Ray Train, which start all workers again and continue from a checkpoint, which the script saves every
ten steps.

* pause: kill and silent host: from the kill, or the cut of the link, until every survivor has finished a step again;
  node to function and node to step: from when Ray knows a node until the function begins on it, before it imports
  torch, and until every rank of the larger world has finished a step;
  the others: the longest time between two finished steps of a survivor, less that of an undisturbed step.
* lost: steps that the ranks had finished and did again.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import add_json_argument, tabulate
from tests.namespaces import HOSTS, Network, Unavailable

logger = logging.getLogger(__name__)

ROOT = Path(__file__).parents[1]
WIDTH = 1000
CHECKPOINT_STEPS = 10
ROUNDS = 5
EVENTS = 1
STEP_SECONDS = 0.01
# Undisturbed steps before an event.
CALM_STEPS = 20
START_SECONDS = 120.0
POLL_SECONDS = 0.02
NODE_POLL_SECONDS = 0.005


@dataclass(frozen=True)
class Step:
    """A process finished ``step`` in a world of ``size`` ranks at ``time``, of the clock that all processes share."""

    time: float
    step: int
    size: int


@dataclass(frozen=True)
class Case:
    """An event that changes a job of ``before`` ranks to ``after`` ranks; ``limit`` in seconds, None: no goal."""

    name: str
    before: int
    after: int
    limit: float | None

    def __str__(self) -> str:
        return f"{self.name}, {self.before} -> {self.after} ranks"


CASES = (
    Case("kill", 3, 2, 0.1),
    Case("kill", 2, 1, 0.06),
    Case("drain", 3, 2, 0.3),
    Case("grow", 2, 3, 0.3),
)
ON_HOSTS = (Case("kill on two hosts", 4, 3, 0.3), Case("silent host", 4, 2, 5.0))
NODE_TO_STEP = Case("Ray: node to step", 2, 3, 2.0)
NODE_TO_FUNCTION = Case("Ray: node to function", 2, 3, None)
ON_RAY = (Case("Ray: node comes", 2, 3, 0.3), NODE_TO_FUNCTION, NODE_TO_STEP)
PEERS = (Case("torchrun: kill", 3, 3, None), Case("Ray Train: kill", 3, 3, None))

Found = tuple[Case, float, int]
"""A case, a pause in seconds, and the steps lost."""

HOROVOD = {
    "event": "Horovod: kill",
    "ranks": "3 -> 2",
    "pause": 0.33,
    "longest": None,
    "limit": None,
    "lost steps": 0,
    "kept": "",
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds of all cases (default: {ROUNDS})")
    parser.add_argument("--events", type=int, default=EVENTS, help=f"events of a case in a round (default: {EVENTS})")
    parser.add_argument("--step", type=float, default=STEP_SECONDS, help=f"seconds a step (default: {STEP_SECONDS})")
    parser.add_argument("--hosts", action="store_true", help="also two hosts, which are network namespaces")
    parser.add_argument("--ray", action="store_true", help="also a Ray cluster that a node joins")
    parser.add_argument("--peers", action="store_true", help="also torchrun and Ray Train")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    add_json_argument(parser)
    arguments = parser.parse_args()
    if arguments.side:
        SIDES[arguments.side](Path(arguments.folder), arguments.step)
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the job of a case ends, too
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    try:
        records = [_record(*each) for each in _measure(_cases(arguments), arguments).items()]
    except Unavailable as reason:
        parser.exit(1, f"no hosts in network namespaces: {reason}\n")
    records.append(HOROVOD)
    notes = [
        f"s, medians of {arguments.rounds * arguments.events} events; the cases take turns",
        f"steps of {arguments.step:g} s, a commit after each",
        "Horovod: version 0.28, measured once on another machine of 2 cores, steps of 0.05 s",
    ]
    tabulate("The cost of a change of the ranks", records, arguments, notes)


def _cases(arguments: argparse.Namespace) -> tuple[Case, ...]:
    more = {ON_HOSTS: arguments.hosts, ON_RAY: arguments.ray, PEERS: arguments.peers}
    return CASES + tuple(case for cases, wanted in more.items() if wanted for case in cases)


def _measure(cases: Sequence[Case], arguments: argparse.Namespace) -> dict[Case, list[tuple[float, int]]]:
    """The pauses and the lost steps of each case."""
    found: dict[Case, list[tuple[float, int]]] = {case: [] for case in cases}
    turns = [range(turn * arguments.events, (turn + 1) * arguments.events) for turn in range(arguments.rounds)]
    for numbers, case in [(numbers, case) for numbers in turns for case in cases if case.name in EVENTS_OF]:
        for measured, pause, lost in EVENTS_OF[case.name](case, arguments, numbers):
            logger.info("%s: %.3f s, %d steps lost", measured, pause, lost)
            found[measured].append((pause, lost))
    return found


def _record(case: Case, found: Sequence[tuple[float, int]]) -> dict[str, object]:
    pause, lost = (statistics.median(values) for values in zip(*found, strict=True))
    return {
        "event": case.name,
        "ranks": f"{case.before} -> {case.after}",
        "pause": round(pause, 3),
        "longest": round(max(pause for pause, _ in found), 3),
        "limit": case.limit,
        "lost steps": max(lost for _, lost in found) if case not in PEERS else lost,
        "kept": "" if case.limit is None else "yes" if pause <= case.limit else "NO",
    }


# Events, by their numbers of one round.


def _kills(case: Case, arguments: argparse.Namespace, numbers: range) -> Iterator[Found]:
    """A rank is killed; a cool-down later another one comes for it."""
    with running_job("ours", case.before, arguments, "--blacklist-cooldown-range", "1", "1") as job:
        for number in numbers:
            job.await_calm(case.before)
            at = job.signal(number % case.before, signal.SIGKILL)
            yield case, *job.after_loss(at, case.after)


def _drains(case: Case, arguments: argparse.Namespace, numbers: range) -> Iterator[Found]:
    """A rank is asked to end; each event is a job of its own, because its slot stays empty."""
    for number in numbers:
        with running_job("ours", case.before, arguments) as job:
            job.await_calm(case.before)
            at = job.signal(number % case.before, signal.SIGTERM)
            yield case, *job.after_change(at, case.after)


def _growths(case: Case, arguments: argparse.Namespace, numbers: range) -> Iterator[Found]:
    """A rank comes for one that was killed before."""
    with running_job("ours", case.after, arguments, "--blacklist-cooldown-range", "1", "1") as job:
        for number in numbers:
            job.await_calm(case.after)
            at = job.signal(number % case.after, signal.SIGKILL)
            job.after_loss(at, case.before)
            job.await_calm(case.after)
            yield case, *job.after_change(at, case.after)


def _kills_on_hosts(case: Case, arguments: argparse.Namespace, numbers: range) -> Iterator[Found]:
    """A rank of either host is killed; a cool-down later another one comes for it."""
    with Network() as network, running_job("ours", case.before, arguments, *_on(network), network=network) as job:
        for number in numbers:
            job.await_calm(case.before)
            at = job.signal(number % case.before, signal.SIGKILL)
            yield case, *job.after_loss(at, case.after)


def _silences(case: Case, arguments: argparse.Namespace, numbers: range) -> Iterator[Found]:
    """The link to the second host is cut; each event is a job of its own."""
    for _ in numbers:
        with Network() as network, running_job("ours", case.before, arguments, *_on(network), network=network) as job:
            job.await_calm(case.before)
            at = job.act(network.cut)
            yield case, *job.after_loss(at, case.after)
            network.heal()


def _arrivals(case: Case, arguments: argparse.Namespace, numbers: range) -> Iterator[Found]:
    """A node comes to a cluster whose nodes are full, and dies after the job has grown."""
    from tests.hvd_cluster.ray.ray_cluster import STORE_BYTES, running_cluster

    job_on_ray = running_job("ours on Ray", case.before, arguments)
    with running_cluster(nodes=1) as cluster, job_on_ray as job, ThreadPoolExecutor(1) as pool:
        for _ in numbers:
            job.await_calm(case.before)
            arrival = pool.submit(_await_second_node)  # Ray may know the node before add_node() returns
            node = cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES, wait=False)
            at = job.note_event(arrival.result(START_SECONDS))
            yield case, *job.after_change(at, case.after)
            yield NODE_TO_FUNCTION, job.until_begin(at), 0
            yield NODE_TO_STEP, job.until_change(at, case.after), 0
            job.await_calm(case.after)
            cluster.remove_node(node)


def _await_second_node() -> float:
    """Return when Ray knows a second node, with its resources; the time of that."""
    import ray

    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and sum(node["Alive"] and bool(node["Resources"]) for node in ray.nodes()) < 2:
        time.sleep(NODE_POLL_SECONDS)
    return time.monotonic()


def _on(network: Network) -> list[str]:
    """Two slots on each host, as options of hvdrun."""
    script = f"printf 'localhost:2\\n{network.names[HOSTS[1]]}:2\\n'"
    shell = ["--remote-shell", "ip netns exec {host}", "--blacklist-cooldown-range", "1", "1"]
    return ["--host-discovery-script", script, "--max-np", "4", *shell]


def _peer_events(case: Case, arguments: argparse.Namespace, numbers: range) -> Iterator[Found]:
    with running_job(case.name.partition(":")[0], case.before, arguments) as job:
        for number in numbers:
            job.await_calm(case.before)
            at = job.signal(number % case.before, signal.SIGKILL)
            job.await_calm(case.before, since=at)
            yield case, *job.after_restart(at)


EVENTS_OF = {
    "kill": _kills,
    "drain": _drains,
    "grow": _growths,
    "kill on two hosts": _kills_on_hosts,
    "silent host": _silences,
    "Ray: node comes": _arrivals,
    "torchrun: kill": _peer_events,
    "Ray Train: kill": _peer_events,
}


class Job:
    """A job whose processes append the steps that they finish to files in ``folder``."""

    def __init__(self, folder: Path, size: int, step: float) -> None:
        self._folder = folder
        self._size = size
        self._step = step
        self._at = 0.0

    def steps(self) -> dict[int, list[Step]]:
        """The steps of each process, by its id."""
        found = {}
        for file in self._folder.glob("steps.*"):
            lines = [line.split() for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
            found[int(file.suffix[1:])] = [Step(float(at), int(step), int(size)) for at, step, size in lines]
        return found

    def await_calm(self, size: int, since: float = 0.0) -> None:
        """Return when ``size`` processes have finished undisturbed steps in a world of that size."""
        deadline = time.monotonic() + START_SECONDS
        while sum(self._is_calm(steps, size, max(since, self._at)) for steps in self.steps().values()) < size:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {size} ranks train {START_SECONDS:g} s after the last event: {self._folder}")
            time.sleep(POLL_SECONDS)

    def _is_calm(self, steps: list[Step], size: int, since: float) -> bool:
        last = steps[-CALM_STEPS:]
        return len(last) == CALM_STEPS and last[0].time > since and all(step.size == size for step in last)

    def signal(self, number: int, kind: signal.Signals) -> float:
        """Send a signal to one of the processes that train; returns the time of it."""
        latest = time.monotonic() - 2 * self._step - 1.0
        training = sorted(pid for pid, steps in self.steps().items() if steps and steps[-1].time > latest)
        return self.act(lambda: os.kill(training[number % len(training)], kind))

    def act(self, action: Callable[[], None]) -> float:
        """Let an event happen by ``action``; returns the time of it."""
        at = self.note_event(time.monotonic())
        action()
        return at

    def note_event(self, at: float) -> float:
        """An event has happened at the time ``at``, which is returned."""
        self._at = at
        return at

    def after_loss(self, at: float, size: int) -> tuple[float, int]:
        """The pause of the survivors after a kill at ``at``, and the steps that they did again."""
        survivors = self._survivors(at, size)
        pause = max(steps[0].time for _, steps in survivors) - at
        return pause, max(before[-1].step + 1 - after[0].step for before, after in survivors)

    def after_change(self, at: float, size: int) -> tuple[float, int]:
        """The pause of a planned change to ``size`` ranks, the first one after ``at``, and the repeated steps."""
        pauses, lost = [], []
        for steps in self._until(at, size):
            gaps = [after.time - before.time for before, after in itertools.pairwise(steps)]
            ordinary = statistics.median(gaps)
            change = next(n for n, step in enumerate(steps[1:]) if step.size == size != steps[n].size)
            pauses.append(gaps[change] - ordinary)
            lost.append(steps[change].step + 1 - steps[change + 1].step)
        return max(pauses), max(lost)

    def until_begin(self, at: float) -> float:
        """The time from ``at`` until the function of the first process after it begins."""
        begun = [float(file.read_text()) for file in self._folder.glob("begun.*")]
        return min(time for time in begun if time > at) - at

    def until_change(self, at: float, size: int) -> float:
        """The time from ``at`` until all ranks have finished a step in a world of ``size`` ranks."""

        def first() -> list[float]:
            late = [
                [step.time for step in steps if step.time > at and step.size == size] for steps in self.steps().values()
            ]
            return [times[0] for times in late if times]

        self._await(lambda: len(first()) == size)
        return max(first()) - at

    def after_restart(self, at: float) -> tuple[float, int]:
        """The pause until all new processes have finished a step, and the steps that they did again."""
        steps = self.steps().values()
        old = max(step.step for each in steps for step in each if step.time < at)
        new = [each[0] for each in steps if each and each[0].time > at]
        return max(step.time for step in new) - at, old + 1 - min(step.step for step in new)

    def _survivors(self, at: float, size: int) -> list[tuple[list[Step], list[Step]]]:
        self._await(lambda: len(self._split(at, size)) >= size)
        return self._split(at, size)

    def _split(self, at: float, size: int) -> list[tuple[list[Step], list[Step]]]:
        parts = []
        for steps in self.steps().values():
            before = [step for step in steps if step.size != size and step.time < at + START_SECONDS]
            after = [step for step in steps if step.time > at and step.size == size]
            before = [step for step in before if not after or step.time < after[0].time]
            if before and after and before[-1].time > at - 10 * self._step - 1.0:
                parts.append((before, after))
        return parts

    def _until(self, at: float, size: int) -> list[list[Step]]:
        """The steps from ``at`` on of the processes that were there before and after the change to ``size``."""
        before = at - CALM_STEPS * self._step

        def changed() -> list[list[Step]]:
            late = [[step for step in steps if step.time > before] for steps in self.steps().values()]
            return [
                steps
                for steps in late
                if any(one.size != size == other.size for one, other in itertools.pairwise(steps))
            ]

        self._await(lambda: len(changed()) >= min(size, 2))
        return changed()

    def _await(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the ranks did not go on within {START_SECONDS:g} s: {self._folder}")
            time.sleep(POLL_SECONDS)


# Restarted workers of torchrun 2.13 find addresses of the workers before them in the agent's store, and fail.
OF_PEERS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@contextmanager
def running_job(
    side: str, size: int, arguments: argparse.Namespace, *flags: str, network: Network | None = None
) -> Iterator[Job]:
    """The job of ``side``, on the first host of ``network`` or on this one; it has ended after the block."""
    launcher = {
        "ours": ["hvd_cluster", "-np", str(size), "--min-np", "1", *flags, sys.executable],
        "ours on Ray": [],
        "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", str(size), "--max-restarts", "100"],
        "Ray Train": [],
    }[side]
    with tempfile.TemporaryDirectory(prefix="hvd-benchmark-") as folder:
        script = ["-m", "benchmarks.elastic"] if side != "torchrun" else [str(Path(__file__))]
        script = [*script, "--side", side, "--folder", folder, "--step", str(arguments.step)]
        command = [sys.executable, *(["-m", *launcher] if launcher else []), *script]
        environment = {**os.environ, **OF_PEERS, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}
        place = network.inside(HOSTS[0]) if network else nullcontext()
        with open(Path(folder) / "log", "w") as log, place:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            yield Job(Path(folder), size, arguments.step)
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


# The scripts.


class Diary:
    """The steps that this process has finished."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / f"steps.{os.getpid()}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, step: int, size: int) -> None:
        """This process has finished ``step``."""
        os.write(self._file, f"{time.monotonic()} {step} {size}\n".encode())


def _train_elastic(folder: Path, seconds: float) -> None:
    import hvd_cluster.torch as hvd

    hvd.init()
    model, optimizer = _model()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    diary = Diary(folder)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while True:
            _step(model, optimizer, seconds)
            state.step += 1
            diary.note(state.step, hvd.size())
            state.commit()

    train(hvd.elastic.TorchState(model, optimizer, step=0))


def _begin_on_ray(folder: Path, seconds: float) -> None:
    (folder / f"begun.{os.getpid()}").write_text(str(time.monotonic()))
    _train_elastic(folder, seconds)


def _train_on_ray(folder: Path, seconds: float) -> None:
    import ray

    from hvd_cluster.ray import RayExecutor

    ray.init(address="auto", log_to_driver=False)
    sizes = {"min_workers": 1, "num_workers": NODE_TO_STEP.before, "max_workers": NODE_TO_STEP.after}
    with RayExecutor(RayExecutor.create_settings(), **sizes) as executor:
        executor.run(_begin_on_ray, [folder, seconds])


def _train_torchrun(folder: Path, seconds: float) -> None:
    import torch
    import torch.distributed as distributed

    distributed.init_process_group("gloo")
    _train_with_checkpoints(
        folder, seconds, torch.nn.parallel.DistributedDataParallel, distributed.get_rank(), distributed.get_world_size()
    )


def _train_with_checkpoints(folder: Path, seconds: float, wrap: Callable[[Any], Any], rank: int, size: int) -> None:
    import torch

    model, optimizer = _model()
    file, step = folder / "checkpoint", 0
    if file.exists():
        saved = torch.load(file)
        step = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    wrapped, diary = wrap(model), Diary(folder)
    while True:
        _step(wrapped, optimizer, seconds)
        step += 1
        diary.note(step, size)
        if rank == 0 and step % CHECKPOINT_STEPS == 0:
            saved = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(saved, folder / "new")
            os.replace(folder / "new", file)


def _train_ray(folder: Path, seconds: float) -> None:
    import ray
    import ray.train
    from ray.train.torch import TorchTrainer, prepare_model

    def train() -> None:
        context = ray.train.get_context()
        _train_with_checkpoints(folder, seconds, prepare_model, context.get_world_rank(), context.get_world_size())

    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    TorchTrainer(
        train,
        scaling_config=ray.train.ScalingConfig(num_workers=3),
        run_config=ray.train.RunConfig(
            failure_config=ray.train.FailureConfig(max_failures=100), storage_path=str(folder / "ray")
        ),
    ).fit()


def _model() -> tuple[Any, Any]:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, WIDTH)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _step(model: Any, optimizer: Any, seconds: float) -> None:
    import torch

    optimizer.zero_grad()
    time.sleep(seconds)
    model(torch.randn(4, WIDTH)).square().mean().backward()
    optimizer.step()


SIDES: dict[str, Callable[[Path, float], None]] = {
    "ours": _train_elastic,
    "ours on Ray": _train_on_ray,
    "torchrun": _train_torchrun,
    "Ray Train": _train_ray,
}


if __name__ == "__main__":
    main()
