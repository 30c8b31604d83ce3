"""The alias: scripts that say ``import horovod.torch as hvd`` run unchanged, because horovod means hvd_cluster.

There are three ways to request it::

    hvdrun --horovod-alias -np 2 python train.py
    python -m hvd_cluster.horovod train.py
    hvd_cluster.horovod.install()  # in Python, before anything imports horovod

Each reaches the processes that are started from then on, and the workers of a RayExecutor.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib.machinery import PathFinder

from hvd_cluster import __version__
from hvd_cluster.horovod.finder import HorovodFinder

__all__ = ["install", "is_requested", "search_path"]

# On PYTHONPATH, the file sitecustomize.py in it runs at the start of every Python.
STARTUP = os.path.join(os.path.dirname(os.path.realpath(__file__)), "startup")

logger = logging.getLogger(__name__)


def install() -> None:
    """Let ``import horovod`` mean hvd_cluster, in this process and in those it starts. A second call changes nothing.

    Raises ImportError if a Horovod has been imported already. An installed Horovod is hidden, which is logged.
    """
    if not any(isinstance(finder, HorovodFinder) for finder in sys.meta_path):
        _require_unused()
        _tell_what_is_hidden()
        sys.meta_path.insert(0, HorovodFinder())
    os.environ["PYTHONPATH"] = search_path(os.environ.get("PYTHONPATH"))


def is_requested() -> bool:
    """Whether ``import horovod`` means hvd_cluster in the processes that this one starts."""
    return STARTUP in os.environ.get("PYTHONPATH", "").split(os.pathsep)


def search_path(own: str | None) -> str:
    """The PYTHONPATH of processes with the alias; ``own`` is their PYTHONPATH without it."""
    entries = own.split(os.pathsep) if own else []
    return os.pathsep.join([STARTUP, *(entry for entry in entries if entry != STARTUP)])


def _require_unused() -> None:
    module = sys.modules.get("horovod")
    if module is not None:
        raise ImportError(
            f"the Horovod in {getattr(module, '__file__', None)} has been imported already; call "
            "hvd_cluster.horovod.install() before anything imports horovod"
        )


def _tell_what_is_hidden() -> None:
    spec = PathFinder.find_spec("horovod")
    if spec is not None and spec.origin is not None:
        logger.warning("import horovod gives hvd-cluster %s here, not the Horovod in %s", __version__, spec.origin)
