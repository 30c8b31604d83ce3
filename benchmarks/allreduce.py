"""Allreduce of float32: :mod:`benchmarks.operations` with the sizes that matter to it, and with many small tensors.

    python -m benchmarks.allreduce --ranks 2 4 --sizes 32 1M 64M

Takes all options of ``benchmarks.operations``.
"""

from __future__ import annotations

from benchmarks.operations import main

PRESETS = "--operations allreduce --dtypes float32 --sizes 32 64K 1M 16M 64M --tensors 200 --launches 3"

if __name__ == "__main__":
    main(PRESETS.split())
