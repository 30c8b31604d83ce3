"""A command whose driver passes by traps: ``driver.py FOLDER MODULE ARGUMENT...`` runs MODULE as ``python -m`` does."""

import runpy
import sys
from pathlib import Path

from tests.faults.jobs.traps import Traps, install_once
from tests.faults.points import OF_DRIVERS

NAME = "driver"


def trapped(folder):
    """Let the driver in this process pass by the traps of ``folder``."""
    install_once(Traps(Path(folder), NAME), OF_DRIVERS)


def main():
    folder, module, *arguments = sys.argv[1:]
    trapped(folder)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
