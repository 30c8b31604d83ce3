"""How this package imports others: those beside it in a checkout, and the framework of a binding."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

NEIGHBOURS = ("collectives", "executors")
ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


def require_neighbours() -> None:
    """Raise ImportError if ``import collectives`` or ``import executors`` would find a module of the user.

    An installed wheel has them inside of this package, where they hide nothing and nothing hides them.
    """
    for name in NEIGHBOURS if os.path.isdir(os.path.join(ROOT, "collectives", "engine")) else ():
        spec = find_spec(name)
        origin = os.path.realpath(spec.origin) if spec is not None and spec.origin is not None else None
        if origin is not None and os.path.dirname(origin) != os.path.join(ROOT, name):
            kind = "folder" if os.path.basename(origin) == "__init__.py" else "file"
            raise ImportError(
                f"{origin} hides the package {name!r} of hvd-cluster, which is in {ROOT}: Python looks there first. "
                f"Rename that {kind}, or move it away from the folder of the script and from PYTHONPATH"
            )


@contextmanager
def binding_of(framework: str, need: str, extra: str) -> Iterator[None]:
    """For the imports of a binding. Raises ImportError, with ``need`` and the remedy, where ``framework`` is missing.

    Python collects no garbage meanwhile. Modules are no garbage, and there are so many objects after the import of a
    framework that one collection takes as long as all modules of a binding.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != framework:
            raise
        raise ImportError(f'{need}: pip install "hvd-cluster[{extra}]"') from error
    finally:
        if was_enabled:
            gc.enable()
