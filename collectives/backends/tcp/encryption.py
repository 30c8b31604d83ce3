"""TLS for the connections of a group, with the secret of the job as its only root of trust.

The private key follows from the secret, so all members of the job, and nobody else, have the same key and the same
certificate. Each side of a connection shows it, and accepts no other. The keys of a connection are fresh (TLS 1.3), so
a secret that leaks later opens no record of the job.
"""

from __future__ import annotations

import datetime
import os
import select
import socket
import ssl

from collectives.api import CollectiveTimeoutError, PeerLostError, SettingsError
from collectives.net.attempts import ConnectAttempt
from collectives.net.frames import digest

PURPOSE = b"hvd-cluster: the key of the certificate of a job"
FROM, UNTIL = datetime.datetime(2000, 1, 1), datetime.datetime(9999, 12, 31)
"""The certificate is as valid as the secret, whatever the clocks of the hosts say."""


class Encryption:
    """Wraps connections between members that know ``secret``. Raises SettingsError without the library cryptography."""

    def __init__(self, secret: bytes) -> None:
        key, certificate = _identity(secret)
        self._contexts = {
            is_server: _context(protocol, key, certificate)
            for is_server, protocol in ((True, ssl.PROTOCOL_TLS_SERVER), (False, ssl.PROTOCOL_TLS_CLIENT))
        }

    def wrap(self, sock: socket.socket, is_server: bool, rank: int, attempt: ConnectAttempt) -> ssl.SSLSocket:
        """The encrypted connection over ``sock``, which it owns from now on, to ``rank``.

        Raises PeerLostError where the other side has no such certificate, CollectiveTimeoutError, and the error that
        ``attempt`` was aborted with.
        """
        wrapped = self._contexts[is_server].wrap_socket(sock, is_server, do_handshake_on_connect=False)
        try:
            _shake_hands(wrapped, rank, attempt)
        except BaseException:
            wrapped.close()
            raise
        return wrapped


def _shake_hands(sock: ssl.SSLSocket, rank: int, attempt: ConnectAttempt) -> None:
    while True:
        try:
            sock.do_handshake()
            return
        except ssl.SSLWantReadError:
            event = select.POLLIN
        except ssl.SSLWantWriteError:
            event = select.POLLOUT
        except OSError as error:
            raise PeerLostError(f"no encrypted connection to rank {rank}: {error}", [rank]) from error
        if not attempt.wait({sock.fileno(): event}):
            raise CollectiveTimeoutError(f"rank {rank} did not encrypt its connection in time", [rank])


def _context(protocol: ssl._SSLMethod, key: bytes, certificate: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate is that of the job, not of a host
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate.decode())
    if protocol is ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # an unread ticket would turn a close into a reset
    with open(os.memfd_create("hvd-cluster", os.MFD_CLOEXEC), "wb", buffering=0) as file:
        file.write(key + certificate)
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context


def _identity(secret: bytes) -> tuple[bytes, bytes]:
    """The private key and the certificate of the job, as PEM."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as error:
        text = "HVD_TCP_TLS needs the library cryptography; install it with: pip install 'hvd-cluster[tls]'"
        raise SettingsError(text) from error
    key = Ed25519PrivateKey.from_private_bytes(digest(secret, PURPOSE))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "hvd-cluster")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, FROM, UNTIL)
    certificate = builder.sign(key, None)  # the same bytes on all members: Ed25519 uses no random number
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private, certificate.public_bytes(serialization.Encoding.PEM)
