"""The abilities of this installation, as ``hvdrun --check-build`` lists them, and the reasons for those it lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec

from collectives.backends.table import Row, rows
from hvd_cluster import __version__, capabilities
from hvd_cluster.diagnose.trial import Trial, try_row

__all__ = ["build_summary"]

FRAMEWORKS = {"TensorFlow": "tensorflow", "PyTorch": "torch"}
"""The module of each framework, which is also the extra that installs it."""
NEVER = {
    "MXNet": "hvd-cluster has no binding for it: MXNet has had no release since 2022",
    "DDL": "hvd-cluster does not use IBM's DDL; leave HOROVOD_CPU_OPERATIONS out",
    "CCL": "hvd-cluster does not use oneCCL; leave HOROVOD_CPU_OPERATIONS out",
}

Sections = Mapping[str, Mapping[str, bool]]


def build_summary(try_row: Callable[[Row], Trial] = try_row) -> str:
    """The frameworks, controllers and libraries for tensors, each with an X if it is there, in Horovod's format.

    After that a line for each one that is not there says why. Those that move tensors are tried by ``try_row``.
    """
    sections = _sections()
    lines = [f"Horovod v{__version__}:"]
    for title, entries in sections.items():
        lines += ["", f"{title}:", *(f"    [{'X' if there else ' '}] {name}" for name, there in entries.items())]
    reasons = _reasons(sections, try_row)
    return "\n".join([*lines, "", "Why not the others:", *(f"    {name}: {why}" for name, why in reasons), "", ""])


def _sections() -> Sections:
    mpi = capabilities.mpi_built()
    frameworks = {name: find_spec(module) is not None for name, module in FRAMEWORKS.items()}
    return {
        "Available Frameworks": {**frameworks, "MXNet": False},
        "Available Controllers": {"MPI": mpi, "Gloo": True},
        "Available Tensor Operations": {
            "NCCL": bool(capabilities.nccl_built()),
            "DDL": capabilities.ddl_built(),
            "CCL": capabilities.ccl_built(),
            "MPI": mpi,
            "Gloo": capabilities.gloo_built(),
        },
    }


def _reasons(sections: Sections, try_row: Callable[[Row], Trial]) -> Iterator[tuple[str, str]]:
    """Each ability that is missing, once, and the reason."""
    missing = [name for entries in sections.values() for name, there in entries.items() if not there]
    by_name = {row.name: row for row in rows()}
    for name in dict.fromkeys(missing):
        if name in FRAMEWORKS:
            yield name, f"it is not installed; install it with: pip install 'hvd-cluster[{FRAMEWORKS[name]}]'"
        elif name in NEVER:
            yield name, NEVER[name]
        else:
            yield name, try_row(by_name[name.lower()]).reason
