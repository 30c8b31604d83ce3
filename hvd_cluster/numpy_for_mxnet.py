"""NumPy 2 for MXNet 1.9, which reads names that NumPy has removed: they are there while ``mxnet`` is imported.

Call :func:`register` before the first import of mxnet.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

from collectives import override
from executors import before_loading


def _gone(name: str) -> Callable[..., NoReturn]:
    def removed(*args: object, **kwargs: object) -> NoReturn:
        import numpy as np

        raise AttributeError(f"numpy.{name} does not exist in NumPy {np.__version__}", name=name, obj=np)

    return removed


def _read_later() -> dict[str, Any]:
    """Names that MXNet reads when it runs: they stay."""
    return {"Inf": float("inf"), "compat": SimpleNamespace(basestring=str)}


def _read_at_import(np: ModuleType) -> dict[str, Any]:
    return {
        **{"PZERO": 0.0, "NZERO": -0.0, "NINF": -np.inf, "PINF": np.inf, "NaN": np.nan, "NAN": np.nan},
        **{"alltrue": np.all, "sometrue": np.any, "round_": np.round, "product": np.prod, "in1d": np.isin},
        **{name: _gone(name) for name in ("mirr", "msort", "npv", "pmt", "ppmt", "pv", "rate")},
        "trapz": getattr(np, "trapezoid", None),
    }


def _set(np: ModuleType, names: dict[str, Any]) -> list[str]:
    """Set those that NumPy lacks; returns them."""
    lacking = [name for name in names if name not in vars(np) and not _has(np, name)]
    for name in lacking:
        setattr(np, name, names[name])
    return lacking


def _has(np: ModuleType, name: str) -> bool:
    try:
        return hasattr(np, name)
    except Exception:  # noqa: BLE001  a name that NumPy loads lazily, with a warning that is an error
        return False


@contextmanager
def removed_names() -> Iterator[None]:
    """Inside, NumPy has the names that MXNet reads at its import; those that it reads later stay."""
    import numpy as np  # not before: a process that registers may have no use for it

    _set(np, _read_later())
    added = _set(np, _read_at_import(np))
    try:
        yield
    finally:
        for name in added:
            delattr(np, name)


class MXNetFinder(MetaPathFinder):
    """Finds ``mxnet``, and no other module."""

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == "mxnet" else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Loading(spec.loader)
        return spec


class _Loading(Loader):
    """Loads a module as the loader of it does, which the module has afterwards."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    @override
    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        with removed_names():
            self._loader.exec_module(module)


def register() -> None:
    """Let ``import mxnet`` work in this process, and in workers that get functions from it.

    The modules that send functions call it, too: this process may be one without MXNet. A second call changes nothing.
    """
    if register not in before_loading:
        before_loading.append(register)
    if not any(isinstance(finder, MXNetFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, MXNetFinder())
