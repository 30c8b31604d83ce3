"""PMIx, the interface of Open MPI 5, SLURM and others to their launchers, by the library libpmix.

Source: the PMIx standard 4.1, chapters 3 (structures), 5 (initialization), 6 and 7 (put, commit, fence, get).
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # on Python 3.10 this is not the builtin one
from functools import partial
from pathlib import Path

from collectives import CollectiveTimeoutError, SettingsError

KEY = b"hvd-cluster"
NAMESPACE_BYTES = 256
KEY_BYTES = 512
GLOBAL_SCOPE = 3
STRING = 3
FLAG = 1
SUCCESS = 0
COLLECT_DATA = b"pmix.collect"
ADVICE = "let mpirun set MASTER_ADDR for all ranks, to the address of the host of rank 0"


class _Process(ctypes.Structure):
    _fields_ = (("namespace", ctypes.c_char * NAMESPACE_BYTES), ("rank", ctypes.c_uint32))


class _Data(ctypes.Union):
    # The union of the standard has other members of up to 16 bytes.
    _fields_ = (("string", ctypes.c_char_p), ("flag", ctypes.c_bool), ("space", ctypes.c_uint64 * 4))


class _Value(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint16), ("data", _Data))


class _Info(ctypes.Structure):
    _fields_ = (("key", ctypes.c_char * KEY_BYTES), ("flags", ctypes.c_uint32), ("value", _Value))


class Pmix:
    """The connection of this process to the PMIx server of its host.

    The constructor and :meth:`broadcast` raise SettingsError for a call that fails, with its name and its code.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._own = _Process()
        self._hangs = False
        self._check("PMIx_Init", library.PMIx_Init(ctypes.byref(self._own), None, ctypes.c_size_t(0)))

    @classmethod
    def open(cls) -> Pmix | None:
        """The connection of this process; None if its launcher has no PMIx, or there is no libpmix."""
        if not os.environ.get("PMIX_NAMESPACE"):
            return None
        for path in _libraries():
            try:
                return cls(ctypes.CDLL(path))
            except (OSError, AttributeError):  # no such file, or another library
                continue
        return None

    def broadcast(self, value: bytes | None, seconds: float) -> bytes:
        outcome: Future[bytes] = Future()
        # Owner: this call; bound: ``seconds``, then the thread is left to the end of the process; abort: none in PMIx.
        threading.Thread(
            target=_resolve, args=(outcome, partial(self._share, value)), name="hvd-pmix", daemon=True
        ).start()
        try:
            return outcome.result(seconds)
        except FutureTimeoutError as error:
            self._hangs = True
            raise CollectiveTimeoutError(
                f"PMIx_Fence did not end within {seconds:g} s: ranks have not started, or do not call hvd.init(); "
                "look at their logs, or raise HOROVOD_START_TIMEOUT"
            ) from error

    def _share(self, value: bytes | None) -> bytes:
        if value is not None:
            content = _Value(STRING, _Data(string=value.hex().encode()))
            put = self._library.PMIx_Put(ctypes.c_uint8(GLOBAL_SCOPE), KEY, ctypes.byref(content))
            self._check("PMIx_Put", put)
        self._check("PMIx_Commit", self._library.PMIx_Commit())
        collect = _Info(COLLECT_DATA, 0, _Value(FLAG, _Data(flag=True)))
        fence = self._library.PMIx_Fence(None, ctypes.c_size_t(0), ctypes.byref(collect), ctypes.c_size_t(1))
        self._check("PMIx_Fence", fence)
        return self._get()

    def _get(self) -> bytes:
        first, found = _Process(self._own.namespace, 0), ctypes.POINTER(_Value)()
        got = self._library.PMIx_Get(ctypes.byref(first), KEY, None, ctypes.c_size_t(0), ctypes.byref(found))
        self._check("PMIx_Get", got)
        if not found or found.contents.type != STRING:
            raise SettingsError(f"PMIx_Get succeeded without the text of rank 0; {ADVICE}")
        # The library owns the value; a few hundred bytes are left to it.
        text = found.contents.data.string or b""
        try:
            return bytes.fromhex(text.decode("ascii"))
        except ValueError as error:
            raise SettingsError(
                f"the value that PMIx_Get returned is not that of rank 0 ({error}); {ADVICE}"
            ) from error

    def close(self) -> None:
        """Tell the launcher that this process ends as it should. MPI counts for itself how often it was started."""
        if not self._hangs:
            self._library.PMIx_Finalize(None, ctypes.c_size_t(0))

    def _check(self, call: str, code: int) -> None:
        if code != SUCCESS:
            raise SettingsError(f"{call} failed with code {code}, so the ranks cannot find one another; {ADVICE}")


def _resolve(outcome: Future[bytes], work: Callable[[], bytes]) -> None:
    try:
        outcome.set_result(work())
    except Exception as error:  # noqa: BLE001  the caller raises it
        outcome.set_exception(error)


def _libraries() -> Iterator[str]:
    """Where libpmix may be: beside mpirun first, because client and server should be of one version."""
    program = shutil.which("mpirun") or shutil.which("prterun")
    for root in filter(None, (os.environ.get("OPAL_PREFIX"), program and str(Path(program).resolve().parents[1]))):
        for folder in ("lib", "lib64"):
            yield from map(str, sorted(Path(root, folder).glob("**/libpmix.so.2")))
    yield ctypes.util.find_library("pmix") or "libpmix.so.2"
