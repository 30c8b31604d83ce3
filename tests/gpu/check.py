"""What scripts/gpu_check runs: one stage after another, each in processes of its own and with a limit of time."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass

SKIPPED = 77
"""The status that test harnesses take for "skipped"."""
SHARED_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "0"}
"""NCCL refuses ranks that share a GPU otherwise, and may not have room for their kernels."""


@dataclass(frozen=True)
class Stage:
    """A module with its arguments, and how long it may take, in seconds."""

    name: str
    arguments: tuple[str, ...]
    limit: float


def missing() -> str:
    """Why nothing can be checked here; empty if it can."""
    try:
        import pytest  # noqa: F401
        import rich  # noqa: F401
        import torch

        from collectives.backends.nccl.joining import unavailable
    except ImportError as error:
        return f"a package is missing: {error}"
    if not torch.cuda.is_available():
        return f"no GPU here: torch {torch.__version__} sees none; {unavailable()}"
    return unavailable()


def describe() -> str:
    import torch

    from collectives.backends.nccl.joining import load
    from collectives.backends.nccl.library import version_text

    library = load()
    gpus = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return f"{gpus}; NCCL {version_text(library.version)} by {library.name}; torch {torch.__version__}"


def stages(ranks: int, quick: bool) -> list[Stage]:
    count = ("--ranks", str(ranks))
    found = [
        Stage("kernels", ("tests.gpu.kernels",), 60),
        Stage("matrix", ("tests.gpu.backend", *count), 150),
        Stage("training", ("tests.gpu.training", *count), 120),
    ]
    return found if quick else [*found, Stage("speed", ("benchmarks.gpu", *count), 140)]


def run(stage: Stage) -> bool:
    began = time.monotonic()
    environment = {**SHARED_GPU, **os.environ}
    try:
        command = [sys.executable, "-m", *stage.arguments]
        status = subprocess.run(command, env=environment, timeout=stage.limit, check=False).returncode
    except subprocess.TimeoutExpired:
        status = -1
    verdict = {0: "passed", -1: f"took more than {stage.limit:g} s"}.get(status, f"FAILED with status {status}")
    sys.stdout.write(f"gpu_check: {stage.name}: {verdict}, {time.monotonic() - began:.1f} s\n")
    return status == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="ranks on the GPU")
    parser.add_argument("--quick", action="store_true", help="no benchmarks")
    arguments = parser.parse_args()
    reason = missing()
    if reason:
        sys.stdout.write(f"gpu_check: skipped: {reason}\n")
        return SKIPPED
    sys.stdout.write(f"gpu_check: {describe()}\n")
    failed = [stage.name for stage in stages(arguments.ranks, arguments.quick) if not run(stage)]
    sys.stdout.write(f"gpu_check: {'FAILED: ' + ', '.join(failed) if failed else 'all is well'}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
