"""``python -m hvd_cluster`` is the command hvdrun."""

from __future__ import annotations

import sys

from hvd_cluster.cli.hvdrun import main

if __name__ == "__main__":
    sys.exit(main())
