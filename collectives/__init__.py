"""The collective engine: negotiation, fusion, backends, rendezvous. Knows buffers, imports no framework.

The layers above import from this page only, not from the modules below it.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING


def facade(package: str, names: Mapping[str, str], modules: Mapping[str, str] | None = None) -> Callable[[str], object]:
    """The ``__getattr__`` of ``package``. It imports a name at its first use, so a process loads what it uses only.

    ``names`` has the names of each module, ``modules`` the module that a name stands for; both count from ``package``.
    """
    homes = {name: module for module, listed in names.items() for name in listed.split()}

    def load(name: str) -> object:
        if modules and name in modules:
            value: object = importlib.import_module(f"{package}.{modules[name]}")
        elif name in homes:
            value = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    return load
