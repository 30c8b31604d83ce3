"""``python -m horovod.runner.launch -np 2 python train.py``, with the options of hvdrun."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hvd_cluster.cli.hvdrun import main

__all__ = ["run_commandline"]


def run_commandline(argv: Sequence[str] | None = None) -> None:
    """Run the command in ``argv``, or else in the command line. Raises SystemExit at the end, with the exit code."""
    sys.exit(main(argv))


if __name__ == "__main__":
    run_commandline()
