"""The beginning of each process of the check."""

from __future__ import annotations

import faulthandler
import os

from benchmarks.shared_gpu import claim_host

__all__ = ["SECONDS", "prepare"]

SECONDS = "HVD_CHECK_SECONDS"


def prepare():
    """Before the first call of NCCL. Shows where all threads are if the process is still there after SECONDS."""
    claim_host()
    if SECONDS in os.environ:
        faulthandler.dump_traceback_later(float(os.environ[SECONDS]))
