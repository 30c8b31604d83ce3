"""A worker that runs one function: how it gets its call and the modules of the driver, and its program.

``CALL`` and ``RESULT`` are inherited file descriptors: a file with the pickled call, shared with other workers, and a
pipe that takes an empty message once the worker is up, and then the pickled outcome. ``NAME`` is the readable name of
the host, empty if HOROVOD_HOSTNAME is that name.
"""

from __future__ import annotations

import os
import pickle
import site
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import cloudpickle

from collectives import frames
from executors.driver.outcome import observe

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


LARGEST_READ = 1 << 30


def main() -> int:
    """Run the call; the exit status shows whether it failed. Raises OSError if the driver has ended."""
    call, result = (int(argument) for argument in sys.argv[1:3])
    for fd in (call, result):
        os.set_inheritable(fd, False)
    _send(result, b"")
    rank, host = int(os.environ["HOROVOD_RANK"]), os.environ["HOROVOD_HOSTNAME"]
    outcome = observe(lambda: _call(call), rank, host, sys.argv[3])
    _send(result, cloudpickle.dumps(outcome))
    return int(outcome.failed)


def _call(fd: int) -> object:
    call = pickle.loads(_read(fd))
    return call()


def _read(fd: int) -> bytes:
    # The offset of the file is shared with the other workers, so it is neither used nor moved.
    size, data = os.fstat(fd).st_size, bytearray()
    while len(data) < size and (piece := os.pread(fd, min(size - len(data), LARGEST_READ), len(data))):
        data += piece
    os.close(fd)
    return bytes(data)


def _send(fd: int, message: bytes) -> None:
    for part in (frames.LENGTH.pack(len(message)), message):
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(fd, rest) :]


if __name__ == "__main__":
    forget_folder()
    sys.exit(main())
