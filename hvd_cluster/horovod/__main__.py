"""``python -m hvd_cluster.horovod train.py``: like ``python train.py``, with hvd_cluster for horovod."""

from __future__ import annotations

import os
import runpy
import sys

from hvd_cluster.horovod import install


def main() -> None:
    """Run the script that the command line names, or the module after ``-m``. Raises SystemExit where there is none."""
    del sys.argv[0]
    is_module = sys.argv[:1] == ["-m"]
    if is_module:
        del sys.argv[0]
    if not sys.argv or sys.argv[0].startswith("-"):
        sys.exit("usage: python -m hvd_cluster.horovod script.py [argument ...], or -m module [argument ...]")
    install()
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
