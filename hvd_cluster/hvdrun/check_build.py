"""The abilities of this installation, as ``hvdrun --check-build`` lists them."""

from __future__ import annotations

from hvd_cluster import __version__, capabilities
from hvd_cluster.bindings import extension_available

FRAMEWORKS = {"TensorFlow": "tensorflow", "PyTorch": "torch", "MXNet": "mxnet"}

__all__ = ["build_summary"]


def build_summary() -> str:
    """The frameworks, controllers and libraries for tensors, each with an X if it is there, in Horovod's format."""
    gloo = capabilities.gloo_built()
    sections = {
        "Available Frameworks": {name: extension_available(module) for name, module in FRAMEWORKS.items()},
        "Available Controllers": {"MPI": capabilities.mpi_built(), "Gloo": True},
        "Available Tensor Operations": {
            "NCCL": bool(capabilities.nccl_built()),
            "DDL": capabilities.ddl_built(),
            "CCL": capabilities.ccl_built(),
            "MPI": capabilities.mpi_built(),
            "Gloo": gloo,
        },
    }
    lines = [f"Horovod v{__version__}:"]
    for title, entries in sections.items():
        lines += ["", f"{title}:", *(f"    [{'X' if there else ' '}] {name}" for name, there in entries.items())]
    return "\n".join([*lines, "", ""])
