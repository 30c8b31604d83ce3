"""A call to a listening rank, repeated as long as it makes sense."""

from __future__ import annotations

import select
from collections.abc import Callable, Mapping
from typing import Any

from collectives.control.handshake.callee import BrokenCallError, Callee, GoneError, NoListenerError
from collectives.control.handshake.dial import dial
from collectives.control.handshake.hello import LocalEnd
from collectives.retries import attempts

__all__ = ["call"]

LOOK_SECONDS = 1.0
"""How long the process at an address may be silent before :func:`call` looks for another reason to end."""


def call(end: LocalEnd, entry: Mapping[str, Any], host: int, pause: Callable[[float], object]) -> tuple[Callee, Any]:
    """Rank ``host``, which listens at ``entry`` and has admitted this rank, and its first answer.

    A listener drops silent connections where it has too many, and this rank may be slow: a connection that breaks
    before the answer is made again. ``pause`` waits some seconds, and may raise to end the call. Raises the errors of
    :meth:`Callee.greet`, GoneError, and NoListenerError if nobody listens and no connection broke.
    """
    broken: BrokenCallError | None = None
    for _ in attempts(end.attempt.remaining, pause):
        try:
            return _try(end, entry, host, pause)
        except BrokenCallError as error:
            broken = BrokenCallError(str(error), error.ranks)
        except NoListenerError as error:
            if broken is None:
                raise
            raise GoneError(str(broken), broken.ranks) from error
    assert broken is not None
    raise broken


def _try(end: LocalEnd, entry: Mapping[str, Any], host: int, pause: Callable[[float], object]) -> tuple[Callee, Any]:
    try:
        wire = dial(end, entry, host)
    except ConnectionRefusedError as error:
        raise NoListenerError(f"rank {host} does not answer at {entry['tcp']}", [host]) from error
    try:
        while not end.attempt.wait({wire.sock.fileno(): select.POLLIN}, LOOK_SECONDS) and end.attempt.remaining:
            pause(0.0)
        callee = Callee(end, host, wire)
        return callee, callee.greet(entry)
    except BaseException:
        wire.sock.close()
        raise
