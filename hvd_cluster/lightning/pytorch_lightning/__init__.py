"""The classes for the package ``pytorch_lightning``, whose Fabric is ``lightning_fabric``."""

from typing import Any as _Any

from hvd_cluster.lightning import _classes

__all__ = ["HorovodEnvironment", "HorovodFabricStrategy", "HorovodStrategy"]

if "pytorch_lightning" not in _classes:
    raise ImportError(
        "hvd_cluster.lightning.pytorch_lightning needs the package pytorch_lightning: pip install pytorch-lightning; "
        "for the package lightning use hvd_cluster.lightning"
    )
HorovodEnvironment: type[_Any] = _classes["pytorch_lightning"].environment
HorovodFabricStrategy: type[_Any] = _classes["pytorch_lightning"].fabric
HorovodStrategy: type[_Any] = _classes["pytorch_lightning"].trainer
