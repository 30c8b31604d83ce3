"""The examples run, alone and on two processes. ``make demo`` runs the one for Ray."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DIGITS = str(ROOT / "examples" / "digits.py")
HVDRUN = sys.executable, "-m", "hvd_cluster"


@pytest.mark.parametrize(
    ("launcher", "size", "prefix"),
    [((), 1, ""), ((*HVDRUN, "-np", "2"), 2, "[0]<stdout>:")],
    ids=["alone", "hvdrun"],
)
def test_digits(launcher: tuple[str, ...], size: int, prefix: str) -> None:
    epoch, verdict = _lines(*launcher, sys.executable, DIGITS, "--epochs", "1")
    assert re.fullmatch(
        rf"{re.escape(prefix)}epoch  1   loss \d\.\d{{4}}   held-out accuracy [01]\.\d{{4}}   [\d,]+ images/s", epoch
    )
    assert re.fullmatch(
        rf"{re.escape(prefix)}parameters: bit for bit the same on {size} of {size} ranks, sha256 [0-9a-f]{{16}}",
        verdict,
    )


def test_digits_says_that_a_batch_is_too_large() -> None:
    run = _run(sys.executable, DIGITS, "--batch-size", "2000")
    assert run.returncode != 0
    assert "1437 images are fewer than one step takes: 1 ranks x batches of 2000" in run.stderr


def _lines(*command: str) -> list[str]:
    run = _run(*command)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=90, env=environment)
