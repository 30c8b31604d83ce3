"""Pure: the launchers that are not ours, in the order of the search.

A batch system that only names hosts, and starts no rank on each, has its place in ``allocation.py`` instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from collectives import SettingsError
from executors.launchers.lsf import Jsrun
from executors.launchers.mpirun import Hydra, Mvapich, OpenMpi
from executors.launchers.place import Launcher, Place, text
from executors.launchers.shared_folder import FOLDER, SharedFolder
from executors.launchers.slurm import Srun
from executors.launchers.torch_distributed import TorchDistributed, WithoutAddress
from executors.launchers.yarn import YarnShell

LAUNCHERS: tuple[Launcher, ...] = (
    TorchDistributed(),
    Jsrun(),
    OpenMpi(),
    Mvapich(),
    Hydra(),
    Srun(),
    YarnShell(),
    WithoutAddress(),
)
"""The first one whose variables are there counts; one that is built on another comes before that one.

* torchrun may be the command that each task of srun or mpirun runs, and then starts the ranks.
* jsrun is built on Open MPI and PMIx, whose variables it sets, too; they do not name the hosts.
* Open MPI, MVAPICH2 and Hydra start their daemons by srun, so its variables are there as well. MVAPICH2 may be built
  on Hydra.
* A container of YARN is a host of its own; torchrun or mpirun may run in it.
"""

OURS = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_SIZE")


def is_ours(environment: Mapping[str, str]) -> bool:
    """Whether one of our launchers started the process with ``environment``, or the user has set HOROVOD_SIZE."""
    return bool(text(environment, *OURS))


def place_of(environment: Mapping[str, str]) -> Place | None:
    """The place of the process with ``environment`` in a job of a launcher that is not ours, or None.

    None also for a process of one of our launchers, for a launcher that started one process only, and where the user
    has set HOROVOD_SIZE. The user's HOROVOD_RENDEZVOUS_FOLDER comes before what the launcher offers. Raises
    SettingsError for such a folder where no launcher says the rank, and where the variables contradict each other.
    """
    if is_ours(environment):
        return None
    places = [place for launcher in LAUNCHERS if (place := launcher.place(environment)) is not None]
    found = next((place for place in places if place.size > 1), None)
    if found:
        _check(found)
    folder = text(environment, FOLDER)
    if folder and not places:
        raise SettingsError(
            f"{FOLDER} is {folder!r}, but no launcher has told this process which rank it is, and of how many: set "
            "RANK and WORLD_SIZE for each process. To train in this process alone, unset it, or set HOROVOD_SIZE=1"
        )
    return replace(found, rendezvous=SharedFolder(Path(folder))) if found and folder else found


def _check(place: Place) -> None:
    if place.rank >= place.size:
        raise SettingsError(
            f"{place.launcher} says that this process is rank {place.rank} of {place.size} ({place.variable}="
            f"{place.size}), but ranks are 0 to {place.size - 1}: correct its variables, or unset those of another job"
        )
