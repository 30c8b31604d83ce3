"""Rank 0 writes its address and a random secret into a file of a folder that all hosts share."""

from __future__ import annotations

import hashlib
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from collectives import CollectiveTimeoutError, SettingsError, attempts
from executors.launchers.known_ports import RendezvousOffer, drafted, find, serve
from executors.launchers.place import Found, Led

FOLDER = "HOROVOD_RENDEZVOUS_FOLDER"


@dataclass(frozen=True, slots=True)
class SharedFolder:
    """``folder`` is of this job alone, or of jobs with different names. Only this user can read the file."""

    folder: Path

    def lead(self, job: str, seconds: float) -> Led:
        """The file goes with the rendezvous."""
        server, offer = serve(job)
        path, content = self._path(job), offer.pack()
        try:
            _write(path, content)
        except OSError as error:
            server.stop()
            raise SettingsError(
                f"{FOLDER} is {str(self.folder)!r}, where rank 0 cannot write ({error}); name a folder that all hosts "
                "share and this user can write to"
            ) from error
        return Led(server, offer.secret, end=lambda: _remove(path, content))

    def follow(self, job: str, seconds: float) -> Found:
        """An earlier rank 0 may have left a file, so it is read again until it is true."""
        for _ in attempts(seconds):
            with suppress(OSError, SettingsError, CollectiveTimeoutError):
                offer = RendezvousOffer.unpack(_read(self._path(job)))
                return find(offer.addresses, [offer.port], offer.secret, job, 0.0)
        raise CollectiveTimeoutError(
            f"rank 0 was not found within {seconds:g} s by its file {self._path(job)}. Look at the log of rank 0; "
            f"{FOLDER} must name one folder on all hosts"
        )

    def _path(self, job: str) -> Path:
        return self.folder / f"hvd-cluster-{hashlib.sha256(job.encode()).hexdigest()[:16]}.json"


def _read(path: Path) -> bytes:
    """Raises OSError for a file of another user, who would lead this job, and for one that others can write to."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise PermissionError(f"{path} belongs to another user, or others have access to it")
        return file.read()


def _write(path: Path, content: bytes) -> None:
    """At once for its readers."""
    with drafted(path, content) as draft:
        os.replace(draft, path)


def _remove(path: Path, content: bytes) -> None:
    """Leave the file of a later rank 0 alone."""
    with suppress(OSError):
        if path.read_bytes() == content:
            path.unlink()
