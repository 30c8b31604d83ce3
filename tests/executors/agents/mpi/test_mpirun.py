"""The command of mpirun, for each MPI."""

import pytest

from executors.agents.mpi.library import MpiLibrary, Mpirun
from executors.agents.mpi.mpirun import Command, MpiJob, command_of

TRAIN = ["python", "train.py", "-x", "a b"]


def command(library, hosts=None, **options):
    job = MpiJob(TRAIN, hosts or {"a": 2, "b": 2}, variables=["PATH", "HOROVOD_CYCLE_TIME", "PMI_RANK"], **options)
    return command_of(Mpirun(library, "/bin/mpirun"), job)


def words(text):
    """``text`` as a command, whose last words are those of the ranks."""
    return Command(["/bin/mpirun", *text.split(), *TRAIN])


OPEN_MPI = "--allow-run-as-root --tag-output -np 4 -H a:2,b:2"
MCA = "--mca pml ob1 --mca btl ^openib"
EXPORTS = "-x HOROVOD_CYCLE_TIME -x PATH"
GENVLIST = "-l -genvlist HOROVOD_CYCLE_TIME,PATH"


@pytest.mark.parametrize(
    ("library", "expected"),
    [
        (MpiLibrary.OPEN_MPI, f"{OPEN_MPI} --bind-to none --map-by slot {MCA} {EXPORTS}"),
        (MpiLibrary.SPECTRUM, f"{OPEN_MPI} --bind-to socket --map-by socket --rank-by core {EXPORTS}"),
        (MpiLibrary.MPICH, f"-np 4 -hosts a:2,b:2 -bind-to none {GENVLIST}"),
        (MpiLibrary.INTEL, f"-np 4 -ppn 2 -hosts a,b {GENVLIST}"),
    ],
)
def test_a_plain_job(library, expected):
    """The variables are names only, without those of an MPI itself."""
    assert command(library) == words(expected)


@pytest.mark.parametrize(
    ("library", "expected"),
    [
        (MpiLibrary.OPEN_MPI, f"{OPEN_MPI} -bind-to core -q {MCA} {EXPORTS} --more -v"),
        (MpiLibrary.SPECTRUM, f"{OPEN_MPI} -bind-to core -q {EXPORTS} --more -v"),
        (MpiLibrary.MPICH, f"-np 4 -hosts a:2,b:2 -bind-to core -q {GENVLIST} --more -v"),
        (MpiLibrary.INTEL, f"-np 4 -ppn 2 -hosts a,b -bind-to core -q {GENVLIST} --more -v"),
    ],
)
def test_words_of_the_user(library, expected):
    assert command(library, mpi_args=["--more", "-v"], binding_args=["-bind-to", "core", "-q"]) == words(expected)


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ("--mca btl tcp,self", "--mca pml ob1"),
        ("-mca pml ucx --mca btl ^sm", ""),
        ("--mca plm_rsh_agent btl", MCA),
        ("--tune btl", MCA),
    ],
)
def test_open_mpi_gets_one_value_of_a_parameter_that_of_the_user(given, own):
    expected = f"{OPEN_MPI} --bind-to none --map-by slot {own} {EXPORTS} {given}"
    assert command(MpiLibrary.OPEN_MPI, mpi_args=given.split()) == words(expected)


def test_no_binding_at_all():
    assert command(MpiLibrary.OPEN_MPI, binding_args=[]) == words(f"{OPEN_MPI} {MCA} {EXPORTS}")


def test_network_interfaces():
    expected = f"{OPEN_MPI} --bind-to none --map-by slot {MCA} --mca btl_tcp_if_include eth0,eth1 {EXPORTS}"
    assert command(MpiLibrary.OPEN_MPI, nics=("eth0", "eth1")) == words(expected)
    for library in (MpiLibrary.MPICH, MpiLibrary.INTEL):
        assert " -iface eth0 -l " in " ".join(command(library, nics=("eth0", "eth1")).words)


@pytest.mark.parametrize(
    ("library", "expected"),
    [
        (MpiLibrary.OPEN_MPI, ["--mca", "plm_rsh_args", "-p 22 -i key"]),
        (MpiLibrary.SPECTRUM, ["--mca", "plm_rsh_args", "-p 22 -i key"]),
        (MpiLibrary.INTEL, ["-bootstrap", "ssh", "-bootstrap-exec-args", "-p 22 -i key"]),
        (MpiLibrary.MPICH, ["-launcher", "ssh"]),
    ],
)
def test_options_of_ssh(library, expected):
    found = command(library, ssh_port=22, ssh_identity_file="key")
    assert f"|{'|'.join(expected)}|" in "|".join(found.words)
    assert found.variables == ({"HYDRA_LAUNCHER_EXTRA_ARGS": "-p 22 -i key"} if library is MpiLibrary.MPICH else {})


def test_other_hosts_reach_the_mpirun_of_mpich():
    found = command(MpiLibrary.MPICH, {"localhost": 2, "b": 2}, address="10.0.0.1")
    assert found == words(f"-np 4 -hosts localhost:2,b:2 -bind-to none {GENVLIST} -localhost 10.0.0.1")
    given = ["-localhost", "a"]
    assert command(MpiLibrary.MPICH, address="10.0.0.1", mpi_args=given) == words(
        f"-np 4 -hosts a:2,b:2 -bind-to none {GENVLIST} -localhost a"
    )


def test_a_large_cluster():
    extra = ["--mca", "plm_rsh_no_tree_spawn", "true", "--mca", "plm_rsh_num_concurrent", "64"]
    large = command(MpiLibrary.OPEN_MPI, {f"n{number}": 1 for number in range(64)}).words
    assert large[large.index("plm_rsh_no_tree_spawn") - 1 :][: len(extra)] == extra
    assert "plm_rsh_no_tree_spawn" not in command(MpiLibrary.OPEN_MPI, {f"n{number}": 1 for number in range(63)}).words


@pytest.mark.parametrize(
    ("library", "expected"),
    [
        (MpiLibrary.OPEN_MPI, "--output-filename /logs/rank --timestamp-output"),
        (MpiLibrary.SPECTRUM, "--output-filename /logs/rank --timestamp-output"),
        (MpiLibrary.MPICH, "-outfile-pattern /logs/rank.%r.stdout -errfile-pattern /logs/rank.%r.stderr"),
        (MpiLibrary.INTEL, "-outfile-pattern /logs/rank.%r.stdout -errfile-pattern /logs/rank.%r.stderr"),
    ],
)
def test_output(library, expected):
    assert f" {expected} " in " ".join(command(library, output_directory="/logs", has_timestamp=True).words)


def test_tcp_only():
    assert "-tcp" in command(MpiLibrary.SPECTRUM, has_tcp_only=True).words
    assert "-tcp" not in command(MpiLibrary.OPEN_MPI, has_tcp_only=True).words


@pytest.mark.parametrize("hosts", [{"a": 4, "b": 4}, {"a": 4, "b": 4, "c": 1}, {"a": 4, "b": 2}, {"a": 4}])
def test_intel_fills_hosts_with_equal_slots(hosts):
    found = command(MpiLibrary.INTEL, hosts).words
    assert found[found.index("-ppn") + 1] == "4"


@pytest.mark.parametrize(
    ("hosts", "sets"),
    [
        ({"a": 2, "b": 4}, "-n 2 -host a {0} : -n 4 -host b {0}"),
        ({"a": 4, "b": 2, "c": 4}, "-n 4 -host a {0} : -n 2 -host b {0} : -n 4 -host c {0}"),
    ],
)
def test_intel_is_told_of_different_slots_host_by_host(hosts, sets):
    """The ranks are in the order of the hosts, and the words for all of them come first."""
    found = command(MpiLibrary.INTEL, hosts, mpi_args=["-v"], binding_args=["-q"], ssh_port=22).words
    common = ["/bin/mpirun", "-q", "-bootstrap", "ssh", "-bootstrap-exec-args", "-p 22", *GENVLIST.split(), "-v"]
    assert found == [*common, *(word for part in sets.split() for word in (TRAIN if part == "{0}" else [part]))]
