"""The secret that a launcher shares with its workers."""

from __future__ import annotations

from collectives import ENVIRONMENT_SECRET as HOROVOD_SECRET_KEY
from executors import JobSecret

__all__ = ["HOROVOD_SECRET_KEY", "make_secret_key"]


def make_secret_key() -> bytes:
    """A new secret of 32 random bytes."""
    return JobSecret().key
