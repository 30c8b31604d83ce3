"""Pure: the environment variables of a worker that depend on its host."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

__all__ = ["gpu_variables", "interface_variables"]


def gpu_variables(gpus: Sequence[Sequence[str]]) -> dict[str, str]:
    """The GPUs that every worker of a host sees, given the GPU ids of each worker in the order of local ranks.

    Each sees the GPUs of all, in one order, because NCCL needs that to copy between them directly. The first GPU of
    local rank ``i`` is device ``i``.
    """
    order = [gpu for layer in zip_longest(*gpus) for gpu in layer if gpu is not None]
    return {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(order))} if order else {}


def interface_variables(nics: Sequence[str]) -> dict[str, str]:
    """The network interfaces for Gloo, which takes one, and for NCCL."""
    return {"HOROVOD_GLOO_IFACE": nics[0], "NCCL_SOCKET_IFNAME": ",".join(nics)} if nics else {}
