"""The mark of a rank, which its children find. A child here is another process id."""

import os
import socket

import pytest

from collectives.api import SettingsError
from executors.launchers.bootstrap import JOINED, erase_mark, leave_mark, refuse_child
from executors.launchers.table import place_of

PMI = {"PMI_RANK": "1", "PMI_SIZE": "2"}
SRUN = {
    **{"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7"},
    "SLURM_STEP_NODELIST": "n1",
}


@pytest.fixture
def child(monkeypatch):
    """From now on, this is another process."""
    own = os.getpid()
    return lambda: monkeypatch.setattr(os, "getpid", lambda: own + 1)


@pytest.mark.parametrize("variables", [PMI, SRUN])
def test_a_child_is_no_rank(child, variables):
    environment = dict(variables)
    place = place_of(environment)
    refuse_child(environment, place)
    leave_mark(environment, place)
    refuse_child(environment, place)
    child()
    with pytest.raises(
        SettingsError, match=rf"is a child of rank 1, which is process \d+: .* without {place.variable};"
    ):
        refuse_child(environment, place)
    erase_mark(environment)
    refuse_child(environment, place)
    assert JOINED not in environment


def test_a_step_that_a_rank_starts_is_another_job(child):
    environment = dict(SRUN)
    leave_mark(environment, place_of(environment))
    child()
    environment["SLURM_STEP_ID"] = "1"
    refuse_child(environment, place_of(environment))


def test_ranks_of_mpirun_that_a_rank_starts_have_connections_of_their_own(child, tmp_path):
    with socket.socket() as own, socket.socket() as other, (tmp_path / "file").open("w") as file:
        environment = {**PMI, "PMI_FD": str(own.fileno())}
        place = place_of(environment)
        leave_mark(environment, place)
        child()
        for descriptor in (own.fileno(), file.fileno(), 1_000_000):  # inherited; of something else; closed
            with pytest.raises(SettingsError, match="is a child of rank 1"):
                refuse_child({**environment, "PMI_FD": str(descriptor)}, place)
        refuse_child({**environment, "PMI_FD": str(other.fileno())}, place)
