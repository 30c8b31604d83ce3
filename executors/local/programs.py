"""Whether a program can be executed on this host."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

from executors.api import CommandNotFoundError

__all__ = ["check_command"]


def check_command(program: str, environment: Mapping[str, str], host: str = "") -> None:
    """Raise CommandNotFoundError if workers, with ``environment`` added to that of this process, cannot execute
    ``program``. ``host`` is the readable name of this host, if it is not the driver's.
    """
    if shutil.which(program, path={**os.environ, **environment}.get("PATH")) is None:
        where = f" on {host}" if host else ""
        problem = f"there is no command {program!r} that can be executed{where}"
        if program.endswith(".py"):
            raise CommandNotFoundError(f"{problem}; say python {program}")
        raise CommandNotFoundError(f"{problem}; correct its name or PATH")
