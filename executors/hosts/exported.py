"""Pure: the variables of this process that workers on other hosts get, too, and their way there.

A shell refuses to set some names, such as UID in bash, changes the meaning of others, and cannot set any that is no
identifier, such as that of an exported function. So the shell that starts an agent sets only names that mean nothing
to it, and the agent unpacks the others. They take the way of the secret, which may be encrypted.
"""

from __future__ import annotations

import base64
import os
import re
import zlib
from collections.abc import Mapping, MutableMapping

__all__ = ["exported", "packed", "shared", "startup", "unpack"]

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
