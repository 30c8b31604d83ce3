import pytest

from executors.foreign import FOREIGN_LAUNCHERS, foreign_rank

TORCHRUN = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
KUBEFLOW = {"WORLD_SIZE": "4", "RANK": "0", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
BATCH_SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SRUN = {**BATCH_SCRIPT, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.parametrize(
    ("environment", "name", "size"),
    [
        (TORCHRUN, "torchrun", 2),
        (KUBEFLOW, "a launcher for torch.distributed, such as Kubeflow,", 4),
        (OPEN_MPI, "mpirun (Open MPI)", 3),
        ({"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "0"}, "mpirun (MVAPICH2)", 2),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "mpirun (MPICH, Intel MPI) or srun with PMI", 2),
        ({"JSM_NAMESPACE_SIZE": "6", "JSM_NAMESPACE_RANK": "5"}, "jsrun", 6),
        (SRUN, "srun", 4),
        ({**SRUN, **OPEN_MPI}, "mpirun (Open MPI)", 3),
        ({**SRUN, "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, "srun", 4),
    ],
)
def test_one_of_several_processes(environment, name, size):
    rank = foreign_rank(environment)
    assert (rank.launcher.name, rank.size) == (name, size)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"},
        {"WORLD_SIZE": "4"},
        {"WORLD_SIZE": "4", "RANK": "0"},
        {**KUBEFLOW, "WORLD_SIZE": "1"},
        {**KUBEFLOW, "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1"},
        {"WORLD_SIZE": "many", "RANK": "0", "LOCAL_RANK": "0"},
        {"OMPI_COMM_WORLD_SIZE": "2"},
        BATCH_SCRIPT,
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},
        {**SRUN, "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1"},
        {**TORCHRUN, "HOROVOD_SIZE": "1"},
    ],
)
def test_no_foreign_launcher(environment):
    assert foreign_rank(environment) is None


def test_every_launcher_of_the_table_is_found():
    for launcher in FOREIGN_LAUNCHERS:
        environment = {launcher.size: "2", **dict.fromkeys(launcher.others, "1")}
        assert foreign_rank(environment).launcher is launcher
