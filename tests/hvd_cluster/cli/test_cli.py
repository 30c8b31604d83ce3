"""hvdrun: as a real process where processes and signals matter, in this process for the rest."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from executors.failures import Patience
from executors.membership import Cooldown, Limits
from hvd_cluster.cli.hvdrun import main
from tests import startup

ROOT = Path(__file__).parents[3]
SECONDS = "a positive number of seconds, at most 1000000"
EXAMPLE = "as in: hvdrun -np 2 python train.py"
DESCEND = "but they must not descend: give --min-np <= -np <= --max-np"
ELASTIC = "this is for elastic jobs; give --min-np, --max-np or a host discovery script as well"
RANGE = "give the shortest time, then the longest one, both from 1 to 3600 s"


def left_behind(folder):
    """The processes whose command line mentions ``folder``."""
    processes = psutil.process_iter(["cmdline"])
    return [process for process in processes if any(str(folder) in part for part in process.info["cmdline"] or ())]


@pytest.fixture
def hvdrun():
    """Starts ``hvdrun`` as a process, as a shell would, with its signals as in the foreground, also under nohup."""
    started = []

    def start(*arguments):
        process = subprocess.Popen(
            ["env", "--default-signal=INT,HUP", sys.executable, "-m", "hvd_cluster", *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": startup.PATH, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def family(tmp_path):
    """A worker with children, one of them in a session of its own, that all mention ``tmp_path``."""
    (tmp_path / "sleep").symlink_to("/bin/sleep")
    script = tmp_path / "family.sh"
    script.write_text(f"{tmp_path}/sleep 600 & setsid {tmp_path}/sleep 600 & echo started; {tmp_path}/sleep 600; wait")
    yield script
    for process in left_behind(tmp_path):
        process.kill()


def wait_until(process, text, size):
    """Each rank has written ``text``."""
    assert {process.stdout.readline() for _ in range(size)} == {f"[{rank}]<stdout>:{text}\n" for rank in range(size)}


def wait_until_started(process, size):
    wait_until(process, "started", size)


def test_every_rank_runs_the_command(hvdrun):
    out, err = hvdrun("-np", 2, "sh", "-c", "echo $HOROVOD_RANK/$HOROVOD_SIZE").communicate()
    assert sorted(out.splitlines()) == ["[0]<stdout>:0/2", "[1]<stdout>:1/2"]
    assert err == ""


KNOCK = """
import os, urllib.error, urllib.request
server = "{HOROVOD_GLOO_RENDEZVOUS_ADDR}:{HOROVOD_GLOO_RENDEZVOUS_PORT}".format(**os.environ)
try:
    urllib.request.urlopen(f"http://{server}/")
except urllib.error.HTTPError as error:
    print(error.code)
"""


def test_a_line_about_a_stranger_says_who_wrote_it(hvdrun):
    """Such as one that scans the ports of this host."""
    out, err = hvdrun("-np", 1, sys.executable, "-c", KNOCK).communicate()
    assert out == "[0]<stdout>:401\n"
    assert err.startswith("hvdrun: refused GET '/' from 127.0.0.1: the message is not signed"), err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_everything(hvdrun, family, tmp_path, number, status):
    process = hvdrun("-np", 2, "sh", family)
    wait_until_started(process, 2)
    process.send_signal(number)
    assert process.wait() == status
    assert left_behind(tmp_path) == []
    # A shell among the workers may have said that it saw a child of its own be ended.
    said = [line for line in process.stderr.read().splitlines() if not line.endswith("<stderr>:Terminated")]
    assert said == (["hvdrun: interrupted; the ranks were ended"] if number == signal.SIGINT else [])


HEARS = """
import os, signal, sys, time
for number in map(int, sys.argv[2:]):
    signal.signal(number, lambda number, frame: print("heard", number, flush=True))
try:
    print("started", flush=True)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.02)
finally:
    print("finally", flush=True)
"""
PLACES = pytest.mark.parametrize(
    "place", [(), ("--min-np", 1), ("-H", "localhost:1,b:1", "--remote-shell", "env HOST={host}")]
)


@PLACES
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
def test_a_notice_is_passed_on_to_the_ranks(hvdrun, tmp_path, monkeypatch, place, number):
    """On other hosts, too; the job goes on, and ends as its ranks do."""
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")
    process = hvdrun("-np", 2, *place, sys.executable, "-c", HEARS, tmp_path / "done", int(number))
    wait_until_started(process, 2)
    process.send_signal(number)
    wait_until(process, f"heard {int(number)}", 2)
    (tmp_path / "done").touch()
    assert process.wait() == 0


@PLACES
def test_a_notice_does_not_end_a_rank_that_has_no_handler(hvdrun, tmp_path, monkeypatch, place):
    """The other rank gets it. A line says so once for each signal, and the job goes on with both."""
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")
    script = 'p=$1; mkdir "$2.first" && n=10; "$p" -c "$3" "$2" $n; exit'
    process = hvdrun("-np", 2, *place, "sh", "-c", script, "sh", sys.executable, tmp_path / "done", HEARS)
    wait_until_started(process, 2)
    for _ in range(2):
        process.send_signal(signal.SIGUSR1)
        assert re.fullmatch(r"\[\d\]<stdout>:heard 10\n", process.stdout.readline())
    said = next(line for line in process.stderr if "handler" in line)
    assert re.fullmatch(r"hvdrun: (rank |worker-)\d has no handler for SIGUSR1, and goes on without it\n", said)
    process.send_signal(signal.SIGUSR2)
    said = next(line for line in process.stderr if "handler" in line)
    assert "has no handler for SIGUSR2" in said
    (tmp_path / "done").touch()
    assert process.wait() == 0
    assert "handler" not in process.stderr.read()


@PLACES
def test_a_closed_terminal_ends_the_job_of_ranks_without_a_handler(hvdrun, tmp_path, monkeypatch, place):
    """An elastic job as well: a rank that SIGHUP has ended is not replaced."""
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")
    process = hvdrun("-np", 2, *place, sys.executable, "-c", HEARS, tmp_path / "done")
    wait_until_started(process, 2)
    process.send_signal(signal.SIGHUP)
    assert process.wait() == 129
    assert "has no handler" not in process.stderr.read()


@PLACES
def test_ctrl_c_lets_the_ranks_run_their_finally(hvdrun, tmp_path, monkeypatch, place):
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")
    process = hvdrun("-np", 2, *place, sys.executable, "-c", HEARS, tmp_path / "done")
    wait_until_started(process, 2)
    process.send_signal(signal.SIGINT)
    wait_until(process, "finally", 2)
    assert process.wait() == 130
    assert process.stderr.read().count("KeyboardInterrupt") == 2


@PLACES
@pytest.mark.parametrize(("first", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_kills_ranks_that_were_asked_to_end(hvdrun, tmp_path, monkeypatch, place, first, status):
    """A first signal does not, nor does SIGTERM after it: a rank that hears it has all of the grace time."""
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")
    command = sys.executable, "-c", HEARS, tmp_path / "done", 2, 15, 10
    process = hvdrun("-np", 2, "--grace-seconds", 600, *place, *command)
    wait_until_started(process, 2)
    process.send_signal(first)
    wait_until(process, f"heard {int(first)}", 2)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGUSR1)
    wait_until(process, "heard 10", 2)  # so both are alive, and SIGTERM has been there
    process.send_signal(signal.SIGINT)
    assert process.wait() in (status, 130)
    assert process.stdout.read() == ""  # no rank has run its "finally"
    assert left_behind(tmp_path) == []


def test_nothing_outlives_a_driver_that_was_killed(hvdrun, family, tmp_path):
    process = hvdrun("-np", 2, "sh", family)
    wait_until_started(process, 2)
    assert left_behind(tmp_path)
    process.kill()
    process.wait()
    while left_behind(tmp_path):  # the timeout of the test bounds it
        time.sleep(0.02)


LOST = "hvdrun: {} cannot be written any more ({}); the ranks go on without it\n"
FULL, GONE = "[Errno 28] No space left on device", "[Errno 32] Broken pipe"


def test_nobody_reads_the_output_any_more(hvdrun, tmp_path):
    """As under "| head": the training goes on, and its status is that of the ranks."""
    script = (
        f"echo line; while ! test -e {tmp_path}/closed; do sleep 0.02; done; seq 9; echo $? > {tmp_path}/$HOROVOD_RANK"
    )
    process = hvdrun("-np", 2, "sh", "-c", script)
    wait_until(process, "line", 2)
    process.stdout.close()
    process.stdout = None
    (tmp_path / "closed").touch()
    assert process.wait() == 0
    assert process.stderr.read() == LOST.format("standard output", GONE)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["0\n"] * 2


@pytest.mark.parametrize("options", [(), ("--min-np", 1)])
@pytest.mark.parametrize(("redirection", "lost"), [(">/dev/full", "output"), ("2>/dev/full", "error"), (">&-", "")])
def test_a_console_that_cannot_be_written(tmp_path, options, redirection, lost):
    """A full disk, or a stream that the shell has closed; status and ranks are as ever."""
    words = [sys.executable, "-m", "hvd_cluster", "-np", 2, *options, "sh", "-c", "seq 9; seq 9 >&2; exit 3"]
    command = f"{shlex.join(map(str, words))} {redirection}"
    environment = {**os.environ, "PYTHONPATH": startup.PATH, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, shell=True, capture_output=True, env=environment, text=True, check=False)
    assert done.returncode == 3
    kept = done.stdout if lost == "error" else done.stderr
    assert (LOST.format(f"standard {lost}", FULL) in kept) == bool(lost)
    assert kept.count("cannot be written") == bool(lost)
    assert f"[0]<{'stdout' if lost == 'error' else 'stderr'}>:9\n" in kept


def test_both_consoles_are_on_a_full_disk(tmp_path):
    words = [
        sys.executable,
        "-m",
        "hvd_cluster",
        "-np",
        2,
        "sh",
        "-c",
        f"seq 9; seq 9 >&2; touch {tmp_path}/$HOROVOD_RANK",
    ]
    environment = {**os.environ, "PYTHONPATH": startup.PATH}
    done = subprocess.run(
        f"{shlex.join(map(str, words))} >/dev/full 2>&1", shell=True, env=environment, timeout=60, check=False
    )
    assert done.returncode == 0
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


def test_the_secret_is_neither_on_a_command_line_nor_in_the_output(hvdrun, tmp_path):
    script = f"""
        echo $_HOROVOD_SECRET_KEY > {tmp_path}/secret
        guard=$PPID; driver=$(cut -d' ' -f4 /proc/$guard/stat)
        cat /proc/$$/cmdline /proc/$guard/cmdline /proc/$driver/cmdline > {tmp_path}/commands"""
    out, err = hvdrun("-np", 1, "--verbose", "sh", "-c", script).communicate()
    secret = (tmp_path / "secret").read_text().strip()
    commands = (tmp_path / "commands").read_text()
    assert len(secret) == 44
    assert "guard.py" in commands
    assert "hvd_cluster" in commands
    assert secret not in commands + out + err


@pytest.mark.parametrize(
    ("script", "status", "text"),
    [
        ("exit 0", 0, ""),
        ("exit 3", 3, "hvdrun: rank 0 on localhost ended with exit code 3; the other ranks were ended\n"),
        ("kill -9 $$", 137, None),
        ("kill -15 $$", 143, None),
    ],
)
def test_the_exit_status_is_that_of_the_first_failure(capsys, script, status, text):
    assert main(["-np", "1", "sh", "-c", script]) == status
    assert text in (None, capsys.readouterr().err)


def test_the_last_lines_of_the_failure_are_shown(capsys):
    assert main(["-np", "1", "sh", "-c", "seq 13 >&2; exit 3"]) == 3
    assert capsys.readouterr().err.endswith(
        "hvdrun: rank 0 on localhost ended with exit code 3; the other ranks were ended. The last lines of its "
        "standard error:\n" + "".join(f"    {number}\n" for number in range(2, 14))
    )


RAISING = """
import atexit, os, pathlib, sys, time

gone, rank = pathlib.Path(sys.argv[1]), int(os.environ["HOROVOD_RANK"])


def leave():
    if rank == 0:
        gone.write_text(str(os.getpid()))
        return
    for _ in range(3000):
        if gone.exists() and not os.path.exists(f"/proc/{gone.read_text()}"):
            break
        time.sleep(0.01)


atexit.register(leave)  # runs after the shutdown() that the next import registers

from hvd_cluster.core import basics
from hvd_cluster.ops.objects import broadcast_object

basics.init()
broadcast_object(1)
if rank == 1:
    raise ValueError("bad batch")
broadcast_object(2)
"""


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_a_rank_that_raises_is_named_rather_than_those_that_it_leaves(tmp_path, capsys, monkeypatch, seconds):
    """Rank 0 hears that Horovod was shut down, and ends before rank 1, which raised and has an exit handler.

    hvdrun does not wait for that, or long enough.
    """
    monkeypatch.setattr("executors.driver.driver.PATIENCE", Patience(other=seconds))
    script = tmp_path / "train.py"
    script.write_text(RAISING)
    assert main(["-np", "2", sys.executable, str(script), str(tmp_path / "gone")]) == 1
    said = capsys.readouterr().err
    assert "hvdrun: rank 1 on localhost ended with exit code 1; the other ranks were ended. The last lines" in said
    assert said.endswith("    ValueError: bad batch\n")
    # Rank 0 may be about to submit its next tensor, and not wait for it yet: then it is told what to do.
    end = r"it raised ValueError: bad batch(\. Call hvd\.init\(\) to start again)?\n"
    assert re.search(rf"\[0\]<stderr>:.*ShutDownError: .* by rank 1\b.*: {end}", said)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("-np 2", f"there is no command; put it last, {EXAMPLE}"),
        ("", f"there is no command; put it last, {EXAMPLE}"),
        ("python train.py", f"the number of processes is missing, {EXAMPLE}"),
        ("-np 0 true", "argument -np/--num-proc: '0' must be an integer of at least 1"),
        ("-np -3 true", "argument -np/--num-proc: '-3' must be an integer of at least 1"),
        ("-np0 true", "argument -n: '0' must be an integer of at least 1"),
        ("-n 2 true", "argument -n: there is no such option; say -np 2"),
        ("-np two true", "argument -np/--num-proc: 'two' must be an integer of at least 1"),
        ("-np 2 --start-timeout 0 true", f"argument --start-timeout: '0' must be {SECONDS}"),
        ("-np 2 --grace-seconds 0 true", f"argument --grace-seconds: '0' must be {SECONDS}"),
        ("-np 2 --start-timeout 3e6 true", f"argument --start-timeout: '3e6' must be {SECONDS}"),
        ("-np 2 --unknown true", "there is no option --unknown; see hvdrun --help"),
        ("-np 2 -c true", "there is no option -c; did you mean -cb?"),
        ("-np 2 -hosts a:2 true", "there is no option -hosts; did you mean --hosts?"),
        ("-np 2 --bogus true", "there is no option --bogus; see hvdrun --help"),
        ("--np 2 true", "there is no option --np; did you mean -np?"),
        ("-np 2 -min-np 1 true", "there is no option -min-np; did you mean --min-np?"),
        ("-np 2 --config-file= true", "argument --config-file: '' must be some text"),
        (
            "-np 2 --cycle-time-ms 1_0 true",
            "argument --cycle-time-ms: '1_0' must be a number of milliseconds, 0 to 1000000000",
        ),
        ("-np 2 --cycle-time 1 true", "there is no option --cycle-time; did you mean --cycle-time-ms?"),
        ("-np 2 --cycle-time=1 true", "there is no option --cycle-time; did you mean --cycle-time-ms?"),
        (
            "-np 2 --log-level loud true",
            "argument --log-level: 'loud' must be one of: TRACE, DEBUG, INFO, WARNING, ERROR, FATAL",
        ),
        (
            "-np 2 --autotune-gaussian-process-noise 2 true",
            "argument --autotune-gaussian-process-noise: '2' must be a number from 0 to 1",
        ),
        ("-np 2 --min-np 0 true", "argument --min-np/--min-num-proc: '0' must be an integer of at least 1"),
        ("-np 2 --max-np two true", "argument --max-np/--max-num-proc: 'two' must be an integer of at least 1"),
        ("-np 2 --min-np 3 true", f"--min-np is 3 and -np is 2, {DESCEND}"),
        ("-np 2 --max-np 1 true", f"-np is 2 and --max-np is 1, {DESCEND}"),
        ("--max-np 3 true", f"the number of processes is missing, {EXAMPLE}"),
        (
            "-np 2 -H a:1 --min-np 1 --max-np 1 true",
            f"--min-np is 1, -np is 2 and --max-np is 1, {DESCEND}",
        ),
        ("-np 2 --slots 4 true", "--slots-per-host is for the hosts of a --host-discovery-script, which is missing"),
        ("-np 2 --reset-limit 1 true", f"--reset-limit: {ELASTIC}"),
        ("-np 2 --elastic-timeout 5 true", f"--elastic-timeout: {ELASTIC}"),
        ("-np 2 --blacklist-cooldown-range 1 2 true", f"--blacklist-cooldown-range: {ELASTIC}"),
        ("-np 2 --min-np 1 --reset-limit -1 true", "argument --reset-limit: '-1' must be an integer of at least 0"),
        ("-np 2 --min-np 1 --elastic-timeout 0 true", f"argument --elastic-timeout: '0' must be {SECONDS}"),
        ("-np 2 --min-np 1 --blacklist-cooldown-range 9 2 true", f"a cool-down of 9 to 2 s is not possible; {RANGE}"),
        ("-np 2 --min-np 1 --blacklist-cooldown-range 1", "argument --blacklist-cooldown-range: expected 2 arguments"),
    ],
)
def test_a_bad_command_line_is_one_sentence(capsys, arguments, text):
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    assert caught.value.code == 2
    assert capsys.readouterr() == ("", f"hvdrun: {text}\n")


def test_the_options_of_elastic_jobs_reach_the_job(monkeypatch):
    seen = []
    monkeypatch.setattr("hvd_cluster.cli.hvdrun.run_command", lambda *arguments: seen.append(arguments))
    options = (
        "-np 2 --min-num-proc 1 --max-num-proc 4 --reset-limit 0 --elastic-timeout 7 --blacklist-cooldown-range 1 9"
        " --host-discovery-script ./hosts --slots-per-host 3 python train.py --max-np 8"
    )
    assert main(options.split()) == 0
    ((command, limits, placed),) = seen
    assert command == ["python", "train.py", "--max-np", "8"]
    assert limits == Limits(2, 1, 4, resets=0, timeout=7.0, cooldown=Cooldown(1.0, 9.0), may_find_hosts=True)
    assert (placed.discovery._script, placed.discovery._slots) == ("./hosts", 3)


@pytest.mark.parametrize(("option", "seconds"), [("", 40.0), ("--grace-seconds 0.5", 0.5)])
def test_the_grace_is_that_of_the_option_or_the_environment(monkeypatch, option, seconds):
    seen = []
    monkeypatch.setattr("hvd_cluster.cli.hvdrun.run_command", lambda *arguments: seen.append(arguments))
    monkeypatch.setenv("HOROVOD_GRACE_SECONDS", "40")
    assert main(f"-np 1 {option} true".split()) == 0
    ((_, _, options),) = seen
    assert options.grace == seconds


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("exit 3", "ended with exit code 3; run it by hand to see why"),
        ("echo a:b", "gave the line 'a:b'; each line must be host:slots, such as node1:4 or [fd00::1]:4"),
    ],
)
def test_a_discovery_script_that_fails_at_the_start_is_one_sentence(capsys, monkeypatch, script, problem):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["-np", "1", "--host-discovery-script", script, "true"]) == 2
    assert capsys.readouterr() == ("", f"hvdrun: the host discovery script {script!r} {problem}\n")


def test_hosts_other_than_this_one_are_named_and_not_used(capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script = "echo localhost:1; echo elsewhere:4"
    assert main(["-np", "1", "--host-discovery-script", script, "true"]) == 0
    text = "host elsewhere is not used: give --remote-shell to start ranks on other hosts"
    assert capsys.readouterr() == ("", f"hvdrun: {text}\n")


def test_a_bad_variable_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "soon")
    with pytest.raises(SystemExit) as caught:
        main(["-np", "2", "true"])
    assert caught.value.code == 2
    text = f"HOROVOD_START_TIMEOUT is 'soon', but must be {SECONDS}"
    assert capsys.readouterr().err == f"hvdrun: {text}\n"


def test_a_command_that_does_not_exist(capsys):
    assert main(["-np", "2", "no-such-command"]) == 127
    text = "there is no command 'no-such-command' that can be executed; correct its name or PATH"
    assert capsys.readouterr() == ("", f"hvdrun: {text}\n")


def test_a_script_without_its_interpreter(capsys):
    assert main(["-np", "2", "train.py"]) == 127
    text = "there is no command 'train.py' that can be executed; say python train.py"
    assert capsys.readouterr() == ("", f"hvdrun: {text}\n")


def test_an_output_folder_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["-np", "1", "--output-filename", str(tmp_path / "file"), "true"]) == 1
    assert "Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["echo", "-v", "-np", "x"], ["--", "echo", "-v", "-np", "x"]])
def test_options_of_the_command_are_its_own(capsys, command):
    assert main(["--num-proc", "1", *command]) == 0
    assert capsys.readouterr().out == "[0]<stdout>:-v -np x\n"


@pytest.mark.parametrize("option", ["-np2", "-np=2", "--num-proc=2"])
def test_the_number_of_processes_may_be_joined_to_its_option(capsys, option):
    assert main([option, "echo", "-np3"]) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0]<stdout>:-np3", "[1]<stdout>:-np3"]


@pytest.mark.parametrize("option", ["-prefix-timestamp", "--prefix-output-with-timestamp"])
def test_lines_can_have_the_time(capsys, option):
    assert main(["-np", "1", option, "echo", "line"]) == 0
    assert capsys.readouterr().out.endswith("[0]<stdout>:line\n")


@pytest.mark.parametrize(("level", "shown"), [("info", True), ("ERROR", False)])
def test_the_level_of_the_log_is_that_of_hvdrun_too(monkeypatch, capsys, level, shown):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert main(["-np", "2", "--log-level", level, "sh", "-c", "echo $HOROVOD_LOG_LEVEL"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0].endswith(level.upper())
    assert ("OMP_NUM_THREADS=" in err) is shown


def test_output_can_go_to_files_too(tmp_path, capsys):
    assert main(["-np", "2", "--output-filename", str(tmp_path / "a" / "b"), "--verbose", "echo", "line"]) == 0
    assert [(tmp_path / "a" / "b" / f"rank.{rank}" / "stdout").read_text() for rank in (0, 1)] == ["line\n"] * 2
    assert "rank 1 of 2 is process" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["-v", "--version"])
def test_the_version(capsys, option):
    with pytest.raises(SystemExit) as caught:
        main([option])
    assert caught.value.code == 0
    assert capsys.readouterr().out.strip()


def test_handlers_of_signals_are_restored():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    main(["-np", "1", "true"])
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_a_signal_that_is_ignored_stays_ignored(capsys):
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert main(["-np", "1", "sh", "-c", f"kill -HUP {os.getpid()}; echo done"]) == 0
    finally:
        signal.signal(signal.SIGHUP, previous)
    assert capsys.readouterr().out == "[0]<stdout>:done\n"
