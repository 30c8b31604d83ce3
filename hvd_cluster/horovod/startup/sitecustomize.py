"""Runs at the start of every Python that has this folder on PYTHONPATH; see ``search_path`` of hvd_cluster.horovod.

Such a Python need not have anything to do with hvd-cluster. Therefore nothing of it is imported before the program says
``import horovod`` or asks for its version, and the ``sitecustomize`` that this file hides runs as if it were not here.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))


class Installer:
    """Installs the alias when it is needed; what that puts before this finder finds the rest."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See :class:`importlib.abc.MetaPathFinder`."""
        if fullname != "horovod":
            return None
        install()
        return importlib.util.find_spec(fullname)

    @staticmethod
    def find_distributions(context: Any) -> Iterable[Any]:
        """See :class:`importlib.metadata.DistributionFinder`."""
        if (context.name or "").lower() != "horovod":
            return ()
        install()
        from hvd_cluster.horovod.finder import HorovodFinder

        return HorovodFinder().find_distributions(context)


def install() -> None:
    """Install the alias."""
    if importlib.util.find_spec("hvd_cluster") is None:
        sys.path.append(ROOT)
    from hvd_cluster import horovod

    horovod.install()


def run_hidden() -> None:
    """Run the next ``sitecustomize`` on the way, if there is one, under its name."""
    rest = [entry for entry in sys.path if os.path.realpath(entry) != HERE]
    spec = PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


sys.meta_path.insert(0, Installer)
run_hidden()
