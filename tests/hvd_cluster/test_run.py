"""run(): real processes on this host."""

import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from collectives.api import PeerLostError
from executors.api import ExecutorError, RemoteError, WorkerError
from hvd_cluster import run
from hvd_cluster.core import basics
from tests import startup

ROOT = Path(__file__).parents[2]


def rank():
    return int(os.environ["HOROVOD_RANK"])


def place(prefix, suffix="."):
    return f"{prefix}{os.environ['HOROVOD_RANK']}/{os.environ['HOROVOD_SIZE']}{suffix}"


def fail_on_rank_1(make_error):
    if rank() == 1:
        raise make_error()
    threading.Event().wait(600)


class Refused(Exception):
    def __init__(self, code, *, where):
        super().__init__(code)
        self.where = where


def test_results_come_in_the_order_of_the_ranks():
    assert run(place, ("rank ",), {"suffix": "!"}, num_proc=3) == ["rank 0/3!", "rank 1/3!", "rank 2/3!"]


def test_one_process_is_the_default_and_is_another_process():
    assert run(os.getpid) != [os.getpid()]


def test_closures_and_lambdas_travel():
    factor = 10
    assert run(lambda: factor * rank(), num_proc=2) == [0, 10]


def test_what_workers_write_has_their_rank(tmp_path, capsys):
    assert run(lambda: sys.stdout.write(f"line {rank()}\n"), num_proc=2, output_filename=tmp_path, verbose=True) == [
        7,
        7,
    ]
    captured = capsys.readouterr()
    assert sorted(captured.out.splitlines()) == ["[0]<stdout>:line 0", "[1]<stdout>:line 1"]
    assert "hvdrun: rank 1 of 2 is process" in captured.err
    assert (tmp_path / "rank.1" / "stdout").read_text() == "line 1\n"


def test_env_is_added():
    assert run(lambda: (os.environ["ADDED"], "PATH" in os.environ), env={"ADDED": "x"}) == [("x", True)]


def test_workers_find_modules_where_the_driver_does(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def answer():\n    return 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    only_here = __import__("only_here")
    path = run(lambda: (only_here.answer(), sys.path))
    assert path[0][0] == 42
    assert [entry for entry in path[0][1] if entry in sys.path] == list(dict.fromkeys(path[0][1]))


@pytest.mark.parametrize(
    "make_error",
    [
        lambda: ValueError("bad"),
        lambda: OSError(2, "no", "file"),
        lambda: Refused(7, where="x"),
        lambda: StopIteration("end"),
        lambda: GeneratorExit("end"),
    ],
)
def test_an_exception_of_a_worker_is_raised_as_itself_and_ends_the_others(make_error):
    error = make_error()
    with pytest.raises(type(error)) as caught:
        run(fail_on_rank_1, (make_error,), num_proc=3)
    assert type(caught.value) is type(error)
    assert (caught.value.args, vars(caught.value)) == (error.args, vars(error))
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteError)
    assert (cause.rank, cause.host) == (1, "localhost")
    assert "in fail_on_rank_1" in cause.traceback


@pytest.mark.parametrize(
    ("end", "code", "text"),
    [
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            -9,
            r"was killed by signal 9 \(SIGKILL.* before its function ret",
        ),
        (lambda: os._exit(0), 0, "ended with exit code 0 before its function returned"),
        (lambda: os._exit(3), 3, "ended with exit code 3 before its function returned"),
        (lambda: sys.exit(4), 4, r"called sys\.exit\(4\) instead of returning a value"),
        (threading.Lock, None, r"returned a value of type _thread\.lock that cannot be pickled"),
    ],
)
def test_a_worker_without_a_result_is_named_and_the_others_are_ended(end, code, text):
    def function():
        if rank() == 1:
            return end()
        threading.Event().wait(600)

    with pytest.raises(WorkerError, match=f"rank 1 on localhost {text}") as caught:
        run(function, num_proc=3)
    assert (caught.value.rank, caught.value.host, caught.value.exit_code) == (1, "localhost", code)


@pytest.mark.parametrize("ended", [0, 1])
def test_ranks_that_wait_in_init_for_one_that_has_ended_hear_of_it_at_once(ended):
    def function():
        if rank() != ended:
            basics.init()

    with pytest.raises(PeerLostError, match=f"rank {ended} on host localhost ended with exit code 0 and did not come"):
        run(function, num_proc=2)


def test_large_arguments_and_results():
    data = bytes(range(256)) * (30_000_000 // 256)
    assert run(lambda text: text[::-1], (data,), num_proc=2) == [data[::-1]] * 2


def test_what_cannot_be_pickled_is_named_before_anything_starts(monkeypatch):
    monkeypatch.setattr("subprocess.Popen", None)
    lock = threading.Lock()

    def locked():
        return lock

    with pytest.raises(
        TypeError, match=r"\.locked cannot be sent to the workers: the function.*lock.* inside the function"
    ):
        run(locked, num_proc=2)
    with pytest.raises(TypeError, match="place cannot be sent to the workers: argument 0 cannot be pickled"):
        run(place, (lock,), num_proc=2)
    with pytest.raises(TypeError, match="5 is not a function"):
        run(5)


@pytest.mark.parametrize("value", [0, -1, 2.0, "2", True])
def test_a_bad_number_of_processes_is_named(monkeypatch, value):
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises(ValueError, match=f"num_proc is {value!r}, but must be an integer of at least 1"):
        run(place, num_proc=value)


def test_other_bad_arguments_are_named(monkeypatch):
    monkeypatch.setattr("subprocess.Popen", None)
    for wrong in (-1, 0, "5", True, 3e6, float("nan")):
        with pytest.raises(ValueError, match=f"start_timeout is {wrong!r}, but must be a positive number of seconds"):
            run(place, start_timeout=wrong)
    for name, value in (("A", 1), (1, "A"), ("A=B", "C"), ("", "A"), ("A", "B\0"), ("\0", "B"), ("A", "\ud800")):
        text = re.escape(f"env has {name!r}: {value!r}, but names and values must be strings")
        with pytest.raises(ValueError, match=text):
            run(place, env={name: value})
    for wrong in (["A=B"], "A", 5):
        with pytest.raises(ValueError, match=re.escape(f"env is {wrong!r}, but must be a dict of variables")):
            run(place, env=wrong)
    for taken in ("HOROVOD_RANK", "HOROVOD_GLOO_RENDEZVOUS_PORT", "_HOROVOD_SECRET_KEY"):
        with pytest.raises(ValueError, match=rf"env has {taken}, which run\(\) sets; leave them out"):
            run(place, env={"A": "B", taken: "1"})
    for wrong in (1, "ab", {1}):
        with pytest.raises(TypeError, match=re.escape(f"args is {wrong!r}, but must be a list or tuple")):
            run(place, wrong)
    for wrong in (1, [("suffix", "!")], {1: 2}):
        with pytest.raises(TypeError, match=re.escape(f"kwargs is {wrong!r}, but must be a dict")):
            run(place, ("rank ",), wrong)
    with pytest.raises(ValueError, match="num_proc=2 and its old name np=3 are both given"):
        run(place, num_proc=2, np=3)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"min_num_proc": 0}, "min_num_proc is 0, but must be an integer of at least 1"),
        ({"min_num_proc": 3, "num_proc": 2}, "min_num_proc is 3 and num_proc is 2, but they must"),
        ({"max_num_proc": "4"}, "max_num_proc is '4', but must be an integer of at least 1"),
        ({"reset_limit": 3}, "reset_limit: this is for elastic jobs; give min_num_proc, max_num_proc or a host"),
        ({"min_num_proc": 1, "reset_limit": -1}, "reset_limit is -1, but must be an integer of at least 0"),
        ({"min_num_proc": 1, "elastic_timeout": 0}, "elastic_timeout is 0, but must be a positive number of seconds"),
        ({"min_num_proc": 1, "cooldown_range": 5}, "cooldown_range is 5, but must be two numbers of seconds, such as"),
        ({"slots": 2}, "slots is for the hosts of a host_discovery_script, which is missing"),
        (
            {"remote_shell": "ssh"},
            "remote_shell is for other hosts; give one of hosts, hostfile, host_discovery_script",
        ),
        ({"hosts": "a"}, "hosts is 'a', but must be hosts with their slots, such as 'node1:4,node2:4'; 'a' is not"),
        ({"hosts": 5}, "hosts is 5, but must be hosts with their slots, such as 'node1:4,node2:4'; "),
        ({"hosts": "localhost:1", "num_proc": 2}, "2 processes need 2 slots, but the hosts have 1 (localhost:1)"),
        ({"hosts": "a:1", "hostfile": "b"}, "hosts and hostfile both say which hosts there are; give one"),
        ({"hostfile": "/nope"}, "the host file '/nope' cannot be read ("),
        ({"hosts": "a:1", "ssh_port": 70000}, "ssh_port is 70000, but must be at most 65535"),
        ({"hosts": "a:1", "ssh_port": 1, "remote_shell": "x"}, "ssh_port is for ssh, but remote_shell is another"),
        ({"use_mpi": True, "use_gloo": True}, "use_gloo and use_mpi contradict each other: give"),
        ({"mpi_args": "-x"}, "mpi_args is '-x', but is for use_mpi=True; give both, or leave it out"),
        (
            {"use_mpi": True, "mpi_args": "'"},
            'mpi_args is "\'", but must be arguments as in a shell; No closing quotation',
        ),
        ({"use_mpi": True, "mpi_args": ["-x"]}, "mpi_args is ['-x'], but must be arguments as in a shell, in one text"),
        ({"use_mpi": True, "max_np": 3}, "max_np is for processes that run() starts itself, and use_mpi lets mpirun"),
        ({"use_mpi": True, "remote_shell": "x"}, "remote_shell is for processes that run() starts itself, and use_mpi"),
        ({"network_interfaces": "eth0,"}, "nics is "),
        ({"slots": 0, "host_discovery_script": "hosts"}, "slots is 0, but must be an integer of at least 1"),
        ({"host_discovery_script": " "}, "host_discovery_script is ' ', but must be a program, or a line for the"),
        ({"host_discovery_script": 5}, "host_discovery_script is 5, but must be a program, or a line for the shell"),
        ({"env": {"HOROVOD_WORKER_ID": "x"}}, "env has HOROVOD_WORKER_ID, which run() sets; leave them out"),
    ],
)
def test_bad_arguments_of_elastic_jobs_are_named(monkeypatch, arguments, text):
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        run(place, **arguments)


def test_mpirun_has_no_live_page_and_the_function_runs(monkeypatch, caplog):
    monkeypatch.setattr(sys.modules["hvd_cluster.function_job"], "run_function_by_mpi", lambda *job: ["done"])
    assert run(place, num_proc=1, use_mpi=True, dashboard=True) == ["done"]
    (line,) = caplog.messages
    assert line.startswith("no live page: mpirun starts the ranks, and no driver collects their numbers. Training")


def test_a_discovery_script_that_fails_is_an_executor_error():
    with pytest.raises(ExecutorError, match="the host discovery script 'exit 3' ended with exit code 3"):
        run(place, num_proc=1, host_discovery_script="exit 3")


def test_all_slots_that_a_script_finds_are_used():
    found = run(rank, min_num_proc=1, host_discovery_script="echo localhost:2")
    assert found == [0, 1]


def test_a_job_inside_a_worker_of_an_elastic_job_is_not_elastic():
    def outer():
        return os.environ["HOROVOD_ELASTIC"], run(lambda: os.environ["HOROVOD_ELASTIC"])

    assert run(outer, min_num_proc=1) == [("1", ["0"])]


def test_np_is_an_old_name():
    with pytest.warns(DeprecationWarning, match="use num_proc") as caught:
        assert run(rank, np=2) == [0, 1]
    assert caught[0].filename == __file__


def test_the_arguments_of_horovod_at_their_defaults():
    defaults = dict.fromkeys(["hosts", "hostfile", "ssh_port", "ssh_identity_file", "mpi_args", "executable", "np"])
    assert run(rank, (), None, 2, **defaults, use_gloo=True, use_mpi=False, disable_cache=True) == [0, 1]


def test_hosts_in_the_order_that_is_given(monkeypatch):
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")

    def place():
        return os.environ["HOROVOD_RANK"], os.environ.get("HVD_TEST_HOST"), os.environ["HOROVOD_LOCAL_SIZE"]

    found = run(place, num_proc=3, hosts="b:2,localhost:4", remote_shell="env HVD_TEST_HOST={host}")
    assert found == [("0", "b", "2"), ("1", "b", "2"), ("2", None, "1")]


def test_network_interfaces_are_variables():
    def interfaces():
        return os.environ["HOROVOD_GLOO_IFACE"], os.environ["NCCL_SOCKET_IFNAME"]

    assert run(interfaces, num_proc=1, network_interfaces="lo,eth0") == [("lo", "lo,eth0")]


def test_jobs_can_run_at_the_same_time_in_threads():
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(run, place, (f"{job} ",), num_proc=2) for job in range(2)]
        assert [job.result() for job in jobs] == [["0 0/2.", "0 1/2."], ["1 0/2.", "1 1/2."]]


def test_the_secret_is_on_no_command_line():
    def look():
        def command_line(pid):
            return Path(f"/proc/{pid}/cmdline").read_text()

        return os.environ["_HOROVOD_SECRET_KEY"], command_line("self"), command_line(os.getppid())

    (secret, worker, guard), *_ = run(look)
    assert len(secret) == 44
    assert "executors.agents.local.task" in worker
    assert "guard.py" in guard
    assert secret not in worker + guard


SCRIPT = """
import os, sys
import neighbour
from hvd_cluster import run

class OwnError(Exception):
    pass

class Point:
    def __init__(self, x):
        self.x = x

def function(point):
    if point.x < 0:
        raise OwnError(neighbour.NAME)
    return Point(point.x + int(os.environ["HOROVOD_RANK"]))

points = run(function, (Point(5),), num_proc=2)
assert [type(point) for point in points] == [Point, Point]
assert [point.x for point in points] == [5, 6]
try:
    run(function, (Point(-1),), num_proc=2)
except OwnError as error:
    print(error, type(error.__cause__).__name__)
"""


def test_functions_and_classes_of_the_main_script_travel(tmp_path):
    (tmp_path / "neighbour.py").write_text("NAME = 'next door'\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "elsewhere").mkdir()
    finished = subprocess.run(
        [sys.executable, "-W", "error", tmp_path / "script.py"],
        cwd=tmp_path / "elsewhere",
        env={**os.environ, "PYTHONPATH": startup.PATH},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (finished.stdout, finished.stderr, finished.returncode) == ("next door RemoteError\n", "", 0)
