"""Makes ``import horovod.torch`` find the module hvd_cluster.torch itself, so that patching one patches the other."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import InspectLoader, Loader
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType, ModuleType

from collectives import override
from hvd_cluster import __version__

__all__ = ["HOROVOD_VERSION", "HorovodFinder"]

# The release of Horovod whose API this is: scripts compare it with the release that they need.
HOROVOD_VERSION = "0.28.1+hvd.cluster"
# The few modules that exist under Horovod's names only.
MODULES = os.path.join(os.path.dirname(os.path.realpath(__file__)), "modules")
# Horovod's modules that have another name here; a module horovod.x is hvd_cluster.x otherwise.
MOVED = {
    "horovod.common.exceptions": "hvd_cluster.exceptions",
    "horovod.mxnet.compression": "hvd_cluster.mxnet.gradients",
    "horovod.ray.elastic_v2": "hvd_cluster.ray.elastic",
    "horovod.ray.runner": "hvd_cluster.ray.executor",
    "horovod.ray.worker": "hvd_cluster.ray.base_worker",
    "horovod.runner.common.service.compute_service": "hvd_cluster.data.compute",
    "horovod.spark.common": "hvd_cluster.spark.estimators",
    "horovod.spark.common.backend": "hvd_cluster.spark.estimators.backend",
    "horovod.spark.common.estimator": "hvd_cluster.spark.estimators.estimator",
    "horovod.spark.common.params": "hvd_cluster.spark.estimators.params",
    "horovod.spark.common.store": "hvd_cluster.spark.estimators.store",
    "horovod.spark.common.util": "hvd_cluster.spark.estimators.parquet",
    "horovod.tensorflow.gradient_aggregation": "hvd_cluster.tensorflow.optimizer.aggregation",
    "horovod.tensorflow.gradient_aggregation_eager": "hvd_cluster.tensorflow.optimizer.aggregation",
    "horovod.tensorflow.sync_batch_norm": "hvd_cluster.keras.sync_batch_norm",
}
# The names under which modules of ours were imported.
_names: dict[str, str] = {}
STAND_IN = f"hvd-cluster {__version__}, which stands in for Horovod here, does not have"


class HorovodFinder(DistributionFinder):
    """Finds horovod and all modules below it; the error for a missing module names hvd-cluster."""

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raises for a missing module, but only where it is imported."""
        if fullname.partition(".")[0] == "horovod":
            return _own(fullname) or _alias(fullname)
        module, _, name = fullname.rpartition(".")
        asked = _names.get(module)
        if asked and "_handle_fromlist" in _callers() and PathFinder.find_spec(fullname, path) is None:
            raise ImportError(f"{STAND_IN} {asked}.{name}", name=module)
        return None

    def find_distributions(
        self,
        context: DistributionFinder.Context = DistributionFinder.Context(),  # noqa: B008  importlib's default
    ) -> Iterator[Distribution]:
        """The metadata of Horovod for a search by its name; a list of all distributions does not have it."""
        if (context.name or "").lower() == "horovod":
            yield _Metadata()


def _own(fullname: str) -> ModuleSpec | None:
    parents = fullname.split(".")[:-1]
    spec = PathFinder.find_spec(fullname, [os.path.join(MODULES, *parents)])
    if spec is not None and spec.origin is not None:
        spec.loader = _Own(fullname, spec.origin)
    return spec


def _alias(fullname: str) -> ModuleSpec | None:
    real = MOVED.get(fullname, f"hvd_cluster{fullname.removeprefix('horovod')}")
    spec = _spec_of(real)
    if spec is not None:
        return ModuleSpec(fullname, _Alias(real), origin=spec.origin)  # which "python -m" makes sys.argv[0]
    if "_find_and_load" in _callers():
        # With the real name: "from horovod import mxnet" would swallow an error with the name it asked for.
        raise ModuleNotFoundError(f"{STAND_IN} {fullname}", name=real)
    return None


def _spec_of(name: str) -> ModuleSpec | None:
    try:
        return find_spec(name)
    except ModuleNotFoundError:  # its parent package does not exist
        return None


def _callers() -> set[str]:
    """The functions of importlib that called the finder.

    Only they show whether this is an import or a call of ``importlib.util.find_spec``. For a missing module the import
    should raise an error that explains more, and ``find_spec`` must return None.
    """
    frame: FrameType | None = sys._getframe()
    names = set()
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    while frame is not None and frame.f_globals.get("__name__") == "importlib._bootstrap":
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return names


def _explain(module: ModuleType, asked: str) -> None:
    """Let the error for a name that ``module`` lacks say that ``asked`` was asked for it."""
    own: Callable[[str], object] | None = module.__dict__.get("__getattr__")

    def missing(name: str) -> object:
        if own is not None:
            with suppress(AttributeError):
                return own(name)
        text = f"{STAND_IN} {asked}.{name}"
        if not name.startswith("_") and _spec_of(f"{asked}.{name}"):
            text = f"{asked}.{name} is not imported yet; say import {asked}.{name} first"
        raise AttributeError(text, name=name, obj=module)

    module.__dict__["__getattr__"] = missing
    # Without a path, importlib would refuse a submodule without a call of this finder.
    module.__dict__.setdefault("__path__", [])


class _Own(SourceFileLoader):
    """Loads a module that exists under Horovod's name only."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the file."""
        _explain(module, module.__name__)
        super().exec_module(module)


class _Alias(Loader):
    """Puts a module of ours, which keeps its name and its spec, under a second name."""

    def __init__(self, real: str) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> None:
        """None: importlib makes a module, and :meth:`exec_module` puts another one in its place."""

    def get_code(self, fullname: str) -> CodeType | None:
        """The code of the real module, for ``python -m``."""
        spec = find_spec(self._real)
        return spec.loader.get_code(self._real) if spec and isinstance(spec.loader, InspectLoader) else None

    def exec_module(self, module: ModuleType) -> None:
        """Import the real module."""
        real = import_module(self._real)
        if self._real not in _names:
            _names[self._real] = module.__name__
            _explain(real, module.__name__)
        sys.modules[module.__name__] = real


class _Metadata(Distribution):
    def read_text(self, filename: str) -> str | None:
        """The file METADATA, with name and version; None for all other files."""
        return f"Metadata-Version: 2.1\nName: horovod\nVersion: {HOROVOD_VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        """The path of a file below the modules with Horovod's names."""
        return Path(MODULES) / path
