"""The classes of the strategy for each package of Lightning that is installed."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from hvd_cluster.lightning.environment import RankEnvironment, tolerate_broken_mpi
from hvd_cluster.lightning.fabric_strategy import FabricStrategy
from hvd_cluster.lightning.trainer_strategy import FirstCallback, TrainerStrategy

NAME = "horovod"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Package:
    """A package of Lightning: its own name, and its modules of Trainer and Fabric. ``home`` has its classes of ours."""

    name: str
    trainer: str
    fabric: str
    home: str

    @property
    def is_installed(self) -> bool:
        """Whether there is such a package; a folder of that name beside a script is none."""
        spec = find_spec(self.name)
        return spec is not None and spec.origin is not None


PACKAGES = (
    Package("lightning", "lightning.pytorch", "lightning.fabric", "hvd_cluster.lightning"),
    Package("pytorch_lightning", "pytorch_lightning", "lightning_fabric", "hvd_cluster.lightning.pytorch_lightning"),
)


@dataclass(frozen=True)
class Classes:
    """Those for one package."""

    environment: type[Any]
    trainer: type[Any]
    fabric: type[Any]


def installed_classes() -> dict[str, Classes]:
    """Those of each package that can be imported, by its name. Raises ImportError where there is none."""
    found, errors = {}, []
    for package in PACKAGES:
        if package.is_installed:
            try:
                found[package.name] = classes_of(package)
            except (ImportError, AttributeError) as error:  # such as an old version of one beside a new one
                errors.append(f"{package.name}: {error}")
    if not found:
        advice = 'hvd_cluster.lightning needs Lightning: pip install "hvd-cluster[lightning]"'
        raise ImportError("; ".join([advice, *errors]))
    for reason in errors:
        logger.warning("no strategy for a package of Lightning that cannot be used: %s", reason)
    return found


def classes_of(package: Package) -> Classes:
    """Make the classes for ``package``, which is installed, and register both strategies by name."""
    trainer, fabric = import_module(f"{package.trainer}.strategies"), import_module(f"{package.fabric}.strategies")
    environments = import_module(f"{package.fabric}.plugins.environments")
    tolerate_broken_mpi(environments)
    environment = _combined(package, "HorovodEnvironment", RankEnvironment, environments.ClusterEnvironment)
    callback = import_module(f"{package.trainer}.callbacks").Callback
    attributes = {
        "_package": package.trainer,
        "_environment_kind": environment,
        "_callback_kind": _combined(package, "FirstCallback", FirstCallback, callback),
        "_rank_zero_only": staticmethod(import_module(f"{package.fabric}.utilities.rank_zero").rank_zero_only),
    }
    classes = Classes(
        environment,
        _combined(package, "HorovodStrategy", TrainerStrategy, trainer.ParallelStrategy, **attributes),
        _combined(package, "HorovodFabricStrategy", FabricStrategy, fabric.ParallelStrategy, **attributes),
    )
    description = "the ranks that a launcher of hvd-cluster has started"
    trainer.StrategyRegistry.register(NAME, classes.trainer, description=description, override=True)
    fabric.STRATEGY_REGISTRY.register(NAME, classes.fabric, description=description, override=True)
    return classes


def _combined(package: Package, name: str, body: type[Any], base: type[Any], **attributes: Any) -> type[Any]:
    return type(name, (body, base), {"__module__": package.home, "__doc__": body.__doc__, **attributes})
