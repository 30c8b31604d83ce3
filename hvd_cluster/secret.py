"""The secret of the job, kept out of reach of the processes that a rank starts."""

from __future__ import annotations

from collections.abc import MutableMapping

from collectives.api import SettingsError
from collectives.settings import ENVIRONMENT_SECRET

__all__ = ["Secret"]

RENDEZVOUS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"


class Secret:
    """Moves the secret from the environment into memory, for this process alone.

    A child process inherits the environment. It needs no secret: only the launchers start ranks, and each of their jobs
    has a secret of its own.
    """

    def __init__(self) -> None:
        self._text = ""

    def claim(self, environment: MutableMapping[str, str]) -> dict[str, str]:
        """A copy of ``environment`` with the secret, which this removes from ``environment`` itself.

        A secret in ``environment`` replaces the one of an earlier call. Raises SettingsError if a launcher has named a
        rendezvous but this process has no secret for it.
        """
        self._text = environment.pop(ENVIRONMENT_SECRET, "") or self._text
        if environment.get(RENDEZVOUS, "").strip() and not self._text:
            raise SettingsError(
                f"{RENDEZVOUS} is set, but this process has no secret of the job, {ENVIRONMENT_SECRET}: a rank has "
                "started it after hvd.init(), and it cannot be a rank itself, or what started it has dropped variables "
                "of the launcher. Call hvd.init() only in the process that the launcher started, with all its variables"
            )
        return {**environment, ENVIRONMENT_SECRET: self._text} if self._text else dict(environment)

    def forget(self) -> None:
        """Drop the secret, in a child process that was forked."""
        self._text = ""
