import os
import subprocess
import sys

import pytest

from executors.agents.hosts.arguments import PlaceArguments, Places
from executors.agents.hosts.shell import RemoteShell
from executors.launchers.allocation import SRUN, Allocation, allocation_of

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


@pytest.mark.parametrize("counts", ["1(x4000000000)", "1(x300000)", "9" * 5000, "1,x"])
def test_a_list_of_counts_that_cannot_be_one_is_no_allocation(counts):
    assert allocation_of({**SBATCH, "SLURM_JOB_CPUS_PER_NODE": counts}) is None


ONE_NODE = {"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_CPUS_PER_NODE": "8"}


@pytest.mark.parametrize(
    ("environment", "hosts", "shell"),
    [
        ({**ONE_NODE, "SLURMD_NODENAME": "n1"}, {"localhost": 8}, None),
        (ONE_NODE, {"n1": 8}, SRUN),
        ({"LSB_JOBID": "3", "LSB_MCPU_HOSTS": "a 4"}, {"localhost": 4}, None),
        ({"LSB_JOBID": "3", "LSB_HOSTS": "a a"}, {"localhost": 2}, None),
        ({"LSB_JOBID": "3", "LSB_MCPU_HOSTS": "batch 1 a 4"}, {"a": 4}, None),
        ({**SBATCH, "SLURMD_NODENAME": "n2"}, {"n1": 8, "n2": 8, "n3": 4}, SRUN),
    ],
)
def test_this_host_alone_needs_no_shell(environment, hosts, shell):
    found = allocation_of(environment)
    assert (found.hosts, found.shell) == (hosts, shell)


def test_this_host_alone_takes_any_number_of_ranks():
    given = PlaceArguments().within(Allocation("SLURM", {"localhost": 1}))
    assert given == PlaceArguments()
    assert Places.of(given, 4, is_elastic=False) == Places()


def test_a_job_of_another_host_uses_its_slots():
    given = PlaceArguments().within(Allocation("SLURM", {"n1": 2}, SRUN))
    places = Places.of(given, 2, is_elastic=False)
    assert (places.hosts, places.shell is not None) == ({"n1": 2}, True)
    with pytest.raises(ValueError, match=r"3 processes need 3 slots, but the hosts have 2 .*-H"):
        Places.of(given, 3, is_elastic=False)


def test_an_agent_gets_all_of_its_node_and_nothing_else_is_on_its_command_line():
    words = RemoteShell(SRUN).command("n1")
    assert words[words.index("srun") :] == [
        *("srun", "--overlap", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--nodelist=n1"),
        *("--cpu-bind=none", "--mem=0", "--mpi=none", "--export=ALL", "sh"),
    ]
    names = ("SRUN_CPUS_PER_TASK", *(f"SLURM_{name}_PER_TASK" for name in ("CPUS", "GPUS", "TRES")))
    options = {**dict.fromkeys(names, "1"), "PATH": os.environ["PATH"]}
    start = [*words[: words.index("srun")], sys.executable, "-c", "import os; print([*os.environ])"]
    assert "_PER_TASK" not in subprocess.run(start, env=options, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**SBATCH, "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1"},
        {**SBATCH, "SLURM_STEP_NUM_TASKS": "4"},
        {**SBATCH, "SLURM_JOB_CPUS_PER_NODE": "8"},
        {**SBATCH, "SLURM_JOB_CPUS_PER_NODE": "many"},
        {"LSB_MCPU_HOSTS": "a 4 b 2"},
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
