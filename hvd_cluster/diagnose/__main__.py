"""The command ``python -m hvd_cluster.diagnose``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from collectives.backends.registry import rows
from hvd_cluster.diagnose.machine import Machine, installed_versions
from hvd_cluster.diagnose.report import DiagnosisReport
from hvd_cluster.diagnose.trial import DEFAULT, Launch, launch, try_row

ABOUT = (
    "Show versions and limits of this machine, and let two processes do an allreduce by each backend. "
    "The exit status is 0 where a job that asks for nothing works, else 1."
)


def main(argv: Sequence[str] | None = None, launch: Launch = launch) -> int:
    """Write a :class:`DiagnosisReport` to standard output; returns the exit status. Raises SystemExit."""
    parser = argparse.ArgumentParser(prog="python -m hvd_cluster.diagnose", description=ABOUT)
    parser.add_argument("--json", action="store_true", help="write JSON")
    options = parser.parse_args(argv)
    trials = [try_row(row, launch) for row in (DEFAULT, *rows())]
    report = DiagnosisReport(installed_versions(), Machine.here(), trials)
    text = json.dumps(report.as_data(), indent=2) + "\n" if options.json else report.as_text()
    sys.stdout.write(text)
    return report.status


if __name__ == "__main__":
    sys.exit(main())
