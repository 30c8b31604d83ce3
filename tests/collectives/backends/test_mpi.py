"""MPI on real ranks, by the mpirun of both wheels. Each launch costs seconds, so one does many things."""

from pathlib import Path

import pytest

from tests.mpi import launch

RANKS = ["-m", "tests.collectives.backends.mpi_ranks"]
SHARED_MEMORY, REMAINS = Path("/dev/shm"), "mpich_shm_*"
BOTH = pytest.mark.parametrize("mpi", ["openmpi", "mpich"])


def ran(mpi, size, name, folder, **variables):
    """The result of the ranks, each of which was done."""
    done = launch(mpi, size, [*RANKS, name], folder, **variables)
    assert done.stdout.splitlines().count("done") == size, done.stdout + done.stderr
    return done


@pytest.mark.parametrize(("mpi", "size"), [("openmpi", 4), ("mpich", 3)])
def test_every_operation(mpi, size, tmp_path):
    """With MPICH, MPI takes one call at a time; the stages of an operation on several hosts run in two threads."""
    variables = {"HOROVOD_MPI_THREADS_DISABLE": str(int(mpi == "mpich"))}
    assert ran(mpi, size, "everything", tmp_path, **variables).returncode == 0


@BOTH
def test_a_member_that_comes_late(mpi, tmp_path):
    assert ran(mpi, 3, "late_peer", tmp_path).returncode == 0


@BOTH
def test_a_member_that_waits_says_so(mpi, tmp_path):
    assert ran(mpi, 2, "waits", tmp_path).returncode == 0


@pytest.fixture
def remains():
    """MPICH leaves shared memory where a rank ends without MPI_Finalize; this removes what the test adds."""
    before = set(SHARED_MEMORY.glob(REMAINS))
    yield
    for path in set(SHARED_MEMORY.glob(REMAINS)) - before:
        path.unlink()


@pytest.mark.usefixtures("remains")
@BOTH
@pytest.mark.parametrize("name", ["abort", "silence"])
def test_an_operation_that_does_not_end(mpi, name, tmp_path):
    """All ranks come to their end: MPI_Finalize, which would wait for the operation, is left out."""
    said = ran(mpi, 3, name, tmp_path).stderr
    assert "this process ends without MPI_Finalize, which could wait for ever: " in said


@pytest.mark.usefixtures("remains")
@BOTH
def test_a_rank_that_is_killed_ends_the_job(mpi, tmp_path):
    done = launch(mpi, 3, [*RANKS, "loss"], tmp_path)
    assert done.returncode != 0
    assert "done" not in done.stdout
