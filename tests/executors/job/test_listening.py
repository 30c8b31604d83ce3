"""The thread of a server of the driver."""

import asyncio
import errno
import socket
from concurrent.futures import Future

import pytest

from executors.api import ExecutorError
from executors.job import server
from executors.job.server import ServerThread
from tests.collectives.engine.job import until


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def test_a_server_that_cannot_start_says_why_at_once(listener):
    async def serve(listener, started):
        raise OSError(errno.EMFILE, "Too many open files")

    with pytest.raises(ExecutorError, match=r"the thread hvd-test did not start \(\[Errno 24\] Too many open files\)"):
        ServerThread("hvd-test", serve).start(listener)
    assert listener.fileno() == -1


def test_a_loop_that_cannot_be_made_says_why_at_once(listener, monkeypatch):
    async def serve(listener, started):
        pytest.fail("there is no loop")

    def fail():
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("asyncio.events.new_event_loop", fail)
    with pytest.raises(ExecutorError, match="Too many open files"):
        ServerThread("hvd-test", serve).start(listener)
    assert listener.fileno() == -1


def test_a_server_that_comes_up_too_late_ends(listener, monkeypatch):
    monkeypatch.setattr(server, "START_SECONDS", 0.02)
    given_up = asyncio.Event()

    async def serve(listener, started):
        while not started.cancelled():
            await asyncio.sleep(0.001)
        started.set_result(given_up.set)

    thread = ServerThread("hvd-test", serve)
    with pytest.raises(ExecutorError, match=r"the thread hvd-test did not start in 0.02 s"):
        thread.start(listener)
    until(lambda: listener.fileno() == -1)
    thread.stop(1.0)


def test_a_server_that_comes_up_at_that_moment_is_ended(listener, monkeypatch):
    ended = []

    class Late(Future):
        def result(self, timeout=None):
            if timeout is None:
                return super().result()
            self.set_result(lambda: ended.append("ended"))
            raise server.FutureTimeoutError

    async def serve(listener, started):
        listener.close()

    monkeypatch.setattr(server, "Future", Late)
    with pytest.raises(ExecutorError, match="did not start"):
        ServerThread("hvd-test", serve).start(listener)
    assert ended == ["ended"]


def test_a_thread_that_cannot_be_had(listener, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)
    with pytest.raises(ExecutorError, match="can't start new thread"):
        ServerThread("hvd-test", None).start(listener)
    assert listener.fileno() == -1
