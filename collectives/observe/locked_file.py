"""A file that one job writes at a time."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress


class LockedFile:
    """The file at ``path``, which is made if it does not exist, and its lock, until :meth:`close`.

    Raises BlockingIOError if another job has it, OSError or ValueError if it cannot be opened for writing, as a pipe
    that nobody reads. ``appends``: each write goes to its end. A file system without locks keeps nobody away.
    """

    def __init__(self, path: str, appends: bool = False) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_APPEND if appends else 0)
        self.descriptor = os.open(path, flags, 0o666)
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.disown()
            raise
        except OSError:
            pass

    def close(self) -> None:
        """Release the file. Idempotent."""
        if self.descriptor >= 0:
            with suppress(OSError):
                fcntl.flock(self.descriptor, fcntl.LOCK_UN)  # children that were forked share the lock
            self.disown()

    def disown(self) -> None:
        """In a forked child: close this copy of the descriptor; the lock stays with the parent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
