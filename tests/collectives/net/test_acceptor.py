"""The connections of a server of the driver, and its end."""

import asyncio
import errno
import io
import socket
import struct
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from unittest import mock

import pytest

from collectives.net import acceptor, strangers
from collectives.net.acceptor import Acceptor
from collectives.net.strangers import Strangers
from executors.api import JobSecret
from executors.dashboard.picture import Address
from executors.dashboard.server import DashboardServer
from executors.job import server
from executors.job.output import Output
from executors.job.server import Reception, ServerThread

HOST = "127.0.0.1"
PATIENCE = 20.0


class LateListener(socket.socket):
    """Accepts its first client once the end of its server is requested, in the very pass of the loop that learns it."""

    def __init__(self, fileno):
        super().__init__(fileno=fileno)
        self.is_called, self.is_ending = threading.Event(), threading.Event()
        self.accepted = []

    def accept(self):
        if not self.is_called.is_set():
            self.is_called.set()
            assert self.is_ending.wait(PATIENCE)
            raise BlockingIOError  # the request is in the queue of the loop now, before the next call of this function
        connection = super().accept()
        self.accepted.append(connection[0])
        return connection


@pytest.fixture
def listeners(monkeypatch):
    """Those of the servers, which are late ones."""
    made, create = [], socket.create_server

    def create_late(*arguments, **options):
        made.append(LateListener(create(*arguments, **options).detach()))
        return made[-1]

    class Started(Future):
        def set_result(self, stop):
            super().set_result(lambda: (stop(), made[-1].is_ending.set()))

    monkeypatch.setattr(socket, "create_server", create_late)
    monkeypatch.setattr(server, "Future", Started)
    return made


@contextmanager
def reception():
    async def attend(reader, writer):
        await reader.read()

    thread = ServerThread("hvd-test", Reception("a server", attend).serve)
    thread.start(socket.create_server((HOST, 0)))
    yield
    thread.stop(PATIENCE)


@contextmanager
def dashboard():
    server = DashboardServer(Address(), dict, str)
    server.start()
    yield
    server.stop()


def console():
    pytest.importorskip("pyspark", reason="pip install 'hvd-cluster[spark]' for the console of Spark's tasks")
    from executors.agents.spark.console import Console

    output = Output(1, stdout=io.StringIO(), stderr=io.StringIO())
    return Console(HOST, 1, JobSecret(), output, mock.Mock())


@pytest.mark.parametrize("server", [reception, dashboard, console])
def test_a_connection_that_is_accepted_at_the_end_of_a_server_is_closed(server, listeners, caplog):
    with server(), socket.create_connection(listeners[0].getsockname()):
        assert listeners[0].is_called.wait(PATIENCE)
    (accepted,) = listeners[0].accepted
    assert accepted.fileno() == -1
    assert not caplog.records


class PoorListener(socket.socket):
    """Has a descriptor for its first client only at the second call."""

    def __init__(self, fileno):
        super().__init__(fileno=fileno)
        self.has_refused = asyncio.Event()

    def accept(self):
        if not self.has_refused.is_set():
            self.has_refused.set()
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


@contextmanager
def called(listener):
    """A client calls ``listener``."""
    with socket.create_connection(listener.getsockname()) as client:
        client.settimeout(PATIENCE)
        yield client


def run_poor(serve, monkeypatch):
    """Run ``serve``, which gets a poor listener that a client calls, and return the problems that the loop reports."""
    monkeypatch.setattr(strangers, "PAUSE", 0.0)
    problems = []

    async def run():
        asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))
        listener = PoorListener(socket.create_server((HOST, 0)).detach())
        with called(listener):
            await asyncio.wait_for(serve(listener), PATIENCE)

    asyncio.run(run())
    return problems


def test_a_want_of_descriptors_is_reported_and_the_client_accepted_later(monkeypatch, caplog):
    async def serve(listener):
        made = asyncio.get_running_loop().create_future()

        class Connection(asyncio.Protocol):
            def connection_made(self, transport):
                transport.close()
                made.set_result(None)

        async with Acceptor(listener, Connection, "a server"):
            await made

    assert run_poor(serve, monkeypatch) == []
    assert "cannot accept a connection: this process has no file descriptor left; raise the limit" in caplog.text


def test_the_end_of_the_block_ends_the_pause(monkeypatch):
    async def serve(listener):
        async with Acceptor(listener, asyncio.Protocol, "a server"):
            await listener.has_refused.wait()
        await asyncio.sleep(0)  # here a pause would end that is still there
        assert listener.fileno() == -1

    assert run_poor(serve, monkeypatch) == []


RESET = struct.pack("ii", 1, 0)


def reset_one(listener):
    """A client that is gone with a reset before the server accepts it, as that of a load balancer that checks."""
    client = socket.create_connection(listener.getsockname())
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    client.close()


def test_a_client_that_has_gone_before_it_is_accepted_is_forgotten_at_once(monkeypatch):
    gone, made = [], []
    monkeypatch.setattr(acceptor, "Strangers", lambda most: made.append(Strangers(most=most)) or made[-1])

    class Connection(asyncio.Protocol):
        def connection_lost(self, error):
            gone.append(error)

    async def serve():
        with socket.create_server((HOST, 0)) as listener:
            async with Acceptor(listener, Connection, "a server"):
                for _ in range(10):
                    reset_one(listener)
                while len(gone) < 10:
                    await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(serve(), PATIENCE))
    assert len(made[0]) == 0
