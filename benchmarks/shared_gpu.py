"""Ranks that share a GPU: NCCL refuses them, unless it is told that this is on purpose."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["claim_host", "variables"]

ALLOWS = 23003
"""NCCL 2.30.3 has a variable that allows it."""
SEPARATE = "HVD_CHECK_SEPARATE"
FEW = {"NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "0"}
"""Otherwise the GPU may not have room for the kernels of all ranks, which wait for one another."""
APART = {SEPARATE: "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0"}


def variables(ranks: int, gpus: int, version: int) -> Mapping[str, str]:
    """The environment for ``ranks`` on ``gpus`` with NCCL ``version``, such as 22809.

    An older NCCL compares the GPUs of ranks on one host only. So each rank claims to be a host of its own, and NCCL
    connects them by sockets, see :func:`claim_host`.
    """
    if ranks <= gpus:
        return {}
    return {**FEW, "NCCL_MULTI_RANK_GPU_ENABLE": "1"} if version >= ALLOWS else {**FEW, **APART}


def claim_host() -> None:
    """For a rank, before its first call of NCCL: it is a host of its own where :func:`variables` says so."""
    if os.environ.get(SEPARATE):
        os.environ["NCCL_HOSTID"] = f"process-{os.getpid()}"
