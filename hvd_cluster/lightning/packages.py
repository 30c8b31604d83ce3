"""The classes of the strategy for each package of Lightning that is installed."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from hvd_cluster.lightning.environment import RankEnvironment, tolerate_broken_mpi
from hvd_cluster.lightning.fabric_strategy import FabricStrategy
from hvd_cluster.lightning.trainer_strategy import FirstCallback, TrainerStrategy

NAME = "horovod"


@dataclass(frozen=True)
class Package:
    """A package of Lightning: its own name, and its modules of Trainer and Fabric. ``home`` has its classes of ours."""

    name: str
    trainer: str
    fabric: str
    home: str

    @property
    def is_installed(self) -> bool:
        """Whether it can be imported."""
        return find_spec(self.name) is not None


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
