"""Frames to several new connections at once."""

from __future__ import annotations

import socket
import threading

import pytest

from collectives.api import PeerLostError
from collectives.net.attempts import ConnectAttempt
from collectives.net.wire import Wire, send_together

PATIENCE = 20.0
CONTENT = bytes(range(256)) * (1 << 14)
"""More than the kernel keeps."""


def pairs(attempt: ConnectAttempt, count: int) -> tuple[dict[int, Wire], list[Wire]]:
    found = [socket.socketpair() for _ in range(count)]
    for near, _ in found:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    return {key: Wire(near, attempt) for key, (near, _) in enumerate(found)}, [Wire(far, attempt) for _, far in found]


def prefix(key: int) -> bytes:
    return b"for %d: " % key


def read_slowly(wires: list[Wire], frames: dict[int, bytes], began: threading.Event) -> None:
    """The last one first: each waits for those after it."""
    began.wait(PATIENCE)
    for key in reversed(range(len(wires))):
        frames[key] = wires[key].receive()


def test_all_get_their_frames_in_any_order():
    with ConnectAttempt(PATIENCE) as attempt:
        wires, others = pairs(attempt, 3)
        frames, began = {}, threading.Event()
        reader = threading.Thread(target=read_slowly, args=(others, frames, began))
        reader.start()
        began.set()
        assert send_together(wires, attempt, CONTENT, prefix) == []
        reader.join(PATIENCE)
        assert frames == {key: prefix(key) + CONTENT for key in wires}
        for wire in (*wires.values(), *others):
            wire.sock.close()


def test_one_that_does_not_read_is_named_and_one_that_is_gone_is_not():
    with ConnectAttempt(0.5) as attempt:
        wires, others = pairs(attempt, 3)
        others[0].sock.close()
        frames: dict[int, bytes] = {}
        reader = threading.Thread(target=lambda: frames.update({2: others[2].receive()}))
        reader.start()
        assert send_together(wires, attempt, CONTENT, prefix) == [1]
        reader.join(PATIENCE)
        assert frames == {2: prefix(2) + CONTENT}
        for wire in (*wires.values(), *others[1:]):
            wire.sock.close()


def test_an_abort_ends_it():
    with ConnectAttempt(PATIENCE) as attempt:
        wires, others = pairs(attempt, 1)
        error = PeerLostError("told to stop")
        threading.Thread(target=lambda: (others[0].read(), attempt.abort(error))).start()
        with pytest.raises(PeerLostError) as caught:
            send_together(wires, attempt, CONTENT, prefix)
        assert caught.value is error
        for wire in (*wires.values(), *others):
            wire.sock.close()
