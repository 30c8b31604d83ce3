"""The place of a process under each launcher that is not ours."""

import pytest

from collectives.api import SettingsError
from executors.launchers.broadcast import ByBroadcast
from executors.launchers.known_ports import KnownPorts, Trust
from executors.launchers.shared_folder import SharedFolder
from executors.launchers.table import place_of

GROUP = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = {**GROUP, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
TORCHRUN_HERE = {**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}
POD = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "train-0.train", "MASTER_PORT": "23456"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-a-77@1",
    "PMIX_RANK": "3",
}
OPEN_MPI_HERE = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
AZURE_MPI = {**OPEN_MPI, "AZ_BATCHAI_JOB_MASTER_NODE_IP": "10.0.0.4", "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"}
AZURE_TORCH = {**GROUP, "LOCAL_RANK": "0", "NODE_RANK": "1", "AZUREML_RUN_ID": "calm_rain_1"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "7"}
BATCH_SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SRUN = {
    **BATCH_SCRIPT,
    "SLURM_PROCID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURMD_NODENAME": "n2",
}
SRUN_HERE = {**SRUN, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "n1"}
JSRUN = {
    "LSB_JOBID": "88",
    "LSB_MCPU_HOSTS": "batch5 1 h41n04 42 h41n05 42",
    "JSM_NAMESPACE_RANK": "6",
    "JSM_NAMESPACE_SIZE": "12",
    "JSM_NAMESPACE_LOCAL_RANK": "0",
    "JSM_NAMESPACE_LOCAL_SIZE": "6",
}

YARN = {
    "CONTAINER_ID": "container_e17_1410901177871_0001_01_000004",
    "YARN_SHELL_ID": "3",
    "WORLD_SIZE": "4",
    "NM_HOST": "n7",
    "NM_PORT": "45454",
}
FIRST = {"CONTAINER_ID": "container_e17_1410901177871_0001_01_000002", "YARN_SHELL_ID": "1"}


@pytest.mark.parametrize(
    ("environment", "launcher", "rank", "size", "hosts", "trust", "node"),
    [
        (TORCHRUN, "torchrun", 1, 4, ("10.0.0.1",), Trust.NETWORK, "group 0"),
        (TORCHRUN_HERE, "torchrun", 1, 4, ("127.0.0.1",), Trust.USER, "group 0"),
        (AZURE_TORCH, "torchrun", 1, 4, ("10.0.0.1",), Trust.NETWORK, ""),
        (POD, "a launcher for torch.distributed", 2, 4, ("train-0.train",), Trust.NETWORK, ""),
        (OPEN_MPI_HERE, "mpirun (Open MPI)", 3, 4, ("127.0.0.1",), Trust.USER, ""),
        ({**OPEN_MPI_HERE, "PMIX_HOSTNAME": "n1"}, "mpirun (Open MPI)", 3, 4, ("127.0.0.1",), Trust.USER, "n1"),
        (AZURE_MPI, "mpirun (Open MPI)", 3, 4, ("10.0.0.4",), Trust.NETWORK, ""),
        ({**OPEN_MPI, "MASTER_ADDR": "a"}, "mpirun (Open MPI)", 3, 4, ("a",), Trust.NETWORK, ""),
        (SRUN, "srun", 2, 4, ("n1",), Trust.USER, "n2"),
        (SRUN_HERE, "srun", 2, 4, ("127.0.0.1",), Trust.USER, "n2"),
        ({**SRUN, "MASTER_ADDR": "a"}, "srun", 2, 4, ("a",), Trust.USER, "n2"),
        (JSRUN, "jsrun", 6, 12, ("h41n04", "h41n05"), Trust.USER, ""),
        ({**JSRUN, "JSM_NAMESPACE_LOCAL_SIZE": "12"}, "jsrun", 6, 12, ("127.0.0.1",), Trust.USER, ""),
        ({**JSRUN, **OPEN_MPI}, "jsrun", 6, 12, ("h41n04", "h41n05"), Trust.USER, ""),
        ({**SRUN, "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, "srun", 2, 4, ("n1",), Trust.USER, "n2"),
        ({**YARN, "MASTER_ADDR": "n1"}, "YARN's distributed shell", 2, 4, ("n1",), Trust.NETWORK, "n7"),
    ],
)
def test_ranks_that_find_rank_0_by_its_host(environment, launcher, rank, size, hosts, trust, node):
    place = place_of(environment)
    assert (place.launcher, place.rank, place.size, place.node) == (launcher, rank, size, node)
    assert environment[place.variable] == str(size)
    assert isinstance(place.rendezvous, KnownPorts)
    assert (place.rendezvous.hosts, place.rendezvous.trust) == (hosts, trust)


@pytest.mark.parametrize(
    ("environment", "launcher", "rank", "size", "channels"),
    [
        (OPEN_MPI, "mpirun (Open MPI)", 3, 4, ("mpi4py", "pmix")),
        ({**SRUN, **OPEN_MPI}, "mpirun (Open MPI)", 3, 4, ("mpi4py", "pmix")),
        (HYDRA, "mpirun (MPICH, Intel MPI) or srun with PMI", 1, 2, ("mpi4py if in use", "pmi", "mpi4py")),
        (
            {**HYDRA, "MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"},
            "mpirun (MVAPICH2)",
            1,
            2,
            ("mpi4py if in use", "pmi", "mpi4py"),
        ),
    ],
)
def test_ranks_that_find_rank_0_by_their_launcher(environment, launcher, rank, size, channels):
    place = place_of(environment)
    assert (place.launcher, place.rank, place.size) == (launcher, rank, size)
    assert place.rendezvous == ByBroadcast(channels, size)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"},
        {"WORLD_SIZE": "4"},
        {"WORLD_SIZE": "1", "RANK": "0"},
        {**POD, "WORLD_SIZE": "1"},
        {**POD, "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1"},
        {"WORLD_SIZE": "many", "RANK": "0", "LOCAL_RANK": "0"},
        {"OMPI_COMM_WORLD_SIZE": "2"},
        BATCH_SCRIPT,
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},
        {**SRUN, "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1"},
        {**TORCHRUN, "HOROVOD_SIZE": "1"},
        {**YARN, "HOROVOD_SIZE": "1"},
        {"CONTAINER_ID": YARN["CONTAINER_ID"], "YARN_SHELL_ID": "1"},
        {**YARN, "YARN_SHELL_ID": "0"},
    ],
)
def test_a_process_alone_or_of_a_launcher_of_ours(environment):
    assert place_of(environment) is None


@pytest.mark.parametrize(
    ("environment", "change"),
    [
        (SRUN, {"SLURM_JOB_ID": "8"}),
        (SRUN, {"SLURM_STEP_ID": "1"}),
        (SRUN, {"SLURM_RESTART_COUNT": "1"}),
        (TORCHRUN, {"MASTER_PORT": "29501"}),
        (OPEN_MPI_HERE, {"PMIX_NAMESPACE": "prterun-a-78@1"}),
        (JSRUN, {"LSB_JOBID": "89"}),
    ],
)
def test_all_ranks_have_one_job_and_no_other_job_has_it(environment, change):
    rank = {name: "0" for name in environment if name.endswith(("_RANK", "PROCID")) and name != "GROUP_RANK"}
    first, other = place_of({**environment, **rank}), place_of({**environment, **change})
    own = place_of(environment)
    assert (own.job, own.rendezvous) == (first.job, first.rendezvous)
    assert own.job != other.job
    assert own.rendezvous != other.rendezvous


def test_agents_of_torchrun_that_count_their_own_failures_agree():
    first, second = (place_of({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": count}) for count in "01")
    assert (first.job, first.rendezvous) == (second.job, second.rendezvous)


def test_the_user_chooses_the_port():
    assert place_of({**SRUN, "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711"}).rendezvous.ports == (4711,)
    with pytest.raises(SettingsError, match=r"HOROVOD_GLOO_RENDEZVOUS_PORT is '70000', but must be a port number"):
        place_of({**SRUN, "HOROVOD_GLOO_RENDEZVOUS_PORT": "70000"})


@pytest.mark.parametrize(
    ("variables", "node"),
    [({}, ""), ({"PMI_HOSTNAME": "n1"}, "n1"), ({"PMI_HOSTNAME": "localhost", "SLURMD_NODENAME": "n2"}, "n2")],
)
def test_the_node_of_a_rank_with_pmi(variables, node):
    assert place_of({**HYDRA, **variables}).node == node


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        {"RANK": "0", "WORLD_SIZE": "2"},
        {**SRUN, "SLURM_STEP_NODELIST": "n[oops]"},
        {**JSRUN, "LSB_MCPU_HOSTS": ""},
    ],
)
def test_variables_that_do_not_say_where_rank_0_is(environment):
    place = place_of(environment)
    assert place.rendezvous is None
    assert "MASTER_ADDR" in place.remedy


def test_a_script_for_srun_may_set_rank_and_world_size():
    assert place_of({**SRUN, "RANK": "1", "WORLD_SIZE": "4"}).launcher == "srun"


def test_a_rank_above_the_size():
    with pytest.raises(SettingsError, match=r"is rank 5 of 2 \(WORLD_SIZE=2\), but ranks are 0 to 1"):
        place_of({**POD, "RANK": "5", "WORLD_SIZE": "2"})


def test_containers_of_yarn_meet_in_a_folder(tmp_path):
    place = place_of(YARN)
    assert place.rendezvous is None
    assert "-shell_env HOROVOD_RENDEZVOUS_FOLDER=" in place.remedy
    first, second = (place_of({**YARN, "HOROVOD_RENDEZVOUS_FOLDER": str(tmp_path), **own}) for own in ({}, FIRST))
    assert first.rendezvous == second.rendezvous == SharedFolder(tmp_path)
    assert (first.job, first.rank, second.rank) == (second.job, 2, 0)
    again = place_of({**YARN, "CONTAINER_ID": "container_e17_1410901177871_0001_02_000002"})
    assert again.job != first.job, "the application master of a second attempt starts new containers"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"YARN_SHELL_ID": "5"}, "is number 5 .* but WORLD_SIZE is '4'"),
        ({"WORLD_SIZE": ""}, "is number 3 .* but WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many'"),
        ({**FIRST, "WORLD_SIZE": "", "HOROVOD_RENDEZVOUS_FOLDER": "/shared"}, "is number 1 .* WORLD_SIZE is not set"),
    ],
)
def test_containers_of_yarn_that_do_not_fit_their_number(change, words):
    with pytest.raises(SettingsError, match=words):
        place_of({**YARN, **change})
