"""The strategy "horovod" for Lightning: ``Trainer(strategy="horovod")`` and ``Fabric(strategy="horovod")``.

An import of this module registers it, in both packages of Lightning, ``lightning`` and ``pytorch_lightning``, as far as
they are installed. The classes here are for ``lightning``; :mod:`hvd_cluster.lightning.pytorch_lightning` has those for
``pytorch_lightning``, and so has this module where ``lightning`` is not installed.
"""

from typing import Any as _Any

import hvd_cluster.torch as _torch
from hvd_cluster.lightning.packages import installed_classes as _installed_classes

__all__ = ["HorovodEnvironment", "HorovodFabricStrategy", "HorovodStrategy"]

assert _torch
_classes = _installed_classes()
_preferred = next(iter(_classes.values()))
HorovodEnvironment: type[_Any] = _preferred.environment
HorovodFabricStrategy: type[_Any] = _preferred.fabric
HorovodStrategy: type[_Any] = _preferred.trainer
