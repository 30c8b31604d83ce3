"""Strangers at every port of a job: each connection sends a mutated session of another job, and ends in some way."""

import os
import random
import socket
import struct
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from pathlib import Path

import psutil

from tests.fuzz.mutations import mutated

MARK = "HVD_FUZZ_JOB"
LISTENING = "0A"
UNIX_LISTENING = "00010000"
LOOK_SECONDS = 0.2
PATIENCE_SECONDS = 0.05
MOST_OPEN = 40
RESET = struct.pack("ii", 1, 0)


def processes(job):
    """Those whose environment has the mark of ``job``."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == job:
                found.append(process)
    return found


def _listening():
    """The inodes of all listening sockets -> their addresses."""
    found = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == LISTENING:
            host, port = fields[1].split(":")
            found[fields[9]] = socket.inet_ntoa(struct.pack("<I", int(host, 16))), int(port, 16)
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == UNIX_LISTENING and len(fields) > 7 and fields[7].startswith("@"):
            found[fields[6]] = "\0" + fields[7][1:]
    return found


def doors(job):
    """The addresses at which processes of ``job`` listen."""
    listening, found = _listening(), set()
    for process in processes(job):
        folder = f"/proc/{process.pid}/fd"
        with suppress(OSError):  # it has ended, or has closed one
            links = [os.readlink(f"{folder}/{name}") for name in os.listdir(folder)]
            found.update(listening.get(link[8:-1]) for link in links if link.startswith("socket:["))
    return sorted(found - {None}, key=str)


class Attack(threading.Thread):
    """Connects from its start until :meth:`stop`. ``replies`` counts the first words of answers by kind of address."""

    def __init__(self, job, sessions, seed, rate):
        super().__init__(name="attack", daemon=True)
        self._job, self._sessions, self._rng, self._rate = job, sessions, random.Random(seed), rate
        self._stopped = threading.Event()
        self._open = deque()
        self._doors, self._looked = [], 0.0
        self.inputs, self.sent = 0, 0
        self.doors, self.replies = set(), Counter()

    def stop(self):
        """End, within a second."""
        self._stopped.set()
        self.join()
        while self._open:
            self._open.popleft().close()

    def run(self):
        begin = time.monotonic()
        while not self._stopped.is_set():
            self._look()
            ahead = self.inputs / self._rate - (time.monotonic() - begin)
            if not self._doors or ahead > 0:
                self._stopped.wait(max(0.01, min(ahead, 0.1)))
            else:
                self._try(self._rng.choice(self._doors))

    def _look(self):
        if time.monotonic() > self._looked + LOOK_SECONDS:
            self._doors = doors(self._job)
            self.doors.update(self._doors)
            self._looked = time.monotonic()

    def _try(self, address):
        self.inputs += 1
        sock = socket.socket(socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX)
        sock.settimeout(PATIENCE_SECONDS)
        with suppress(OSError):
            sock.connect(address)
            self._say(sock)
            self._end(sock, address)
            return
        sock.close()

    def _say(self, sock):
        data = mutated(self._rng, self._sessions)
        parts = self._rng.choice([1, 1, 2, 4])
        size = max(1, len(data) // parts)
        for first in range(0, len(data), size):
            sock.sendall(data[first : first + size])
        self.sent += len(data)

    def _end(self, sock, address):
        """Hear the answer, hang up at once or with a reset, or stay silent for a while."""
        way = self._rng.choice(["hear", "hear", "close", "reset", "half", "stay"])
        if way == "stay":
            self._open.append(sock)
            if len(self._open) > MOST_OPEN:
                self._open.popleft().close()
            return
        if way == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        if way == "half":
            sock.shutdown(socket.SHUT_WR)
        if way in ("hear", "half"):
            with suppress(TimeoutError):
                self.replies[_kind(address), _first(sock.recv(4096))] += 1
        sock.close()


def _kind(address):
    return "unix" if isinstance(address, str) else address[1]


def _first(answer):
    """The status of HTTP, or the length of the answer."""
    return answer[9:12].decode(errors="replace") if answer.startswith(b"HTTP/") else str(len(answer))
