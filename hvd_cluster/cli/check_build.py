"""The abilities of this installation, as ``hvdrun --check-build`` lists them, and the reasons for those it lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec

from collectives import registry
from hvd_cluster import __version__
from hvd_cluster.core import features
from hvd_cluster.diagnose.trial import BackendTrial, try_row

FRAMEWORKS = {"TensorFlow": "tensorflow", "PyTorch": "torch", "MXNet": "mxnet"}
"""The module of each framework."""
INSTALL = {
    "TensorFlow": "pip install 'hvd-cluster[tensorflow]'",
    "PyTorch": "pip install 'hvd-cluster[torch]'",
    "MXNet": "python -m hvd_cluster.install_mxnet",
}
NEVER = {
    "DDL": "hvd-cluster does not use IBM's DDL; leave HOROVOD_CPU_OPERATIONS out",
    "CCL": "hvd-cluster does not use oneCCL; leave HOROVOD_CPU_OPERATIONS out",
}
LIBRARIES = ("NCCL", "MPI", "Gloo")
"""The libraries that move tensors."""

Sections = Mapping[str, Mapping[str, bool]]


def build_summary(try_row: Callable[[registry.Row], BackendTrial] = try_row) -> str:
    """The frameworks, controllers and libraries for tensors, each with an X if it is there, in Horovod's format.

    After that a line for each one that is not there says why. A library that this process does not find is tried by
    ``try_row``: the launcher may lead its ranks to it.
    """
    lacking = {name: "" if _is_built(name) else _refusal(name, try_row) for name in LIBRARIES}
    sections = _sections({name: not reason for name, reason in lacking.items()})
    lines = [f"Horovod v{__version__}:"]
    for title, entries in sections.items():
        lines += ["", f"{title}:", *(f"    [{'X' if there else ' '}] {name}" for name, there in entries.items())]
    reasons = _reasons(sections, lacking)
    return "\n".join([*lines, "", "Why not the others:", *(f"    {name}: {why}" for name, why in reasons), "", ""])


def _is_built(library: str) -> bool:
    return bool(getattr(features, f"{library.lower()}_built")())


def _refusal(library: str, try_row: Callable[[registry.Row], BackendTrial]) -> str:
    """Why two processes cannot exchange tensors through ``library``; empty if they can."""
    return next(try_row(row).reason for row in registry.rows() if row.name == library.lower())


def _sections(works: Mapping[str, bool]) -> Sections:
    return {
        "Available Frameworks": {name: find_spec(module) is not None for name, module in FRAMEWORKS.items()},
        "Available Controllers": {"MPI": works["MPI"], "Gloo": True},
        "Available Tensor Operations": {
            "NCCL": works["NCCL"],
            "DDL": features.ddl_built(),
            "CCL": features.ccl_built(),
            "MPI": works["MPI"],
            "Gloo": works["Gloo"],
        },
    }


def _reasons(sections: Sections, lacking: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Each ability that is missing, once, and the reason; ``lacking`` has those of the libraries."""
    missing = [name for entries in sections.values() for name, there in entries.items() if not there]
    for name in dict.fromkeys(missing):
        if name in FRAMEWORKS:
            yield name, f"it is not installed; install it with: {INSTALL[name]}"
        else:
            yield name, NEVER.get(name) or lacking[name]
