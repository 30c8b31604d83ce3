"""How a Python worker of this host gets its call and the modules of this process."""

from __future__ import annotations

import os
import site
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

ZIP = f"python{sys.version_info.major}{sys.version_info.minor}.zip"

LaunchPython = Callable[[Sequence[str], int, tuple[int, ...]], None]


@contextmanager
def call_file(call: bytes) -> Iterator[int]:
    """A file without a name, from which any number of workers read ``call``."""
    with tempfile.TemporaryFile() as file:
        file.write(call)
        file.flush()
        yield file.fileno()


def launch_call(launch: LaunchPython, python: str, file: int, host_name: str = "") -> None:
    """Start a worker that runs the call in ``file``, on a host with the readable name ``host_name``.

    ``launch`` gets the worker's command, the pipe of its messages, and the descriptors that it must inherit.
    """
    reader, writer = os.pipe()
    try:
        launch([python, "-m", "executors.agents.local.task", str(file), str(writer), host_name], reader, (file, writer))
    finally:
        os.close(writer)


def forget_folder() -> None:
    """In a program that ``python -m`` has started: take the working directory out of the search path.

    "-m" puts it before the search path of the driver.
    """
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]


def search_path(own: str | None) -> str:
    """The module folders of this process, for PYTHONPATH, without those that every Python finds; then ``own``."""
    standard = os.path.dirname(os.__file__)
    packages = {*site.getsitepackages(), site.getusersitepackages(), os.path.join(os.path.dirname(standard), ZIP)}
    # An entry that is no file is a mark for a path hook; every Python with the hook makes it for itself.
    files = [entry for entry in sys.path if isinstance(entry, str) and os.path.exists(entry or ".")]
    entries = [os.path.abspath(entry) for entry in files]
    entries = [entry for entry in entries if entry not in packages and not f"{entry}/".startswith(f"{standard}/")]
    return os.pathsep.join(dict.fromkeys(entries + (own.split(os.pathsep) if own else [])))
