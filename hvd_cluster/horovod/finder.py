"""What ``import horovod.torch`` finds: the module hvd_cluster.torch itself, so that patching one patches the other."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType

__all__ = ["HorovodFinder"]

# The few modules that exist under Horovod's names only.
MODULES = os.path.join(os.path.dirname(os.path.realpath(__file__)), "modules")
# Horovod's modules that have another name here; a module horovod.x is hvd_cluster.x otherwise.
MOVED = {
    "horovod.common.exceptions": "hvd_cluster.exceptions",
    "horovod.runner": "hvd_cluster.run",
}


class HorovodFinder(MetaPathFinder):
    """Finds horovod and all below it. ModuleNotFoundError, from :meth:`find_spec` already, for what is not here."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See :class:`importlib.abc.MetaPathFinder`."""
        if fullname.partition(".")[0] != "horovod":
            return None
        return _own(fullname) or _alias(fullname)


def _own(fullname: str) -> ModuleSpec | None:
    parents = fullname.split(".")[:-1]
    return PathFinder.find_spec(fullname, [os.path.join(MODULES, *parents)])


def _alias(fullname: str) -> ModuleSpec:
    real = MOVED.get(fullname, f"hvd_cluster{fullname.removeprefix('horovod')}")
    if not _exists(real):
        # With the real name: "from horovod import mxnet" would swallow an error with the name it asked for.
        raise ModuleNotFoundError(f"hvd-cluster, which stands in for Horovod here, does not have {fullname}", name=real)
    return ModuleSpec(fullname, _Alias(real))


def _exists(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # what it would be in does not exist
        return False


class _Alias(Loader):
    """Puts a module of ours, which keeps its name and its spec, under a second name."""

    def __init__(self, real: str) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> None:
        """None: importlib makes a module, and takes what :meth:`exec_module` puts in its place."""

    def exec_module(self, module: ModuleType) -> None:
        """Import the real module."""
        real = import_module(self._real)
        # A module without a path has nothing below it, and importlib would say that without asking us.
        real.__dict__.setdefault("__path__", [])
        sys.modules[module.__name__] = real
