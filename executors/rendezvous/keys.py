"""The keys that the secret of a job is made of, where no launcher of ours hands one over."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from collectives.api import SettingsError

__all__ = ["SECRET", "chosen_key", "user_key"]

SECRET = "HOROVOD_SECRET_KEY"
KEY_BYTES = 32
FILE = Path(".config", "hvd-cluster", "key")


def chosen_key() -> bytes:
    """The text of HOROVOD_SECRET_KEY; empty where the user has not set it."""
    return os.environ.get(SECRET, "").strip().encode()


def user_key(folder: Path | None = None) -> bytes:
    """The key of this user, from a file in the home directory, which the first job makes.

    Raises SettingsError where there is no such file and none can be made, or where others may read it.
    """
    path = (folder or Path.home()) / FILE
    try:
        with suppress(FileExistsError):
            _make(path)
        mode, key = path.stat(), path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{path} cannot be made or read ({error}); {_instead()}") from error
    if mode.st_uid != os.geteuid() or stat.S_IMODE(mode.st_mode) & 0o077:
        raise SettingsError(f"{path} belongs to another user, or others may read it; chmod 600 it, or {_instead()}")
    if len(key) < KEY_BYTES:
        raise SettingsError(f"{path} has {len(key)} bytes, but must have {KEY_BYTES}; remove it, or {_instead()}")
    return key


def _instead() -> str:
    return f"set {SECRET} to the same secret text for all ranks"


def _make(path: Path) -> None:
    """Ranks of all hosts may do this at once: the first whole file stays."""
    if path.exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        os.link(draft, path)
    finally:
        draft.unlink()
