"""PMI-1, the protocol of Hydra, the launcher of MPICH and Intel MPI: lines over a socket that the process inherits.

Source: the wire protocol of MPICH's simple PMI (src/pmi/src/pmi_v1.c).
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from contextlib import suppress

from collectives import CollectiveTimeoutError, HorovodInternalError, PeerLostError, SettingsError

KEY = "hvd-cluster"
VARIABLE = "PMI_FD"
# The proxy of this host answers by itself, but for the barrier.
SECONDS = 30.0
FINALIZE_SECONDS = 30.0
LONGEST_LINE = 4096


class Pmi:
    """The connection of this process to its proxy, on ``descriptor``, which MPI may use later.

    The constructor and :meth:`broadcast` raise SettingsError for an answer that cannot be used, PeerLostError if the
    launcher has ended; both name the call.
    """

    def __init__(self, descriptor: int) -> None:
        try:
            # Owner: this object. It stays blocking, because MPI shares it.
            self._socket = socket.socket(fileno=os.dup(descriptor))
        except OSError as error:
            raise SettingsError(f"{VARIABLE} is {descriptor}, which is not a connection to mpirun ({error})") from error
        self._deadline = time.monotonic() + SECONDS
        try:
            self._ask("init pmi_version=1 pmi_subversion=1", "response_to_init")
            self._space = self._value("get_my_kvsname", "my_kvsname", "kvsname")
        except BaseException:
            self._socket.close()
            raise

    @classmethod
    def open(cls) -> Pmi | None:
        """The connection of this process; None if it has none."""
        text = os.environ.get(VARIABLE, "")
        return cls(int(text)) if text.isascii() and text.isdigit() else None

    def broadcast(self, value: bytes | None, seconds: float) -> bytes:
        """``value`` has no spaces and no line ends once it is in hex digits."""
        self._deadline = time.monotonic() + seconds
        if value is not None:
            for index, part in enumerate(_parts(value)):
                self._put(f"{KEY}-{index}", part)
            self._put(KEY, str(len(_parts(value))))
        self._ask("barrier_in", "barrier_out")
        count = self._get(KEY)
        try:
            return bytes.fromhex("".join(self._get(f"{KEY}-{index}") for index in range(int(count))))
        except ValueError as error:
            raise SettingsError(f"the value that PMI's get returned is not that of rank 0 ({error})") from error

    def close(self) -> None:
        """Tell the proxy that this process ends as it should, unless MPI does."""
        self._deadline = time.monotonic() + FINALIZE_SECONDS
        if "mpi4py.MPI" not in sys.modules:
            with suppress(OSError, SettingsError, HorovodInternalError):  # mpirun has ended
                self._ask("finalize", "finalize_ack")
        self._socket.close()

    def _put(self, key: str, value: str) -> None:
        self._ask(f"put kvsname={self._space} key={key} value={value}", "put_result")

    def _get(self, key: str) -> str:
        return self._value(f"get kvsname={self._space} key={key}", "get_result", "value")

    def _value(self, request: str, answer: str, field: str) -> str:
        fields = self._ask(request, answer)
        if field not in fields:
            raise _refused(request, f"an answer without {field}")
        return fields[field]

    def _ask(self, request: str, answer: str) -> dict[str, str]:
        line = self._exchange(request)
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if fields.get("cmd") != answer or fields.get("rc", "0") != "0":
            raise _refused(request, repr(line))
        return fields

    def _exchange(self, request: str) -> str:
        try:
            self._socket.sendall(f"cmd={request}\n".encode())
            return self._read_line()
        except TimeoutError as error:
            raise CollectiveTimeoutError(
                f"{_call(request)!r} of PMI was not answered in time: ranks have not started, or do not call "
                "hvd.init(); look at their logs, or raise HOROVOD_START_TIMEOUT"
            ) from error
        except (OSError, EOFError) as error:
            text = f"mpirun has ended, or does not speak PMI-1: {_call(request)!r} of PMI got no answer ({error})"
            raise PeerLostError(text) from error

    def _read_line(self) -> str:
        line = b""
        while not line.endswith(b"\n"):
            # Bound: the deadline; abort: mpirun ends the connection when a rank ends.
            if not select.select([self._socket], [], [], max(0.0, self._deadline - time.monotonic()))[0]:
                raise TimeoutError
            data = self._socket.recv(1)
            if not data:
                raise EOFError("the connection was closed")
            if len(line) > LONGEST_LINE:
                raise EOFError(f"a line of more than {LONGEST_LINE} bytes")
            line += data
        return line.decode(errors="replace").strip()


def _call(request: str) -> str:
    return request.partition(" ")[0]


def _refused(request: str, what: str) -> SettingsError:
    return SettingsError(f"mpirun answered {what} to {_call(request)!r} of PMI; use mpi4py")


def _parts(value: bytes) -> list[str]:
    digits = value.hex()
    return [digits[begin : begin + 500] for begin in range(0, len(digits), 500)]
