"""Pure: the variables of a worker that Ray's placement decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from executors.arguments import check_variables

__all__ = ["check_extra", "gpu_variables", "interface_variables"]


def check_extra(variables: Mapping[str, object] | None) -> dict[str, str]:
    """The user's variables, their values as strings. Raises ValueError where one is the executor's to set."""
    if isinstance(variables, Mapping):
        variables = {name: str(value) for name, value in variables.items()}
    return check_variables(variables, "extra_env_vars", "RayExecutor")


def gpu_variables(gpus: Sequence[Sequence[str]]) -> dict[str, str]:
    """What every worker of a host sees, given the GPU ids of each of its workers in the order of local ranks.

    Each sees the GPUs of all, in one order, because NCCL needs that to copy between them directly. The first GPU of
    local rank ``i`` is device ``i``.
    """
    order = [gpu for layer in zip_longest(*gpus) for gpu in layer if gpu is not None]
    return {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(order))} if order else {}


def interface_variables(nics: Sequence[str]) -> dict[str, str]:
    """The network interfaces for Gloo, which takes one, and for NCCL."""
    return {"HOROVOD_GLOO_IFACE": nics[0], "NCCL_SOCKET_IFNAME": ",".join(nics)} if nics else {}
