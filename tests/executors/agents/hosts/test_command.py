import errno
import io
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from executors.agents.hosts import job as local
from executors.agents.hosts.job import HostsOptions, resolve_start_timeout
from executors.agents.local.supervisor import Ended, Supervisor, WorkerStarted
from executors.api import CommandNotFoundError, StartTimeoutError, WorkerError
from executors.failures import Patience
from executors.job.output import Output, release_consoles
from executors.membership import Limits


def run_command(command, size, options):
    local.run_command(command, Limits.static(size), options)


def shell(script):
    return ["sh", "-c", script]


def test_every_rank_runs_and_every_line_says_which(capsys):
    run_command(shell("echo $HOROVOD_RANK of $HOROVOD_SIZE; echo oops >&2; printf end"), 3, HostsOptions())
    captured = capsys.readouterr()
    expected = [f"[{rank}]<stdout>:{text}" for rank in range(3) for text in (f"{rank} of 3", "end")]
    assert sorted(captured.out.splitlines()) == sorted(expected)
    assert sorted(captured.err.splitlines()) == [f"[{rank}]<stderr>:oops" for rank in range(3)]


def test_lines_of_ranks_do_not_mix(capsys):
    text = "x" * 5000
    run_command(shell(f"for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16; do echo {text}; done"), 2, HostsOptions())
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[{r}]<stdout>:{text}" for r in (0, 1) for _ in range(16)]


def test_much_output_just_before_the_end_is_not_lost(capsys):
    run_command([sys.executable, "-c", "print('x' * 79 + '\\n' + 'y' * 900_000)"], 1, HostsOptions())
    assert capsys.readouterr().out == f"[0]<stdout>:{'x' * 79}\n[0]<stdout>:{'y' * 900_000}\n"


@pytest.mark.parametrize(
    ("end", "code", "text"),
    [
        ("exit 3", 3, "rank 1 on localhost ended with exit code 3"),
        ("kill -9 $$", -9, r"rank 1 on localhost was killed by signal 9 \(SIGKILL; the host may have run out of mem"),
        ("kill -11 $$", -11, r"rank 1 on localhost was killed by signal 11 \(SIGSEGV\)"),
    ],
)
def test_the_first_failure_ends_the_others(tmp_path, end, code, text):
    script = f"""
        if [ $HOROVOD_RANK = 1 ]; then while [ ! -e {tmp_path}/0 -o ! -e {tmp_path}/2 ]; do sleep 0.02; done; {end}; fi
        trap 'touch {tmp_path}/asked$HOROVOD_RANK; exit 7' TERM
        touch {tmp_path}/$HOROVOD_RANK; while :; do sleep 0.02; done"""
    with pytest.raises(WorkerError, match=text) as caught:
        run_command(shell(script), 3, HostsOptions())
    assert (caught.value.rank, caught.value.host, caught.value.exit_code) == (1, "localhost", code)
    assert (tmp_path / "asked0").exists()
    assert (tmp_path / "asked2").exists()


LOST = "echo 'Traceback (most recent call last):' >&2; echo 'collectives.api.PeerLostError: rank 1 is gone' >&2; exit 1"
SHUT_DOWN = LOST.replace("PeerLostError", "ShutDownError")
RAISED = "echo 'Traceback (most recent call last):' >&2; echo 'ValueError: bad batch' >&2; exit 1"


@pytest.mark.parametrize(
    ("consequence", "cause", "code", "last"),
    [
        (SHUT_DOWN, RAISED, 1, "ValueError: bad batch"),
        (SHUT_DOWN, "kill -INT $$; kill -9 $$", -2, None),
        (SHUT_DOWN, "exit 3", 3, None),
        (SHUT_DOWN, LOST, 1, "collectives.api.PeerLostError: rank 1 is gone"),
        (LOST, RAISED, 1, "ValueError: bad batch"),
        (LOST, "kill -11 $$", -11, None),
        ("kill -6 $$", RAISED, 1, "ValueError: bad batch"),
        ("exit 1", "kill -9 $$", -9, None),
    ],
)
def test_the_cause_is_named_though_another_rank_ends_first(
    tmp_path, capsys, monkeypatch, consequence, cause, code, last
):
    monkeypatch.setattr("executors.driver.driver.PATIENCE", Patience(other=60.0))
    script = f"""
        cd {tmp_path}; if [ $HOROVOD_RANK = 0 ]; then echo $$ > new; mv new pid; {consequence}; fi
        while [ ! -e pid ]; do sleep 0.01; done; while [ -d /proc/$(cat pid) ]; do sleep 0.01; done; {cause}"""
    with pytest.raises(WorkerError, match="rank 1 on localhost") as caught:
        run_command(shell(script), 2, HostsOptions())
    assert (caught.value.rank, caught.value.exit_code, caught.value.last_lines[-1:]) == (
        1,
        code,
        (last,) if last else (),
    )


def test_a_consequence_without_a_cause_is_named_itself(monkeypatch, capsys):
    monkeypatch.setattr("executors.driver.driver.PATIENCE", Patience(other=0.1))
    with pytest.raises(WorkerError, match="rank 1 on localhost ended with exit code 1"):
        run_command(shell(f"if [ $HOROVOD_RANK = 1 ]; then {LOST}; fi; exec sleep 600"), 2, HostsOptions())


def test_a_worker_that_ends_well_lets_the_others_go_on(tmp_path, capsys):
    script = f"""
        cd {tmp_path}; if [ $HOROVOD_RANK = 0 ]; then echo $$ > new; mv new pid; exit; fi
        while [ ! -e pid ]; do sleep 0.02; done; while [ -d /proc/$(cat pid) ]; do sleep 0.02; done; echo done"""
    run_command(shell(script), 2, HostsOptions())
    assert capsys.readouterr().out == "[1]<stdout>:done\n"


def test_a_worker_of_an_elastic_job_that_cannot_be_started_is_a_failure_of_its_host(tmp_path, capsys):
    (tmp_path / "rank.1").touch()
    options = HostsOptions(output_directory=tmp_path)
    local.run_command(shell("echo done"), Limits(2, 1, 2, may_find_hosts=False), options)
    assert capsys.readouterr().out == "[0]<stdout>:done\n"
    with pytest.raises(
        WorkerError, match=r"worker-1 on host localhost: could not be started: \[Errno 17\] File exists"
    ):
        local.run_command(shell("echo done"), Limits(2, 2, 2, resets=1, may_find_hosts=False), options)


def test_what_a_worker_leaves_behind_is_ended(tmp_path):
    run_command(shell(f"setsid sleep 600 & echo $! > {tmp_path}/pid"), 1, HostsOptions())
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_the_environment_is_that_of_the_driver_and_of_the_options_and_of_the_job(monkeypatch, capsys):
    monkeypatch.setenv("FROM_DRIVER", "a")
    monkeypatch.setenv("REPLACED", "x")
    monkeypatch.setenv("HOROVOD_RANK", "9")
    options = HostsOptions(environment={"REPLACED": "b", "HOROVOD_CONTROLLER": "c"})
    run_command(shell("echo $FROM_DRIVER $REPLACED $HOROVOD_CONTROLLER $HOROVOD_RANK"), 1, options)
    assert capsys.readouterr().out == "[0]<stdout>:a b c 0\n"


def test_files_and_verbose(tmp_path, capsys):
    options = HostsOptions(output_directory=tmp_path / "new", verbose=True)
    run_command(shell("echo out; echo $$ >&2"), 2, options)
    pids = [(tmp_path / "new" / f"rank.{rank}" / "stderr").read_text().strip() for rank in range(2)]
    assert [(tmp_path / "new" / f"rank.{rank}" / "stdout").read_text() for rank in range(2)] == ["out\n"] * 2
    error = capsys.readouterr().err
    assert all(f"hvdrun: rank {rank} of 2 is process {pids[rank]} on localhost\n" in error for rank in range(2))


def test_a_command_that_does_not_exist_starts_nothing(tmp_path):
    with pytest.raises(CommandNotFoundError, match="no command 'no-such-command'"):
        run_command(["no-such-command"], 2, HostsOptions(output_directory=tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_the_path_of_the_workers_counts(tmp_path, capsys):
    program = tmp_path / "my-program"
    program.write_text("#!/bin/sh\necho mine\n")
    program.chmod(0o755)
    options = HostsOptions(environment={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    run_command(["my-program"], 1, options)
    assert capsys.readouterr().out == "[0]<stdout>:mine\n"


def test_an_output_folder_that_cannot_be_made_starts_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        run_command(["true"], 2, HostsOptions(output_directory=tmp_path / "file"))


def test_events_come_in_order():
    with Supervisor() as supervisor, Output(2) as output:
        for rank in range(2):
            supervisor.launch(rank, shell(f"exit {rank}"), os.environ, output)
        events = list(supervisor.events())
    for rank in range(2):
        started, ended = (event for event in events if event.rank == rank)
        assert isinstance(started, WorkerStarted)
        assert ended == Ended(rank, rank)


ASKED = "trap 'echo asked; exit' TERM INT; echo ready; while :; do sleep 0.02; done"
DEAF = "trap '' TERM INT; echo ready; while :; do sleep 0.02; done"


class Signalled(io.StringIO):
    """A console that raises, once, when it gets a line."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, text):
        super().write(text)
        error, self.error = self.error, None
        if error:
            raise error


@pytest.mark.parametrize(
    ("error", "told"), [(KeyboardInterrupt(), True), (SystemExit(143), True), (RuntimeError(), False)], ids=repr
)
def test_leaving_early_ends_the_workers(monkeypatch, error, told):
    console = Signalled(error)
    monkeypatch.setattr(sys, "stdout", console)
    with pytest.raises(type(error)):
        run_command(shell(ASKED), 1, HostsOptions())
    assert console.getvalue() == "[0]<stdout>:ready\n" + "[0]<stdout>:asked\n" * told


@pytest.mark.parametrize("error", [BrokenPipeError(errno.EPIPE, "gone"), OSError(errno.EIO, "no terminal")], ids=repr)
def test_a_console_that_cannot_be_written_ends_no_worker(monkeypatch, capsys, error):
    console = Signalled(error)
    monkeypatch.setattr(sys, "stdout", console)
    run_command(shell("echo ready; echo more >&2"), 2, HostsOptions())
    release_consoles()
    told = f"hvdrun: standard output cannot be written any more ({error}); the ranks go on without it"
    assert sorted(capsys.readouterr().err.splitlines()) == ["[0]<stderr>:more", "[1]<stderr>:more", told]


def test_files_on_a_full_disk_cost_a_warning(monkeypatch, tmp_path, capsys, caplog):
    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("executors.job.output.FileSink", full)
    run_command(shell("echo line"), 1, HostsOptions(output_directory=tmp_path))
    assert capsys.readouterr().out == "[0]<stdout>:line\n"
    assert [record.message for record in caplog.records if "OMP" not in record.message] == [
        f"{tmp_path}/rank.0/{name} cannot be made ([Errno 28] No space left on device); only the console has it"
        for name in ("stdout", "stderr")
    ]


def test_leaving_early_kills_what_does_not_end(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Signalled(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        run_command(shell(DEAF), 2, HostsOptions(grace=0.1))


def test_a_second_interrupt_kills_at_once(monkeypatch):
    class Impatient(Signalled):
        def write(self, text):
            io.StringIO.write(self, text)
            raise KeyboardInterrupt

    console = Impatient(None)
    monkeypatch.setattr(sys, "stdout", console)
    script = "trap 'echo asked' TERM INT; echo ready; while :; do sleep 0.02; done"
    with pytest.raises(KeyboardInterrupt):
        run_command(shell(script), 1, HostsOptions(grace=600))
    assert console.getvalue() == "[0]<stdout>:ready\n[0]<stdout>:asked\n"


def test_workers_that_do_not_come_up_are_named(monkeypatch, tmp_path):
    (tmp_path / "guard.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr("executors.agents.local.processes.GUARD", tmp_path / "guard.py")
    with pytest.raises(StartTimeoutError, match=r"these did not come up within 0\.1 s: 0, 1; raise the start timeout"):
        run_command(["true"], 2, HostsOptions(start_timeout=0.1))


def test_jobs_can_run_at_the_same_time_in_threads():
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: run_command(["true"], 2, HostsOptions()), range(4)))


@pytest.mark.parametrize(("argument", "variable", "seconds"), [(None, None, 30), (None, "2.5", 2.5), (4, "2.5", 4)])
def test_the_start_timeout_comes_from_the_argument_or_the_variable(monkeypatch, argument, variable, seconds):
    monkeypatch.delenv("HOROVOD_START_TIMEOUT", raising=False)
    if variable:
        monkeypatch.setenv("HOROVOD_START_TIMEOUT", variable)
    assert resolve_start_timeout(argument) == seconds


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "soon"])
def test_a_bad_start_timeout_is_named(monkeypatch, value):
    with pytest.raises(ValueError, match=f"start_timeout is {value!r}, but must be a positive number of seconds"):
        resolve_start_timeout(value)
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", str(value))
    with pytest.raises(ValueError, match=f"HOROVOD_START_TIMEOUT is '{value}'"):
        resolve_start_timeout(None)
