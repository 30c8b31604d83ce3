"""The packages beside this one in a checkout, in case a module of the user has the same name.

An installed wheel has them inside of this one, where they hide nothing and nothing hides them.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

NEIGHBOURS = ("collectives", "executors")
ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


def require_neighbours() -> None:
    """Raise ImportError if ``import collectives`` or ``import executors`` would find a module of the user."""
    for name in NEIGHBOURS if os.path.isdir(os.path.join(ROOT, "collectives", "engine")) else ():
        spec = find_spec(name)
        origin = os.path.realpath(spec.origin) if spec is not None and spec.origin is not None else None
        if origin is not None and os.path.dirname(origin) != os.path.join(ROOT, name):
            kind = "folder" if os.path.basename(origin) == "__init__.py" else "file"
            raise ImportError(
                f"{origin} hides the package {name!r} of hvd-cluster, which is in {ROOT}: Python looks there first. "
                f"Rename that {kind}, or move it away from the folder of the script and from PYTHONPATH"
            )
