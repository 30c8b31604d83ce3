"""What scripts/gpu_check runs: one stage after another, each in processes of its own and with a limit of time."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from benchmarks.shared_gpu import variables
from tests.gpu.rank import SECONDS

SKIPPED = 77
"""The status that test harnesses take for "skipped"."""
TOTAL_SECONDS = 460.0
LEAST_SECONDS = 10.0
"""A stage does not begin if less is left."""
DUMP_SECONDS = 2.0
"""For the stacks of a stage that took too long."""
START_SECONDS = 15.0
"""Ranks that live so long before the limit of their stage show their stacks, too."""


@dataclass(frozen=True)
class Stage:
    """A module with its arguments, and how long it may take, in seconds."""

    name: str
    arguments: tuple[str, ...]
    limit: float
    needs_nccl: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)


def missing() -> str:
    """Why nothing can be checked here; empty if something can. A stage that lacks a package fails for itself."""
    try:
        import torch

        from collectives.backends.nccl.presence import without_gpu
    except ImportError as error:
        return f"a package is missing: {error}"
    if not torch.cuda.is_available():
        return f"no GPU here: torch {torch.__version__} sees none; {without_gpu()}"
    return without_gpu()


def describe() -> str:
    import torch

    gpus = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    theirs = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
    return f"{gpus}; torch {torch.__version__} with NCCL {theirs}; Python {sys.version.split()[0]}"


def nccl() -> tuple[int, str]:
    """The version of NCCL, and its name; 0 and the reason where it cannot be used."""
    from collectives.backends.nccl.bootstrap import load, unavailable
    from collectives.backends.nccl.interface import version_text

    try:
        reason = unavailable()
        return (0, reason) if reason else (load().version, f"{version_text(load().version)} by {load().name}")
    except Exception as error:  # noqa: BLE001 - the other stages go on
        return 0, repr(error)


def stages(ranks: int, quick: bool) -> list[Stage]:
    """Those that tell the most come first."""
    count = ("--ranks", str(ranks))
    through_host = {"HOROVOD_GPU_OPERATIONS": "host"}
    found = [
        Stage("kernels", ("tests.gpu.kernels",), 50, needs_nccl=False),
        Stage("operations", ("tests.gpu.training", "operations", *count), 45),
        Stage("matrix", ("tests.gpu.backend", "matrix", *count), 120),
        Stage("training", ("tests.gpu.training", "training", *count), 50),
        Stage("abort", ("tests.gpu.backend", "abort", *count), 40),
        Stage("streams", ("tests.gpu.training", "streams", *count), 40),
        Stage("scaler", ("tests.gpu.training", "scaler", *count), 40),
        Stage("memory", ("tests.gpu.training", "memory", *count), 40),
        Stage("hierarchies", ("tests.gpu.hierarchies",), 100),
        Stage("through the host", ("tests.gpu.training", "operations", *count), 45, False, through_host),
    ]
    speed = [
        Stage("speed of allreduce", ("benchmarks.gpu", "--only", "allreduce", *count), 70),
        Stage("speed of training", ("benchmarks.gpu", "--only", "training", *count), 90),
    ]
    return found if quick else found + speed


def run(stage: Stage, environment: Mapping[str, str], limit: float) -> bool:
    """Whether it passed. Its processes are a group, which ends with it: none may stay on the GPU."""
    began = time.monotonic()
    settings = {**environment, **stage.environment, SECONDS: str(max(limit / 2, limit - START_SECONDS))}
    process = subprocess.Popen([sys.executable, "-m", *stage.arguments], env=settings, start_new_session=True)
    try:
        status = process.wait(limit)
        verdict = f"FAILED with status {status}" if status else "passed"
    except subprocess.TimeoutExpired:
        status, verdict = -1, f"FAILED: took more than {limit:.0f} s"
        signal_all(process, signal.SIGABRT)  # which shows the stacks
        time.sleep(DUMP_SECONDS)
    finally:
        signal_all(process, signal.SIGKILL)
        process.wait()
    report(f"{stage.name}: {verdict}, {time.monotonic() - began:.1f} s")
    return status == 0


def signal_all(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def report(text: str) -> None:
    sys.stdout.write(f"gpu_check: {text}\n")
    sys.stdout.flush()


def run_all(chosen: list[Stage], environment: Mapping[str, str], lack: str) -> list[str]:
    """The names of the stages that failed. ``lack`` is why NCCL cannot be used."""
    deadline, failed = time.monotonic() + TOTAL_SECONDS, []
    for stage in chosen:
        left = deadline - time.monotonic()
        if lack and stage.needs_nccl:
            report(f"{stage.name}: cannot run: {lack}")
            failed.append(stage.name)
        elif left < LEAST_SECONDS:
            report(f"{stage.name}: NOT RUN: no time is left")
            failed.append(stage.name)
        elif not run(stage, environment, min(stage.limit, left)):
            failed.append(stage.name)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="ranks on the GPU")
    parser.add_argument("--quick", action="store_true", help="no benchmarks")
    parser.add_argument("--only", nargs="*", default=[], metavar="STAGE", help="these stages only")
    arguments = parser.parse_args()
    reason = missing()
    if reason:
        report(f"skipped: {reason}")
        return SKIPPED
    import torch

    version, name = nccl()
    report(f"{describe()}; ours: NCCL {name}")
    settings = variables(arguments.ranks, torch.cuda.device_count(), version)
    environment = {"NCCL_DEBUG": "WARN", "PYTHONFAULTHANDLER": "1", **settings, **os.environ}
    chosen = [s for s in stages(arguments.ranks, arguments.quick) if not arguments.only or s.name in arguments.only]
    failed = run_all(chosen, environment, "" if version else name)
    report(f"FAILED: {', '.join(failed)}" if failed else "all is well")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
