"""How a program of this host becomes a program of another host: a remote shell, such as ssh."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["PLACEHOLDER", "RemoteShell", "script"]

PLACEHOLDER = "{host}"


@dataclass(frozen=True)
class RemoteShell:
    """The command ``template`` runs ``sh`` on a host, whose name replaces ``{host}`` or else is the last argument.

    ``sh`` reads its script from the standard input, so no secret is on a command line, and nothing is quoted twice.
    Raises ValueError for a template that is empty, or has an open quotation mark.
    """

    template: str

    def __post_init__(self) -> None:
        try:
            words = shlex.split(self.template)
        except ValueError as error:
            raise ValueError(f"the remote shell {self.template!r} cannot be read: {error}") from error
        if not words:
            raise ValueError("the remote shell is empty; give a command such as 'ssh {host}'")

    def command(self, host: str) -> list[str]:
        """The command that reads the script for ``host``."""
        words = shlex.split(self.template)
        named = [word.replace(PLACEHOLDER, host) for word in words]
        return [*named, "sh"] if named != words else [*named, host, "sh"]


def script(folder: str, variables: Mapping[str, str], command: Sequence[str]) -> str:
    """The script of ``sh`` that runs ``command`` with ``variables`` in ``folder``."""
    return "\n".join(
        [
            f"cd {shlex.quote(folder)} || exit 1",
            *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
            f"exec {shlex.join(command)}",
            "",
        ]
    )
