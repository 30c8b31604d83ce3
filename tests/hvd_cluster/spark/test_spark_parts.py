"""Parts that need no Spark: arguments, slots, rows, output to the driver."""

import importlib
import io
import os
import pickle
import socket
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from unittest import mock

import numpy as np
import pytest
from pyspark import SparkContext

from collectives.net.frames import LENGTH, LONGEST_HELLO, NONCE_BYTES, Opener, frame, seal
from executors.agents.spark import connection as connections
from executors.agents.spark import console as consoles
from executors.agents.spark import console as displays
from executors.agents.spark import meeting as meetings
from executors.agents.spark import session as sessions
from executors.agents.spark.connection import GOODBYE, TaskHello, TaskIdentity
from executors.agents.spark.console import Console, Display
from executors.agents.spark.meeting import connect_to_driver
from executors.agents.spark.rendezvous import TaskLocation, server_host
from executors.agents.spark.results import CHUNK_BYTES, rows_of
from executors.agents.spark.session import Session, check_settings, promised, reason, shortage
from executors.api import ExecutorError, JobSecret, PlacementError
from executors.driver.outcome import observe
from executors.job.elastic_arguments import ElasticArguments
from executors.job.output import ConsoleSink, Output
from hvd_cluster.spark import run
from hvd_cluster.spark.launch import SparkLaunch, _elastic_size

SECRET = JobSecret()
HOST = "127.0.0.1"


def identity(rank=0):
    return TaskIdentity(rank, f"host-{rank}", f"name of {rank}")


class Driver:
    """The output and the messages of a console."""

    def __init__(self):
        self.stdout, self.stderr = io.StringIO(), io.StringIO()
        self.identities, self.losses, self.failures, self.results = [], [], [], []
        self.connected, self.failed = self.identities.append, self.failures.append
        self.changed = threading.Event()
        output = Output(2, stdout=self.stdout, stderr=self.stderr)
        self.console = Console(HOST, 2, SECRET, output, self)

    def lost(self, identity):
        self.losses.append(identity)
        self.changed.set()

    def delivered(self, outcome):
        self.results.append(bytes(outcome))

    def call(self, partition=0, secret=SECRET):
        return connect_to_driver([HOST], self.console.port, secret, partition, 60.0)

    def connect_to_driver(self, rank=0):
        """The connection of a task that does not meet the others here."""
        meeting = self.call(rank)
        assert not meeting.is_by_driver()
        assert meeting.identify(identity(rank))
        return meeting.connection

    @contextmanager
    def __call__(self):
        with self.console:
            yield self


@pytest.fixture
def driver():
    with Driver()() as driver:
        yield driver


def until(condition):
    """Polls; the timeout of the test bounds it."""
    while not condition():
        time.sleep(0.01)


@pytest.fixture
def impatient(monkeypatch):
    """A dial is tried once."""
    monkeypatch.setattr(meetings, "REACH_SECONDS", 0.0)


@pytest.fixture
def decided(monkeypatch):
    """The driver does not wait for other tasks."""
    monkeypatch.setattr(consoles, "DECISION_SECONDS", 0.0)


@pytest.mark.usefixtures("decided")
class TestLine:
    def test_output_is_shown_and_a_goodbye_is_no_loss(self, driver):
        connection = driver.connect_to_driver(1)
        for name, data in (("stdout", b"one\nt"), ("stderr", b"beware\n"), ("stdout", b"wo\nrest")):
            connection.sink(1, name).feed(data)
        connection.send(GOODBYE)
        until(lambda: driver.stdout.getvalue().count("\n") == 3)
        connection.close()
        assert driver.stdout.getvalue() == "[1]<stdout>:one\n[1]<stdout>:two\n[1]<stdout>:rest\n"
        assert driver.stderr.getvalue() == "[1]<stderr>:beware\n"
        assert (driver.identities, driver.losses) == ([identity(1)], [])

    def test_a_warning_is_logged_here(self, driver, caplog):
        connection = driver.connect_to_driver(1)
        connection.warn("beware")
        connection.send(GOODBYE)
        until(lambda: "beware" in caplog.text)
        connection.close()
        assert driver.stderr.getvalue() == ""

    @pytest.mark.parametrize("size", [0, 1, connections.RESULT_BYTES, 3 * connections.RESULT_BYTES + 1])
    def test_a_result_of_any_size_arrives(self, driver, size):
        data = os.urandom(size)
        connection = driver.connect_to_driver(1)
        assert connection.deliver(data)
        assert driver.results == [data]
        connection.send(GOODBYE)
        connection.close()

    def test_a_result_that_is_not_of_the_task_is_not_taken(self, driver):
        connection = driver.connect_to_driver(1)
        connection.send(connections.RESULT, b"a part that somebody else has sent")
        assert not connection.deliver(b"a result")
        assert driver.changed.wait(10)
        assert (driver.results, driver.losses) == ([], [identity(1)])
        connection.close()

    def test_a_result_is_not_delivered_to_a_driver_that_ends(self):
        def deliver():
            until(lambda: connection.lost)
            answers.append(connection.deliver(b"a result"))
            connection.close()

        answers, thread = [], threading.Thread(target=deliver)
        with Driver()() as driver:
            connection = driver.connect_to_driver(1)
            thread.start()
        thread.join()
        assert (answers, driver.results) == ([False], [])

    def test_a_task_that_ends_without_a_goodbye_is_lost(self, driver):
        driver.connect_to_driver(1).close()
        assert driver.changed.wait(10)
        assert driver.losses == [identity(1)]

    def test_a_driver_that_ends_is_noticed(self, monkeypatch):
        monkeypatch.setattr(consoles, "STOP_SECONDS", 0.1)
        with Driver()() as driver:
            connection = driver.connect_to_driver()
            assert not connection.lost
        until(lambda: connection.lost)
        connection.sink(0, "stdout").feed(b"to nobody\n")
        connection.close()

    def test_a_driver_that_ends_waits_for_its_tasks(self):
        def end():
            until(lambda: connection.lost)
            connection.sink(0, "stdout").feed(b"the last words\n")
            connection.close()

        with Driver()() as driver:
            connection = driver.connect_to_driver()
            task = threading.Thread(target=end)
            task.start()
        assert driver.stdout.getvalue() == "[0]<stdout>:the last words\n"
        task.join()

    def test_a_task_that_comes_when_the_driver_ends_is_refused(self, monkeypatch):
        monkeypatch.setattr(consoles, "LATE_SECONDS", 60.0)
        refused = []

        def come():
            until(lambda: driver.console._stopping)
            try:
                driver.call(1)
            except ConnectionRefusedError as error:
                refused.append(str(error))

        driver, task = Driver(), threading.Thread(target=come)
        console = driver.console.__enter__()
        driver.connect_to_driver(0).close()
        task.start()
        console.__exit__(KeyboardInterrupt, None, None)
        task.join()
        assert refused == ["the driver is about to end"]

    def test_a_task_that_introduces_itself_when_the_driver_ends_is_refused(self):
        answers = []

        def introduce():
            until(lambda: driver.console._stopping)
            hello = TaskHello(1)
            task.sendall(frame(hello.seal(SECRET, nonce)))
            answers.extend(Opener(hello.keys(SECRET, nonce)[1]).feed(task.recv(100)))

        driver = Driver()
        console = driver.console.__enter__()
        with socket.create_connection((HOST, console.port), 30) as task:
            nonce = task.recv(NONCE_BYTES)
            thread = threading.Thread(target=introduce)
            thread.start()
            console.__exit__(KeyboardInterrupt, None, None)
            thread.join()
        assert answers == [connections.REFUSED]

    def test_a_second_task_of_a_rank_is_refused(self, driver):
        first = driver.connect_to_driver(1)
        again = driver.call(1)
        assert not again.is_by_driver()
        assert not again.identify(identity(1))
        second = driver.connect_to_driver(0)
        for connection in (again.connection, first, second):
            connection.send(GOODBYE)
            connection.close()
        assert driver.identities == [identity(1), identity(0)]

    def test_somebody_without_the_secret_is_let_out(self, driver, impatient, caplog):
        assert driver.call(0, JobSecret()) is None
        until(lambda: len(caplog.records) == 2)
        texts = sorted(record.message for record in caplog.records)
        assert texts[0].endswith("is not the driver (it closed the connection)")
        assert texts[1].startswith("a connection to the driver came from a process that is not a task of this job")
        assert not driver.identities

    def test_a_long_hello_is_refused_by_its_length(self, driver, caplog):
        with socket.create_connection((HOST, driver.console.port), 30) as stranger:
            stranger.recv(NONCE_BYTES)
            stranger.sendall(LENGTH.pack(LONGEST_HELLO + 1))
            assert stranger.recv(1) == b""
        assert f"a frame of {LONGEST_HELLO + 1} bytes is refused" in caplog.text

    def test_a_call_that_does_not_get_through_is_tried_again(self, driver, monkeypatch, caplog):
        connect, problems = socket.create_connection, [TimeoutError(), ConnectionRefusedError(), OSError()]

        def create_connection(*arguments):
            if problems:
                raise problems.pop()
            return connect(*arguments)

        monkeypatch.setattr(meetings.socket, "create_connection", create_connection)
        connection = driver.connect_to_driver(1)
        connection.send(GOODBYE)
        connection.close()
        assert not caplog.records

    def test_a_call_that_breaks_is_tried_again(self, driver, monkeypatch, caplog):
        connect, (broken, other) = socket.create_connection, socket.socketpair()
        other.close()
        calls = [broken]
        monkeypatch.setattr(
            meetings.socket, "create_connection", lambda *where: calls.pop() if calls else connect(*where)
        )
        connection = driver.connect_to_driver(1)
        connection.send(GOODBYE)
        connection.close()
        assert not calls
        assert not caplog.records

    @pytest.mark.usefixtures("impatient")
    def test_a_driver_that_cannot_be_reached(self, caplog):
        driver = Driver()
        with driver():
            port = driver.console.port
        assert connect_to_driver([HOST], port, SECRET, 0, 60.0) is None
        assert caplog.records[0].message.startswith(f"the driver cannot be reached at {HOST} port {port}")

    @pytest.mark.usefixtures("impatient")
    def test_a_driver_that_does_not_answer(self, monkeypatch, caplog):
        monkeypatch.setattr(meetings, "DIAL_SECONDS", 0.1)
        with socket.create_server((HOST, 0)) as silent:
            assert connect_to_driver([HOST], silent.getsockname()[1], SECRET, 0, 60.0) is None
        assert "is not the driver (timed out)" in caplog.text

    def test_a_stream_that_cannot_be_written_does_not_end_the_job(self, driver, caplog):
        connection = driver.connect_to_driver(0)
        driver.stdout.close()
        connection.sink(0, "stdout").feed(b"text\n")
        connection.sink(0, "stderr").feed(b"text\n")
        connection.send(GOODBYE)
        until(lambda: caplog.records)
        connection.close()
        assert [record.message.split(" (")[0] for record in caplog.records] == [
            "the output of workers cannot be written"
        ]
        assert not driver.losses


@pytest.mark.usefixtures("decided")
class TestFailures:
    def test_one_is_told(self, driver):
        connection = driver.connect_to_driver(1)
        connection.report(b"the outcome")
        connection.report(bytes(connections.LONGEST_FRAME))  # too long
        connection.send(GOODBYE)
        until(lambda: driver.failures)
        connection.close()
        assert driver.failures == [b"the outcome"]

    def test_one_that_somebody_else_made_is_not(self, driver, caplog):
        connection = driver.connect_to_driver(1)
        connection.send(connections.FAILURE, seal(SECRET.key, b"of another line", b"the outcome"))
        assert driver.changed.wait(30)
        connection.close()
        assert not driver.failures


class Stream(io.StringIO):
    """Blocks the first write until ``free`` is set; then raises ``error``, where there is one."""

    def __init__(self, error=None):
        super().__init__()
        self.entered, self.free = threading.Event(), threading.Event()
        self.error = error

    def write(self, text):
        self.entered.set()
        self.free.wait()
        if self.error:
            raise self.error
        return super().write(text)


class TestDisplay:
    def test_who_shows_does_not_wait_and_what_is_too_much_is_dropped(self, monkeypatch, caplog):
        monkeypatch.setattr(displays, "LARGEST_BACKLOG", 9)
        stream = Stream()
        sink = ConsoleSink(0, "stdout", stream)
        with Display() as display:
            for data in (b"one.\n", b"lost\n", b"lost\n"):
                display.show(sink, data)
            assert stream.entered.wait(30)
            stream.free.set()
            until(stream.getvalue)
            display.show(sink, b"two\n")
        assert stream.getvalue() == "[0]<stdout>:one.\n[0]<stdout>:two\n"
        assert [record.message for record in caplog.records] == [
            "the stream for the output of workers is too slow; some of the output is dropped"
        ]

    def test_a_stream_may_raise_anything(self, caplog):
        stream = Stream(RuntimeError("no"))
        stream.free.set()
        with Display() as display:
            for _ in range(3):
                display.show(ConsoleSink(0, "stdout", stream), b"text\n")
        assert [record.message for record in caplog.records] == [
            "the output of workers cannot be written (no) and is dropped from here on"
        ]

    def test_a_stream_that_takes_nothing_at_the_end_is_given_up(self, monkeypatch, caplog):
        monkeypatch.setattr(displays, "STOP_SECONDS", 0.05)
        stream = Stream()
        with Display() as display:
            display.show(ConsoleSink(0, "stdout", stream), b"text\n")
            assert stream.entered.wait(30)
        assert "is blocked; the remaining output is dropped" in caplog.text
        stream.free.set()


class TestRows:
    @pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 1])
    def test_an_outcome_is_cut_into_chunks(self, size):
        rows = [row for batch in rows_of(observe(lambda: bytes(size), 1, HOST)) for row in batch.to_pylist()]
        assert [(row["rank"], row["chunk"]) for row in rows] == [(1, number) for number in range(len(rows))]
        assert all(len(row["data"]) == CHUNK_BYTES for row in rows[:-1])
        assert pickle.loads(b"".join(row["data"] for row in rows)).unwrap() == bytes(size)


class TestPlaces:
    def test_tasks_of_one_host_meet_on_the_loopback(self):
        assert server_host([TaskLocation("a", "a", "10.0.0.1")] * 2, ["no-such-interface"]) == "127.0.0.1"

    def test_tasks_of_several_hosts_meet_on_the_way_to_the_others(self):
        # All of 127.0.0.0/8 is this host, which has the address of the destination on the way there.
        assert server_host([TaskLocation("a", "a", "10.0.0.1"), TaskLocation("b", "b", "127.0.0.7")], []) == "127.0.0.1"
        assert (
            server_host([TaskLocation("a", "a", "10.0.0.1"), TaskLocation("b", "b", "10.0.0.2")], ["lo"]) == "127.0.0.1"
        )


def late_session(monkeypatch, settings, *slots):
    """A session that sees more and more slots, and does not wait for what does not come."""
    for name in ("SETTLE_SECONDS", "FIRST_EXECUTOR_SECONDS", "LOOK_SECONDS"):
        monkeypatch.setattr(sessions, name, 0.0)
    monkeypatch.setattr(sessions, "_seen", {})
    session, counts = Session(mock.Mock()), iter(slots)
    monkeypatch.setattr(Session, "setting", lambda self, name: settings.get(name))
    monkeypatch.setattr(Session, "_slots", lambda self: next(counts))
    return session


class TestAddresses:
    @pytest.mark.parametrize(
        ("settings", "addresses"),
        [
            ({}, ("127.0.0.1", ["127.0.0.1"])),
            ({"spark.driver.host": "driver"}, ("driver", ["driver"])),
            ({"spark.driver.host": "[::1]"}, ("::1", ["::1"])),
            ({"spark.driver.host": "[fe80::1]", "spark.driver.bindAddress": "[::]"}, ("::", ["fe80::1"])),
        ],
    )
    def test_a_server_listens_where_spark_does(self, monkeypatch, settings, addresses):
        assert late_session(monkeypatch, settings).addresses() == addresses


class TestReason:
    def test_java_is_left_out(self):
        text = """An error occurred while calling o42.getResult.
: org.apache.spark.SparkException: Job aborted: the first reason
org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "task.py", line 10, in <module>
ValueError: no

\tat org.apache.spark.sql.Dataset.$anonfun$collect$6(Dataset.scala:2265)
\tat java.base/java.lang.Thread.run(Thread.java:840)
\t... 1 more
Driver stacktrace:
\tat org.apache.spark.Once.more(Once.scala:1)
Caused by: the first reason"""
        assert reason(text).splitlines() == [
            "org.apache.spark.SparkException: Job aborted: the first reason",
            "org.apache.spark.api.python.PythonException: Traceback (most recent call last):",
            '  File "task.py", line 10, in <module>',
            "ValueError: no",
        ]

    def test_a_module_that_is_missing_has_advice(self):
        text = "Traceback\nModuleNotFoundError: No module named 'pyarrow'"
        assert reason(text).startswith(f"{text}\nthe Python of the executors lacks a module: install hvd-cluster")


class TestSlots:
    def test_dynamic_allocation_is_refused(self):
        with pytest.raises(PlacementError, match=r"spark\.dynamicAllocation\.enabled=true\); set it to false"):
            check_settings({"spark.dynamicAllocation.enabled": "true"}.get)
        check_settings({"spark.dynamicAllocation.enabled": "false"}.get)
        check_settings({}.get)

    @pytest.mark.parametrize(
        ("master", "fits"), [("local", True), ("local[4]", True), ("local-cluster[2,1,1024]", False)]
    )
    def test_one_local_executor_is_never_dynamic(self, master, fits):
        settings = {"spark.dynamicAllocation.enabled": "true", "spark.master": master}
        with nullcontext() if fits else pytest.raises(PlacementError, match="set it to false"):
            check_settings(settings.get)

    @pytest.mark.parametrize(
        ("settings", "slots"),
        [
            ({"spark.executor.instances": "3", "spark.executor.cores": "4", "spark.task.cpus": "2"}, 6),
            ({"spark.executor.instances": "3"}, 3),
            ({"spark.cores.max": "5", "spark.task.cpus": "2"}, 2),
            ({"spark.executor.instances": "3", "spark.master": "local[2]"}, None),
            ({}, None),
        ],
    )
    def test_the_slots_that_are_asked_for(self, settings, slots):
        assert promised(settings.get) == slots

    @pytest.mark.parametrize(("cores", "size"), [("1", 2), ("2", 4)])
    def test_executors_that_were_asked_for_may_come_late(self, monkeypatch, cores, size):
        session = late_session(
            monkeypatch, {"spark.executor.instances": "2", "spark.executor.cores": cores}, 1, 1, 1, 4
        )
        session.check_slots(size, 60.0)

    def test_an_executor_that_was_lost_may_come_again(self, monkeypatch, caplog):
        session = late_session(monkeypatch, {}, 2, 1, 1, 1, 2)
        session.check_slots(2, 60.0)
        session.check_slots(2, 60.0)
        assert [record.message for record in caplog.records] == [
            "1 of 2 slots so far; waiting for executors that Spark has to start"
        ]

    def test_executors_that_nobody_asked_for_do_not_come(self, monkeypatch):
        with pytest.raises(PlacementError, match="have 1 "):
            late_session(monkeypatch, {"spark.executor.instances": "2"}, 1, 1, 1, 4).check_slots(3, 60.0)

    def test_a_shortage_has_the_numbers(self):
        text = str(shortage(8, 3, {"spark.task.cpus": "2"}.get))
        assert "8 workers need 8 task slots" in text
        assert "have 3 (spark.task.cpus=2); set num_proc to at most 3, or give the application more" in text
        assert "spark.executor.cores" in text


class FakeSession:
    def __init__(self, size):
        self.default_size = lambda: size


@pytest.mark.parametrize(
    ("default", "least", "most", "size"),
    [(4, 1, 2, 2), (4, 1, None, 4), (2, 3, None, 3), (2, None, 4, 2), (None, 1, 3, 3), (None, 2, None, 2)],
)
def test_an_elastic_job_begins_with_the_parallelism_of_spark_within_its_limits(default, least, most, size):
    """One that began with the least would end before it saw the rows of the others."""
    assert _elastic_size(FakeSession(default), ElasticArguments(least, most)) == size


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ({"num_proc": 0}, "num_proc is 0, but must be an integer of at least 1"),
            ({"num_proc": "2"}, "num_proc is '2', but"),
            ({"num_proc": True}, "num_proc is True, but"),
            ({"num_proc": np.int64(0)}, r"num_proc is np\.int64\(0\), but"),
            ({"num_proc": np.float64(2)}, r"num_proc is np\.float64\(2\.0\), but"),
            ({"start_timeout": -1}, "start_timeout is -1, but must be a positive number of seconds"),
            ({"use_mpi": True}, "without MPI; leave out use_mpi"),
            ({"extra_mpi_args": "-x"}, "leave out use_mpi and extra_mpi_args"),
            ({"use_gloo": False}, "and use_gloo=False"),
            ({"env": {"HOROVOD_RANK": "1"}}, r"env has HOROVOD_RANK, which run\(\) sets"),
            ({"stdout": "log"}, "stdout is 'log', but must be a text stream that can be written, such as sys.stderr"),
            ({"stderr": io.BytesIO()}, "stderr is .* must be a text stream .*bytes-like object is required"),
            ({"nics": [5]}, "nics is .* must be names of network interfaces"),
        ],
    )
    def test_bad_ones_are_named(self, arguments, text):
        with pytest.raises(ValueError, match=text):
            run(print, **arguments)

    def test_what_is_an_integer_to_python_is_a_number_of_workers(self):
        size = SparkLaunch.of(num_proc=np.int64(2)).num_proc
        assert (size, type(size)) == (2, int)
        assert SparkLaunch.of().num_proc is None

    def test_the_start_timeout_of_the_environment(self, monkeypatch):
        monkeypatch.setenv("HOROVOD_SPARK_START_TIMEOUT", "soon")
        with pytest.raises(ValueError, match="HOROVOD_SPARK_START_TIMEOUT is 'soon', but must be a positive number"):
            run(print)

    def test_what_cannot_be_pickled_is_named(self):
        with pytest.raises(TypeError, match="print cannot be sent to the workers: argument 0 cannot be pickled"):
            run(print, (threading.Lock(),))
        with pytest.raises(TypeError, match="5 is not a function"):
            run(5)

    def test_no_session(self, monkeypatch):
        monkeypatch.setattr(SparkContext, "_active_spark_context", None)
        with pytest.raises(ExecutorError, match="there is no active Spark session; make one with SparkSession"):
            run(print)

    def test_no_pyspark(self, monkeypatch):
        for name in [name for name in sys.modules if name.startswith(("hvd_cluster.spark", "executors.agents.spark"))]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "pyspark", None)
        with pytest.raises(ImportError, match=r'pip install "hvd-cluster\[spark\]"'):
            importlib.import_module("hvd_cluster.spark")
