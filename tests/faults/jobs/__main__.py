"""One worker: see ``training``, which must not be the main module, because it has traps by its name."""

import sys

from tests.faults.jobs.training import train

if __name__ == "__main__":
    train(*sys.argv[1:])
