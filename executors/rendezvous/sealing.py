"""Pure, but for random numbers: the secret of a job, for those who have the secret of its rendezvous."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence

from executors.api import JobSecret

__all__ = ["sealed", "unsealed"]

NONCE_BYTES = 16
PURPOSE = b"hvd-cluster secret of the job"


def sealed(secret: JobSecret, rendezvous: JobSecret) -> list[str]:
    """``secret``, of 32 bytes, under a pad that is used once and that only those with the other secret can make."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return [nonce.hex(), _padded(secret.key, rendezvous, nonce).hex()]


def unsealed(content: Sequence[str], rendezvous: JobSecret) -> JobSecret:
    """The reverse of :func:`sealed`."""
    nonce, padded = map(bytes.fromhex, content)
    return JobSecret(_padded(padded, rendezvous, nonce))


def _padded(content: bytes, rendezvous: JobSecret, nonce: bytes) -> bytes:
    pad = hmac.digest(rendezvous.key, PURPOSE + nonce, "sha256")
    return bytes(a ^ b for a, b in zip(content, pad, strict=True))
