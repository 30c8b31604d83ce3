"""The environment variables of a worker: those that depend on its host, those of threads, those that it inherits.

Without a limit, the numerical libraries start one thread per core in every rank. On two ranks each core then has two
threads, which slows a training step down several times. Ray and Spark limit their workers by the same variable.

A shell refuses to set some names, such as UID in bash, changes the meaning of others, and cannot set any that is no
identifier, such as that of an exported function. So the shell that starts an agent sets only names that mean nothing
to it, and the agent unpacks the others. They take the way of the secret, which may be encrypted.
"""

from __future__ import annotations

import base64
import logging
import os
import re
import time
import zlib
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

logger = logging.getLogger(__name__)


def gpu_variables(gpus: Sequence[Sequence[str]]) -> dict[str, str]:
    """The GPUs that every worker of a host sees, given the GPU ids of each worker in the order of local ranks.

    Each sees the GPUs of all, in one order, because NCCL needs that to copy between them directly. The first GPU of
    local rank ``i`` is device ``i``.
    """
    order = [gpu for layer in zip_longest(*gpus) for gpu in layer if gpu is not None]
    return {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(order))} if order else {}


def interface_variables(nics: Sequence[str]) -> dict[str, str]:
    """The network interfaces for Gloo, which takes one, and for NCCL."""
    return {"HOROVOD_GLOO_IFACE": nics[0], "NCCL_SOCKET_IFNAME": ",".join(nics)} if nics else {}


THREADS = "OMP_NUM_THREADS"
VARIABLES = ("MKL_NUM_THREADS", THREADS)
"""Each limits the threads of torch; the first wins."""

CHOICES = (*VARIABLES, "OPENBLAS_NUM_THREADS")
"""With one of these the user has chosen the threads. The last one limits NumPy, but not torch."""


def share(cores: int, ranks: int) -> int:
    """The threads of each of ``ranks`` ranks on a host where they may use ``cores`` cores; at least 1."""
    return max(1, cores // ranks)


def threads_of(environment: Mapping[str, str], cores: int) -> int:
    """The threads that a rank with ``environment`` computes with; ``cores`` where no variable limits them."""
    # A value such as 4,2 is for nested parallel regions: the first number is that of the outermost.
    texts = (environment.get(name, "").partition(",")[0].strip() for name in VARIABLES)
    return next((int(text) for text in texts if text.isascii() and text.isdigit() and int(text)), cores)


def thread_variables(environment: Mapping[str, str], cores: int, ranks: int) -> dict[str, str]:
    """The variables that a launcher adds to ``environment`` for each of ``ranks`` ranks of one host.

    None for a single rank, which may use all cores, and none if the user has set one of CHOICES.
    """
    is_chosen = any(environment.get(name, "").strip() for name in CHOICES)
    return {} if ranks == 1 or is_chosen else {THREADS: str(share(cores, ranks))}


def shared_threads(environment: Mapping[str, str], cores: int, ranks: int) -> dict[str, str]:
    """The result of :func:`thread_variables`; the log shows the share.

    A number that the user has set may be too large. The first rank of a host says so, because it knows the framework's.
    """
    variables = thread_variables(environment, cores, ranks)
    if variables:
        text = "%s=%s for each of the %d ranks, its share of %d cores; set the variable to choose another number"
        logger.info(text, THREADS, variables[THREADS], ranks, cores)
    return variables


def thread_remark(threads: int, cores: int, ranks: int) -> str:
    """The sentence that advises to set fewer threads, or "" where those of the ranks fit the cores.

    ``threads`` are those of each of ``ranks`` ranks, which share ``cores`` cores.
    """
    if threads <= share(cores, ranks):
        return ""
    return (
        f"{ranks} ranks with up to {threads} threads each share {cores} cores, which slows all of them down; set "
        f"{THREADS}={share(cores, ranks)} in the environment of the ranks"
    )


COURSE = "HVD_JOB_COURSE"
"""The variable that has it."""


@dataclass(frozen=True, slots=True)
class Course:
    """When a worker had its place, and when the job was requested; None for a worker that came later.

    In seconds since the epoch, by the clock of the launcher. None in ``placed``: it has its place now.
    """

    requested: float | None = None
    placed: float | None = None

    def variable(self) -> dict[str, str]:
        """The variable of a worker."""
        times = (self.requested, time.time() if self.placed is None else self.placed)
        return {COURSE: " ".join([f"{seconds:.6f}" for seconds in times if seconds is not None])}

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Course:
        """The course in the variables of a worker; an empty one in any other process."""
        try:
            *requested, placed = [float(text) for text in environment.get(COURSE, "").split()]
        except ValueError:
            return cls()
        return cls(requested[0] if requested else None, placed)


NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")
PRIVATE = frozenset(
    ["_", "DISPLAY", "HOME", "HOSTNAME", "LOGNAME", "OLDPWD", "PWD", "SHELL", "SHLVL", "TERM", "TMPDIR", "USER"]
)
PRIVATE_PREFIXES = ("DBUS_", "SSH_", "XDG_")
"""They describe the session of the user on one host."""
DEVICES = "VISIBLE_DEVICES"
"""The end of the names of variables that list devices of one host: those of CUDA, of ROCm..."""
STARTUP = frozenset(["LD_LIBRARY_PATH", "PATH"])
STARTUP_PREFIX = "PYTHON"
PACKED = "_HOROVOD_VARIABLES_"
PIECE = 1 << 16
"""In bytes; Linux allows one variable twice as much."""


def shared(environment: Mapping[str, str]) -> dict[str, str]:
    """All variables of ``environment`` but those of this host: of its devices, of the session of its user."""
    return {name: value for name, value in environment.items() if not _is_private(name)}


def exported(environment: Mapping[str, str]) -> dict[str, str]:
    """Those that are shared and have an identifier as their name: any launcher can pass them on."""
    return {name: value for name, value in shared(environment).items() if NAME.fullmatch(name)}


def startup(environment: Mapping[str, str]) -> dict[str, str]:
    """Those that the Python of an agent needs to start."""
    names = [name for name in exported(environment) if name in STARTUP or name.startswith(STARTUP_PREFIX)]
    return {name: environment[name] for name in names}


def packed(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` in few variables, with names and values that any shell can set."""
    entries = b"\0".join(os.fsencode(f"{name}={value}") for name, value in environment.items())
    text = base64.b64encode(zlib.compress(entries, 1)).decode("ascii")
    return {f"{PACKED}{start // PIECE}": text[start : start + PIECE] for start in range(0, len(text), PIECE)}


def unpack(environment: MutableMapping[str, str]) -> None:
    """Replace the variables of :func:`packed` in ``environment`` by those in them."""
    names = sorted((name for name in environment if name.startswith(PACKED)), key=lambda name: int(name[len(PACKED) :]))
    entries = zlib.decompress(base64.b64decode("".join(map(environment.pop, names)))) if names else b""
    pairs = (os.fsdecode(entry).partition("=") for entry in entries.split(b"\0") if entry)
    environment.update({name: value for name, _, value in pairs})


def _is_private(name: str) -> bool:
    return name in PRIVATE or name.startswith(PRIVATE_PREFIXES) or name.endswith(DEVICES)
