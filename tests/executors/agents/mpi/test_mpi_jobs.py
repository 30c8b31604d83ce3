"""Jobs over MPI, by the mpirun of both wheels: HOROVOD_CPU_OPERATIONS, HOROVOD_CONTROLLER and init(comm=...)."""

import re
import subprocess
import sys

import pytest

from collectives.api import InvalidRequestError, SettingsError
from hvd_cluster.core import process_sets
from hvd_cluster.core.launchers import StartingLauncher
from tests.mpi import ALLREDUCE, FOLDER, environment, launch

RANKS = ["-m", "tests.mpi_jobs"]
BOTH = pytest.mark.parametrize("mpi", ["openmpi", "mpich"])


def ran(mpi, size, name, folder, **variables):
    done = launch(mpi, size, [*RANKS, name], folder, **variables)
    assert done.stdout.splitlines().count("done") == size, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.parametrize(("mpi", "disabled"), [("openmpi", "0"), ("mpich", "1")])
def test_tensors_travel_over_mpi(mpi, disabled, tmp_path):
    variables = {"HOROVOD_CPU_OPERATIONS": "mpi", "HOROVOD_MPI_THREADS_DISABLE": disabled}
    assert not ran(mpi, 4, "over_mpi", tmp_path, **variables).stderr


@BOTH
def test_communicators_are_jobs_and_process_sets(mpi, tmp_path):
    ran(mpi, 4, "communicators", tmp_path)


@BOTH
def test_bad_communicators(mpi, tmp_path):
    ran(mpi, 2, "bad_communicators", tmp_path)


@BOTH
def test_the_ranks_meet_over_mpi(mpi, tmp_path):
    """No other way is left to them: nothing names the ranks but MPI."""
    meet = "import os\nfor name in list(os.environ):\n    if name.endswith('_SIZE'): del os.environ[name]\n"
    done = launch(mpi, 3, ["-c", f"import mpi4py.MPI\n{meet}{ALLREDUCE}"], tmp_path, HOROVOD_CONTROLLER="mpi")
    assert sorted(done.stdout.splitlines()) == [f"{rank} of 3: 6.0" for rank in range(3)], done.stderr


@BOTH
@pytest.mark.parametrize("name", ["few_threads", "ended_mpi"])
def test_an_mpi_that_cannot_be_used(mpi, name, tmp_path):
    ran(mpi, 1, name, tmp_path, HOROVOD_CPU_OPERATIONS="mpi")


@pytest.mark.parametrize(
    ("launcher", "loaded", "text"),
    [
        (
            "openmpi",
            "mpich",
            r"mpirun of Open MPI has started .*\(MPICH Version: .*\), whose MPI_Init would end the",
        ),
        ("mpich", "openmpi", r"mpirun \(MPICH, .* has started 2 processes, but MPI \(Open MPI .*\) sees 1, so it does"),
    ],
)
def test_an_mpirun_of_another_mpi(launcher, loaded, text, tmp_path):
    variables = {"LD_LIBRARY_PATH": str(FOLDER / loaded / "lib"), "HOROVOD_CPU_OPERATIONS": "mpi"}
    variables["OMPI_MCA_btl"] = "self"  # a rank of Open MPI that its launcher kills leaves shared memory
    done = launch(launcher, 2, ["-c", ALLREDUCE], tmp_path, **variables)
    assert done.returncode != 0
    assert re.search(f"{text}.*MPI4PY_LIBMPI", done.stderr), done.stderr


def plainly(command, folder, **variables):
    """The output of a process that mpirun has not started; MPICH is there."""
    done = subprocess.run(
        [sys.executable, *command],
        env={**environment("mpich", folder), **variables},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.stdout + done.stderr


def test_ranks_of_hvdrun_are_alone_in_their_mpi(tmp_path):
    command = ["-m", "hvd_cluster", "-np", "2", sys.executable, *RANKS, "alone"]
    assert plainly(command, tmp_path, HOROVOD_CPU_OPERATIONS="mpi").count("<stdout>:done") == 2


def test_a_rank_that_is_alone_does_not_use_mpi(tmp_path):
    ask = "from hvd_cluster.core import basics, features; basics.init(); print(features.mpi_enabled())"
    command = ["-m", "hvd_cluster", "-np", "1", sys.executable, "-c", ask]
    assert plainly(command, tmp_path, HOROVOD_CPU_OPERATIONS="mpi") == "[0]<stdout>:False\n"


def test_a_process_of_no_mpirun_is_a_world_of_one(tmp_path):
    assert plainly(["-c", ALLREDUCE], tmp_path, HOROVOD_CPU_OPERATIONS="mpi") == "0 of 1: 1.0\n"
    said = plainly(["-c", "from hvd_cluster.core import basics; basics.init(comm=[0, 1])"], tmp_path)
    assert "init(comm=[0, 1]) must be different ranks of MPI.COMM_WORLD, which has 0 to 0 here (MPICH" in said


def test_what_is_built(tmp_path):
    assert "[X] MPI" in plainly(["-m", "hvd_cluster", "--check-build"], tmp_path)
    assert "[X] MPI" not in plainly(["-m", "hvd_cluster", "--check-build"], tmp_path, LD_LIBRARY_PATH="")


ELASTIC = {"HOROVOD_ELASTIC": "1", "HOROVOD_WORKER_ID": "a/1", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("variables", "comm", "kind", "text"),
    [
        ({**ELASTIC, "HOROVOD_CPU_OPERATIONS": "mpi"}, None, SettingsError, "an elastic job cannot use MPI"),
        (
            {**ELASTIC, "HOROVOD_GPU_OPERATIONS": "MPI"},
            None,
            SettingsError,
            "leave .*HOROVOD_GPU_OPERATIONS=mpi, .* out",
        ),
        (ELASTIC, [0], SettingsError, "an elastic job cannot use MPI"),
        ({"HOROVOD_GLOO_RENDEZVOUS_ADDR": "a"}, [0], InvalidRequestError, "hvdrun, Ray or Spark has started this one"),
        (
            {"HOROVOD_SIZE": "1"},
            [0],
            InvalidRequestError,
            "use comm=None, with process_sets for groups of ranks; or",
        ),
        ({"HOROVOD_CONTROLLER": "gpu"}, None, SettingsError, "HOROVOD_CONTROLLER is 'gpu', but must be one of: gloo"),
    ],
)
def test_jobs_that_cannot_use_mpi(variables, comm, kind, text):
    with pytest.raises(kind, match=text):
        StartingLauncher().join(variables, comm)


def test_a_later_init_is_for_the_same_ranks():
    for comm in (None, [1, 0]):
        process_sets.check_same(comm, [1, 0])
    with pytest.raises(
        InvalidRequestError, match=r"init\(\) was called already, with the ranks \[1, 0\], not \[0, 1\]"
    ):
        process_sets.check_same([0, 1], [1, 0])


def test_the_sets_of_all_ranks_are_put_together():
    given = [[[0, 1], []], [[0, 1], [1, 2]], [[2, 3], [1, 2]], [[2, 3], []]]
    assert process_sets.distinct(given) == [[[0, 1], [2, 3]], [[1, 2]]]
    assert process_sets.distinct([[[]], [[]]]) == [[]]
    with pytest.raises(InvalidRequestError, match=r"the ranks gave init\(\) \[1, 0\] process sets from communicators"):
        process_sets.distinct([[[0]], []])
