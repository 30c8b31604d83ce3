"""Runs at the start of every Python that has this folder on PYTHONPATH; see ``search_path`` of hvd_cluster.horovod.

Many of these processes have nothing to do with hvd-cluster. Therefore this file imports nothing of it before the
program imports horovod or mxnet, or asks for the version of horovod, and it runs the ``sitecustomize`` that it hides.
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
    """Installs the alias when it is needed. The finder of the alias then comes before this one."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "mxnet":
            return _without_old_numpy(path)
        if fullname != "horovod":
            return None
        install()
        return importlib.util.find_spec(fullname)

    @staticmethod
    def find_distributions(context: Any) -> Iterable[Any]:
        if (context.name or "").lower() != "horovod":
            return ()
        install()
        from hvd_cluster.horovod.finder import HorovodFinder

        return HorovodFinder().find_distributions(context)


def _without_old_numpy(path: Sequence[str] | None) -> ModuleSpec | None:
    """MXNet, which scripts for Horovod import first, next to a NumPy for which it was not written."""
    if PathFinder.find_spec("mxnet", path) is None:
        return None
    _find_ours()
    from hvd_cluster.numpy_for_mxnet import MXNetFinder

    return MXNetFinder().find_spec("mxnet", path)


def install() -> None:
    """Install the alias."""
    _find_ours()
    from hvd_cluster import horovod

    horovod.install()


def _find_ours() -> None:
    if importlib.util.find_spec("hvd_cluster") is None:
        sys.path.append(ROOT)


def run_hidden() -> None:
    """Run the next ``sitecustomize`` on ``sys.path``, if there is one, under its name."""
    rest = [entry for entry in sys.path if os.path.realpath(entry) != HERE]
    spec = PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


sys.meta_path.insert(0, Installer)
run_hidden()
