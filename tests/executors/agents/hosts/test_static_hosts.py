"""Jobs of a fixed size on several hosts, which are hosts in name only: their shell is one of this machine."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hvd_cluster.cli.hvdrun import main

ROOT = Path(__file__).parents[4]
SHELL = ["--remote-shell", "env HVD_TEST_HOST={host}"]
PLACE = "$HOROVOD_RANK/$HOROVOD_SIZE $HOROVOD_LOCAL_RANK/$HOROVOD_LOCAL_SIZE $HOROVOD_CROSS_RANK"
SHOW = f"echo {PLACE} ${{HVD_TEST_HOST:-here}}"
pytestmark = pytest.mark.leaves("processes")


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch):
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def shown(capfd):
    return sorted(capfd.readouterr().out.splitlines())


def test_ranks_follow_the_order_of_the_hosts(capfd):
    assert main(["-np", "4", "-H", "b:1,localhost:2,c:4", *SHELL, "sh", "-c", SHOW]) == 0
    assert shown(capfd) == [
        "[0]<stdout>:0/4 0/1 0 b",
        "[1]<stdout>:1/4 0/2 1 here",
        "[2]<stdout>:2/4 1/2 0 here",
        "[3]<stdout>:3/4 0/1 2 c",
    ]


def test_a_host_file(capfd, tmp_path):
    (tmp_path / "hosts").write_text("localhost slots=1\nb slots=2\n")
    assert main(["-np", "2", "--hostfile", str(tmp_path / "hosts"), *SHELL, "sh", "-c", SHOW]) == 0
    assert shown(capfd) == ["[0]<stdout>:0/2 0/1 0 here", "[1]<stdout>:1/2 0/1 1 b"]


@pytest.mark.parametrize("shell", ["bash", "dash"])
def test_a_variable_that_means_something_to_the_shell(capfd, monkeypatch, tmp_path, shell):
    """A user may have exported UID, which bash does not set, and a function, which no shell sets by its name."""
    program = shutil.which(shell) or pytest.skip(f"there is no {shell}")
    (tmp_path / "sh").symlink_to(program)
    for name, value in {"UID": "1000", "BASH_FUNC_f%%": "() { echo called; }", "IFS": "x", "a.b": "c"}.items():
        monkeypatch.setenv(name, value)
    remote = f"env -i HVD_TEST_HOST={{host}} PATH={tmp_path}:{os.environ['PATH']}"
    show = "import os; print(os.environ['UID'], os.environ['BASH_FUNC_f%%'], os.environ['a.b'])"
    assert main(["-np", "1", "-H", "b:1", "--remote-shell", remote, sys.executable, "-c", show]) == 0
    assert shown(capfd) == ["[0]<stdout>:1000 () { echo called; } c"]


def test_this_host_alone_needs_no_shell(capfd):
    assert main(["-np", "2", "-H", "localhost:4", "sh", "-c", SHOW]) == 0
    assert shown(capfd) == ["[0]<stdout>:0/2 0/2 0 here", "[1]<stdout>:1/2 1/2 0 here"]


@pytest.mark.parametrize(
    ("script", "status", "text"),
    [
        ("exit 3", 3, "rank 1 on b ended with exit code 3; the other ranks were ended"),
        ("echo too bad >&2; kill -9 $$", 137, "rank 1 on b was killed by signal 9"),
    ],
)
def test_a_failure_on_another_host_ends_all(capfd, script, status, text):
    script = f'[ "$HOROVOD_RANK" = 1 ] || exec sleep 600; {script}'
    begin = time.monotonic()
    assert main(["-np", "3", "-H", "localhost:1,b:1,c:1", *SHELL, "sh", "-c", script]) == status
    assert time.monotonic() - begin < 60
    assert text in capfd.readouterr().err


def test_the_words_of_the_shell_are_in_the_error(capfd):
    shell = "sh -c 'echo no route to {host} >&2; exit 255'"
    assert main(["-np", "2", "-H", "localhost:1,b:1", "--remote-shell", shell, "true"]) == 1
    error = capfd.readouterr().err
    assert (
        "hvdrun: host b cannot be used: its agent ended with exit code 255 before it connected (no route to b); "
        in error
    )


def test_all_hosts_are_tried_side_by_side(capfd):
    """Each agent would take a second; the first one that fails ends the job."""
    hosts = ",".join(f"h{number}:1" for number in range(20))
    shell = "sh -c 'sleep 1; echo bad {host} >&2; exit 1'"
    begin = time.monotonic()
    assert main(["-np", "20", "-H", hosts, "--remote-shell", shell, "true"]) == 1
    assert time.monotonic() - begin < 15


def test_a_host_that_does_not_answer_is_given_up_in_time(capfd):
    assert main(["-np", "1", "-H", "b:1", "--start-timeout", "1", "--remote-shell", "sh -c 'sleep 600'", "true"]) == 1
    assert "host b cannot be used: its agent did not connect within 1 s" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_launcher(number, tmp_path):
    (tmp_path / "sleep").symlink_to("/bin/sleep")
    command = ["env", "--default-signal=INT", sys.executable, "-m", "hvd_cluster", "-np", "2", "-H", "localhost:1,b:1"]
    script = f"echo started; exec {tmp_path}/sleep 600"
    process = subprocess.Popen([*command, *SHELL, "sh", "-c", script], stdout=subprocess.PIPE, env=os.environ)
    assert [process.stdout.readline()[3:] for _ in range(2)] == [b"<stdout>:started\n"] * 2
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    process.communicate(timeout=60)
    _, alive = psutil.wait_procs(children, 60)
    assert not alive
