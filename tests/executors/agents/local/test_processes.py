"""Workers under their guard: real processes, seen through the pipes that a driver reads."""

import os
import resource
import signal
import subprocess
import sys

import psutil
import pytest

from collectives.net import descriptors
from executors.agents.local import guard
from executors.agents.local.processes import PASSED, WorkerProcess

FOREVER = 600.0


class Worker:
    """A shell script under its guard, with pipes that block."""

    def __init__(self, script, grace=FOREVER, command=("sh", "-c")):
        self.process = WorkerProcess([*command, script], os.environ, grace)
        self.stdout, self.stderr, self.report = (
            os.fdopen(fd, "r") for fd in (self.process.stdout, self.process.stderr, self.process.report)
        )
        self.pid = int(self.report.readline().removeprefix("started "))

    def end(self):
        """The exit code of the worker, once its guard is gone."""
        lines = self.report.read().splitlines()
        self.process.reap()
        return [int(line.removeprefix("ended ")) for line in lines]

    def close(self):
        self.process.kill()
        self.process.reap()
        for stream in (self.stdout, self.stderr, self.report):
            stream.close()


@pytest.fixture
def start():
    workers = []

    def start_worker(*arguments, **options):
        workers.append(Worker(*arguments, **options))
        return workers[-1]

    yield start_worker
    for worker in workers:
        worker.close()


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", -9), ("kill -15 $$", -15)])
def test_the_end_of_the_worker_is_reported(start, script, code):
    assert start(script).end() == [code]


def test_the_worker_is_what_was_reported_and_has_its_streams(start):
    worker = start("echo $$; echo error >&2; cat")
    assert worker.end() == [0]
    assert int(worker.stdout.read()) == worker.pid
    assert worker.stderr.read() == "error\n"


def test_the_worker_has_the_signals_of_an_ordinary_process(start):
    worker = start("grep -E 'Sig(Blk|Ign)' /proc/self/status")
    assert worker.end() == [0]
    masks = {name: int(mask, 16) for name, mask in (line.split(":") for line in worker.stdout)}
    assert masks["SigBlk"] == 0
    assert not masks["SigIgn"] & 1 << signal.SIGPIPE - 1


def test_the_worker_has_the_limit_of_descriptors_that_its_driver_had_at_first(start):
    """A driver raises its own limit, but the program of the user may call select()."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1] - 1, limits[1]))
    try:
        with descriptors.raised_limit():
            worker = start("ulimit -Sn; ulimit -Hn")
            assert worker.end() == [0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        descriptors._first.clear()
    assert [int(line) for line in worker.stdout] == [limits[1] - 1, limits[1]]


def test_descriptors_of_the_guard_do_not_reach_the_worker(start):
    worker = start("ls /proc/self/fd")
    assert worker.end() == [0]
    assert worker.stdout.read().split() == ["0", "1", "2", "3"]  # 3 is the folder that is listed


@pytest.mark.parametrize(
    ("program", "code", "text"),
    [
        (
            "/no/such/program",
            127,
            "No such file or directory; if it is there, the interpreter in its first line is not",
        ),
        ("/proc", 126, "Permission denied"),
    ],
)
def test_a_program_that_cannot_be_run_is_a_sentence(start, program, code, text):
    worker = start("", command=(program,))
    assert worker.end() == [code]
    assert worker.stderr.read() == f"cannot run {program}: {text}\n"


def test_asking_lets_the_worker_end_in_its_own_way(start):
    worker = start("trap 'echo asked; exit 5' TERM; echo ready; while :; do sleep 0.02; done")
    assert worker.stdout.readline() == "ready\n"
    worker.process.terminate()
    assert worker.end() == [5]
    assert worker.stdout.read() == "asked\n"


def test_a_worker_that_does_not_listen_is_killed_after_the_grace(start):
    worker = start("trap '' TERM; echo ready; while :; do sleep 600; done", grace=0.1)
    assert worker.stdout.readline() == "ready\n"
    worker.process.terminate()
    assert worker.end() == [-9]


def test_hurrying_kills_without_grace(start):
    worker = start("trap '' TERM; echo ready; while :; do sleep 600; done")
    assert worker.stdout.readline() == "ready\n"
    worker.process.terminate()
    worker.process.hurry()
    assert worker.end() == [-9]


GRANDCHILDREN = "setsid sh -c 'setsid sleep 600 & echo $!; sleep 600' & sleep 600 & echo $!; "


@pytest.mark.parametrize("end", ["exit 0", "kill -9 $$"])
def test_the_end_of_the_worker_ends_its_grandchildren_in_whatever_session(start, end):
    worker = start(GRANDCHILDREN + f"read line < /dev/zero & {end}")
    assert len(worker.end()) == 1
    assert not any(map(psutil.pid_exists, map(int, worker.stdout.read().split())))


def test_asking_ends_the_grandchildren_too(start):
    worker = start(GRANDCHILDREN + "wait")
    pids = [int(worker.stdout.readline()) for _ in range(2)]
    assert all(map(psutil.pid_exists, pids))
    worker.process.terminate()
    assert worker.end() in ([-signal.SIGTERM], [0])  # 0: the shell saw the end of its child before it was asked itself
    assert not any(map(psutil.pid_exists, pids))


PARENT = """
import os, signal, subprocess, sys
names = {number: signal.Signals(number).name for number in (2, 15)}
def hear(number, frame):
    os.kill(child.pid, 0)
    os.write(1, f"{names[number]} {child.poll()}\\n".encode())  # at once: the child writes there, too
    if sys.argv[1] == "end":
        sys.exit(5)
for number in names:
    signal.signal(number, hear)
reader, writer = os.pipe()
serve = f"trap 'echo child; exit' TERM; echo >&{writer}; while :; do sleep 0.02; done"
child = subprocess.Popen(["sh", "-c", serve], pass_fds=[writer])
os.read(reader, 1)
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize("wrapper", [(), ("sh", "-c", '"$@"; exit', "sh"), ("bash", "-c", '"$@"; exit', "sh")])
@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT")])
def test_the_children_of_a_rank_serve_it_until_it_has_ended(start, wrapper, number, name):
    """Such as the workers of a DataLoader: their end would raise in the rank. A shell may stand before the rank."""
    worker = start("end", command=(*wrapper, sys.executable, "-c", PARENT))
    assert worker.stdout.readline() == "ready\n"
    worker.process.terminate(number)
    assert worker.end()[0] in (5, -number, 1)  # 1: bash, whose child has handled SIGINT
    assert worker.stdout.read() == f"{name} None\nchild\n"


def test_the_children_of_a_rank_that_does_not_end_are_asked_before_all_are_killed(start):
    worker = start("stay", grace=1.0, command=(sys.executable, "-c", PARENT))
    assert worker.stdout.readline() == "ready\n"
    worker.process.terminate(signal.SIGINT)
    assert worker.end() == [-9]
    heard = worker.stdout.read().splitlines()
    assert heard[0] == "SIGINT None"
    assert sorted(heard[1:])[-1] == "child"
    assert any(line.startswith("SIGTERM") for line in heard)


HEAR = """
import os, signal, sys
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
    signal.signal(number, lambda number, frame: print(signal.Signals(number).name, flush=True))
print("ready", flush=True)
while True:
    signal.pause()
"""


PYTHON_WRAPPER = sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:], check=False)"


@pytest.mark.parametrize(
    "wrapper", [(), ("sh", "-c", '"$@"; exit', "sh"), ("bash", "-c", '"$@"; exit', "sh"), PYTHON_WRAPPER]
)
def test_notices_are_passed_on_to_the_rank(start, wrapper):
    worker = start("", command=(*wrapper, sys.executable, "-c", HEAR))
    assert worker.stdout.readline() == "ready\n"
    for number in PASSED:
        worker.process.pass_on(number)
        assert worker.stdout.readline() == f"{signal.Signals(number).name}\n"
    worker.process.hurry()
    assert worker.end() == [-9]


@pytest.mark.parametrize("trap", ["", "trap '' USR1;"])
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_notice_does_not_end_a_worker_that_has_no_handler(start, trap, number):
    worker = start(f"{trap} (sleep 600 & echo $!; wait) & echo; read line < /dev/zero")
    worker.process.pass_on(number)
    assert worker.report.readline() == f"unheard {int(number)}\n"
    worker.process.terminate()
    assert worker.end() == [-signal.SIGTERM]


def test_a_closed_terminal_ends_a_worker_that_has_no_handler(start):
    worker = start("read line < /dev/zero")
    worker.process.pass_on(signal.SIGHUP)
    assert worker.end() == [-signal.SIGHUP]


WAIT = """
import signal, threading
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print("ready", flush=True)
thread = threading.Thread(target=lambda: print(signal.sigwait([signal.SIGUSR1]).name))
thread.start()
thread.join()
"""


def test_a_rank_whose_thread_waits_for_a_notice_gets_it(start):
    """By sigwait(), for which the main thread blocks the signal; there is no handler."""
    worker = start("", command=(sys.executable, "-c", WAIT))
    assert worker.stdout.readline() == "ready\n"
    worker.process.pass_on(signal.SIGUSR1)
    assert worker.end() == [0]
    assert worker.stdout.read() == "SIGUSR1\n"


def test_a_shell_that_blocks_a_notice_does_not_wait_for_it(start):
    """It blocks signals while it waits for a child; here it inherits that."""
    command = "env", "--block-signal=USR1", "bash", "-c", "echo ready; read line < /dev/zero"
    worker = start("", command=command)
    assert worker.stdout.readline() == "ready\n"
    worker.process.pass_on(signal.SIGUSR1)
    assert worker.report.readline() == f"unheard {int(signal.SIGUSR1)}\n"
    worker.process.hurry()
    assert worker.end() == [-9]


BLOCK = """
import signal
for how in (signal.SIG_BLOCK, signal.SIG_UNBLOCK):
    signal.pthread_sigmask(how, [signal.SIGUSR1])
    print(flush=True)
    input()
"""


@pytest.mark.parametrize("is_moment", [True, False])
def test_a_process_that_blocks_a_notice_for_a_moment_does_not_wait_for_it(monkeypatch, is_moment):
    """As any does that starts another one."""
    command = [sys.executable, "-c", BLOCK]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()

        def unblock(_):
            process.stdin.write(b"\n")
            process.stdin.flush()
            process.stdout.readline()

        monkeypatch.setattr(guard.time, "sleep", unblock if is_moment else lambda _: None)
        assert guard._heeds(process.pid, signal.SIGUSR1) != is_moment
        process.kill()


FORK = """
import os, signal
def hear(number, frame):
    os.write(1, b"heard\\n")
    os.write(writer, b"0")
signal.signal(signal.SIGUSR1, hear)
reader, writer = os.pipe()
if os.fork() == 0:
    os.read(reader, 1)
    os._exit(0)
print("ready", flush=True)
os.wait()
"""


def test_the_children_of_a_rank_do_not_get_its_notices(start):
    """A forked worker of a DataLoader has the handler of the rank, but the notice is meant for the rank."""
    worker = start("", command=(sys.executable, "-c", FORK))
    assert worker.stdout.readline() == "ready\n"
    worker.process.pass_on(signal.SIGUSR1)
    assert worker.end() == [0]
    assert worker.stdout.read() == "heard\n"


def test_a_notice_that_the_driver_did_not_send_is_not_passed_on(start):
    """A batch system signals the guard and the rank."""
    worker = start("", command=(sys.executable, "-c", HEAR))
    assert worker.stdout.readline() == "ready\n"
    guard = psutil.Process(worker.pid).ppid()
    subprocess.run(["kill", "-USR1", str(guard)], check=True)
    worker.process.pass_on(signal.SIGUSR2)
    assert worker.stdout.readline() == "SIGUSR2\n"


def test_the_worker_does_not_outlive_its_guard(start):
    worker = start("echo ready; exec sleep 600")
    assert worker.stdout.readline() == "ready\n"
    worker.process.kill()
    assert worker.end() == []
    assert worker.stdout.read() == ""  # the last writer is gone
    assert worker.process.reap() == -signal.SIGKILL
