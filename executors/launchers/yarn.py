"""Pure: the distributed shell of YARN, which runs one command in several containers."""

from __future__ import annotations

from collections.abc import Mapping

from collectives import SettingsError
from executors.launchers.known_ports import KnownPorts, Trust, ports_of
from executors.launchers.place import Place, number, text
from executors.launchers.shared_folder import FOLDER

NUMBER, SIZE = "YARN_SHELL_ID", "WORLD_SIZE"


class YarnShell:
    """YARN_SHELL_ID counts the containers from 1. Only the user knows how many there are, and sets WORLD_SIZE."""

    def place(self, environment: Mapping[str, str]) -> Place | None:
        """Raises SettingsError where WORLD_SIZE is missing or too small for this container."""
        count, size = number(environment, NUMBER), number(environment, SIZE)
        if not count:
            return None
        if size is None and count == 1 and not text(environment, FOLDER):
            return None  # the only container, as far as it knows
        if size is None or size < count:
            raise SettingsError(_wrong_size(count, text(environment, SIZE)))
        job = f"yarn {_attempt(text(environment, 'CONTAINER_ID'))}"
        return Place(
            launcher="YARN's distributed shell",
            variable=SIZE,
            rank=count - 1,
            size=size,
            job=job,
            rendezvous=_rendezvous(environment, job),
            node=text(environment, "NM_HOST"),
            remedy=f"give -shell_env {FOLDER}=FOLDER, a folder that all nodes share",
        )


def _wrong_size(count: int, size: str) -> str:
    given = f"{SIZE} is {size!r}" if size else f"{SIZE} is not set"
    return (
        f"this container of YARN's distributed shell is number {count} ({NUMBER}={count}), but {given}: give "
        f"-shell_env {SIZE}=N with the N of -num_containers. YARN gives a new number to a container that replaces one "
        "that failed: then start the job again"
    )


def _rendezvous(environment: Mapping[str, str], job: str) -> KnownPorts | None:
    master = text(environment, "MASTER_ADDR")
    return KnownPorts((master,), ports_of(environment, job), Trust.NETWORK) if master else None


def _attempt(container: str) -> str:
    """container_e17_1410901177871_0001_01_000005 -> container_e17_1410901177871_0001_01, which all containers share."""
    return container.rpartition("_")[0]
