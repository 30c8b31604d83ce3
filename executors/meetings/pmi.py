"""PMI-1, the protocol of Hydra, the launcher of MPICH and Intel MPI: lines over a socket that the process inherits.

Source: the wire protocol of MPICH's simple PMI (src/pmi/src/pmi_v1.c).
"""

from __future__ import annotations

import os
import select
import socket
import sys
from contextlib import suppress

from collectives.api import PeerLostError, SettingsError

__all__ = ["Pmi"]

KEY = "hvd-cluster"
VARIABLE = "PMI_FD"
# A rank that has not started yet holds up the others: mpirun starts all of them at once, or ends the job.
SECONDS = 300.0
LONGEST_LINE = 4096


class Pmi:
    """The connection of this process to its proxy, on ``descriptor``, which MPI may use later."""

    def __init__(self, descriptor: int) -> None:
        # Owner: this object. It stays blocking, because MPI shares it.
        self._socket = socket.socket(fileno=os.dup(descriptor))
        self._ask("init pmi_version=1 pmi_subversion=1", "response_to_init")
        self._space = self._ask("get_my_kvsname", "my_kvsname")["kvsname"]

    @classmethod
    def open(cls) -> Pmi | None:
        """The connection of this process; None if it has none."""
        text = os.environ.get(VARIABLE, "")
        return cls(int(text)) if text.isascii() and text.isdigit() else None

    def broadcast(self, value: bytes | None) -> bytes:
        """See :class:`.Channel`. ``value`` has no spaces and no line ends once it is in hex digits."""
        if value is not None:
            for index, part in enumerate(_parts(value)):
                self._ask(f"put kvsname={self._space} key={KEY}-{index} value={part}", "put_result")
            self._ask(f"put kvsname={self._space} key={KEY} value={len(_parts(value))}", "put_result")
        self._ask("barrier_in", "barrier_out")
        count = int(self._get(KEY))
        return bytes.fromhex("".join(self._get(f"{KEY}-{index}") for index in range(count)))

    def close(self) -> None:
        """Tell the proxy that this process ends as it should, unless MPI does."""
        if "mpi4py.MPI" not in sys.modules:
            with suppress(OSError, SettingsError, PeerLostError):  # mpirun has ended
                self._ask("finalize", "finalize_ack")
        self._socket.close()

    def _get(self, key: str) -> str:
        return self._ask(f"get kvsname={self._space} key={key}", "get_result")["value"]

    def _ask(self, request: str, answer: str) -> dict[str, str]:
        self._socket.sendall(f"cmd={request}\n".encode())
        line = self._read_line()
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if fields.get("cmd") != answer or fields.get("rc", "0") != "0":
            raise SettingsError(f"mpirun answered {line!r} to {request.partition(' ')[0]!r} of PMI; use mpi4py")
        return fields

    def _read_line(self) -> str:
        line = b""
        while not line.endswith(b"\n"):
            # Bound: SECONDS; abort: mpirun ends the connection when a rank ends.
            ready, _, _ = select.select([self._socket], [], [], SECONDS)
            data = self._socket.recv(1) if ready else b""
            if not data or len(line) > LONGEST_LINE:
                raise PeerLostError("mpirun has ended, or does not speak PMI-1, while the ranks looked for one another")
            line += data
        return line.decode(errors="replace").strip()


def _parts(value: bytes) -> list[str]:
    digits = value.hex()
    return [digits[begin : begin + 500] for begin in range(0, len(digits), 500)]
