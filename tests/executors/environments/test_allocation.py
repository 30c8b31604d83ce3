import pytest

from executors.environments.allocation import SRUN, Allocation, allocation_of
from executors.hosts.places import PlaceArguments

SBATCH = {
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_JOB_CPUS_PER_NODE": "8(x2),4",
    "SLURM_TASKS_PER_NODE": "1(x3)",
}
LSF = {"LSB_JOBID": "3", "LSB_MCPU_HOSTS": "batch 1 a 4 b 2"}
FOUND = Allocation("LSF", {"a": 4, "b": 2})


@pytest.mark.parametrize(
    ("environment", "hosts"),
    [
        (SBATCH, {"n1": 8, "n2": 8, "n3": 4}),
        ({**SBATCH, "SLURM_CPUS_PER_TASK": "8"}, {"n1": 1, "n2": 1, "n3": 1}),
        ({**SBATCH, "SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": "2(x2),1"}, {"n1": 2, "n2": 2, "n3": 1}),
        ({**SBATCH, "SLURM_STEP_NUM_TASKS": "1"}, {"n1": 8, "n2": 8, "n3": 4}),
        (LSF, {"a": 4, "b": 2}),
    ],
)
def test_the_hosts_of_a_job(environment, hosts):
    found = allocation_of(environment)
    assert found.hosts == hosts
    assert found.shell == (SRUN if found.system == "SLURM" else None)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**SBATCH, "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_CPUS_PER_NODE": "8"},
        {**SBATCH, "SLURM_STEP_NUM_TASKS": "4"},
        {**SBATCH, "SLURM_JOB_CPUS_PER_NODE": "8"},
        {**SBATCH, "SLURM_JOB_CPUS_PER_NODE": "many"},
        {"LSB_MCPU_HOSTS": "a 4 b 2"},
        {"LSB_JOBID": "3", "LSB_MCPU_HOSTS": "batch 1 a 4"},
    ],
)
def test_no_hosts_but_this_one(environment):
    assert allocation_of(environment) is None


@pytest.mark.parametrize(
    "given",
    [
        PlaceArguments(hosts={"c": 1}),
        PlaceArguments(hostfile="file"),
        PlaceArguments(host_discovery_script="script"),
    ],
)
def test_hosts_that_the_user_names_have_precedence(given):
    assert given.within(FOUND) == given


@pytest.mark.parametrize(
    ("given", "shell"),
    [
        (PlaceArguments(), SRUN),
        (PlaceArguments(ssh_port=22), None),
        (PlaceArguments(remote_shell="rsh"), "rsh"),
    ],
)
def test_the_user_chooses_the_way_to_other_hosts(given, shell):
    found = Allocation("SLURM", {"a": 4, "b": 2}, SRUN)
    assert (given.within(found).hosts, given.within(found).remote_shell) == (found.hosts, shell)
    assert given.within(None) == given
