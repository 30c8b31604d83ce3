"""A worker that runs one function: ``python -m executors.agents.local.task CALL RESULT NAME``.

``CALL`` and ``RESULT`` are inherited file descriptors: a file with the pickled call, shared with other workers, and a
pipe that takes an empty message once the worker is up, and then the pickled outcome. ``NAME`` is the readable name of
the host, empty if HOROVOD_HOSTNAME is that name.
"""

from __future__ import annotations

import os
import pickle
import sys

import cloudpickle

from executors.agents.local.python import forget_folder
from executors.driver.outcome import observe
from executors.job.connection import Frames

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
    for part in (Frames.header(message), message):
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(fd, rest) :]


if __name__ == "__main__":
    forget_folder()
    sys.exit(main())
