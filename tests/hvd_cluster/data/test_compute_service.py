"""The compute service and its clients: registrations, losses, signatures, and the end."""

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress

import pytest

from collectives.api import SettingsError, ShutDownError
from collectives.net import strangers
from collectives.net.frames import HEADER_BYTES, LENGTH, NONCE_BYTES, Opener, Sealer, keys
from collectives.net.interfaces import LOOPBACK
from executors.api import ExecutorError, JobSecret, StartTimeoutError
from hvd_cluster.data.compute import ComputeClient, ComputeService
from hvd_cluster.data.compute.presence import Presence

KEY, OTHER = b"k" * 32, b"o" * 32
LONG, SHORT = 60.0, 0.2


@pytest.fixture
def service():
    with ComputeService(2, 2, KEY) as service:
        yield service


@pytest.fixture
def client(service):
    with client_of(service) as client:
        yield client


def client_of(service, key=KEY, timeout=LONG):
    return ComputeClient({"lo": [(LOOPBACK, service.get_port())]}, key, timeout=timeout)


def presence_of(service, secret, name, silence=LONG):
    with client_of(service) as client:
        return Presence(LOOPBACK, client._plan().presence_port, JobSecret(secret), name, silence)


@contextmanager
def background(function, *arguments):
    """Runs ``function`` in a thread; the list of its result or error, which is there after the block."""
    results = []

    def run():
        try:
            results.append(function(*arguments))
        except Exception as error:  # noqa: BLE001  it is the result
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield results
    thread.join(LONG)


def test_a_dispatcher_is_found_by_those_that_wait(service, client):
    with background(client.wait_for_dispatcher_registration, 1, LONG) as found, client_of(service) as other:
        other.register_dispatcher(1, "host:1234")
        other.register_dispatcher(1, "host:1234")
    assert found == ["host:1234"]


def test_a_dispatcher_has_one_address(client):
    client.register_dispatcher(0, "host:1")
    with pytest.raises(
        ValueError, match=r"dispatcher 0 is registered at host:1 already, so not at host:2; start a new"
    ):
        client.register_dispatcher(0, "host:2")
    client.register_dispatcher(1, "host:2")


def test_each_dispatcher_waits_for_its_own_workers(client):
    """A worker that registers twice is one worker, and counts for its own dispatcher only."""
    for dispatcher, worker in [(0, 0), (0, 0), (1, 2), (1, 3)]:
        client.register_worker_for_dispatcher(dispatcher, worker)
    client.wait_for_dispatcher_worker_registration(1, LONG)
    with pytest.raises(StartTimeoutError, match=r"^dispatcher 0 has not all of its workers within 0\.2 s; look at"):
        client.wait_for_dispatcher_worker_registration(0, SHORT)
    client.register_worker_for_dispatcher(0, 1)
    client.wait_for_dispatcher_worker_registration(0, LONG)


@pytest.mark.parametrize("number", [-1, 2])
@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("register_dispatcher", ["host:1"]),
        ("register_worker_for_dispatcher", [0]),
        ("wait_for_dispatcher_registration", [LONG]),
        ("wait_for_dispatcher_worker_registration", [LONG]),
    ],
)
def test_there_are_so_many_dispatchers(client, method, arguments, number):
    with pytest.raises(IndexError, match=f"there is no dispatcher {number}: they are numbered 0 to 1"):
        getattr(client, method)(number, *arguments)


def test_the_last_reader_frees_a_dispatcher(service, client):
    client.enter(0)
    with client_of(service) as other:
        other.enter(0)
        assert not client.leave(0)
        with pytest.raises(StartTimeoutError, match=r"^others still read from dispatcher 0 within 0\.2 s"):
            client.wait_until_free(0, SHORT)
        assert other.leave(0)
    client.wait_until_free(0, LONG)


def test_shutdown_ends_all_waits(service, client):
    with ExitStack() as stack:
        clients = [stack.enter_context(client_of(service)) for _ in range(3)]
        ends = [stack.enter_context(background(each.wait_for_shutdown)) for each in clients]
        client.shutdown()
    assert ends == [[None]] * 3


def test_a_wait_for_the_end_is_bounded(client):
    with pytest.raises(StartTimeoutError, match=r"^the data service has not ended within 0\.2 s"):
        client.wait_for_shutdown(SHORT)


def test_a_process_that_leaves_is_no_loss(service, client):
    with client.present("worker 7", LONG):
        pass
    with pytest.raises(StartTimeoutError):
        client.wait_for_shutdown(SHORT)


def test_a_process_that_dies_is_named(service, client):
    script = (
        "import sys; sys.path[:0] = [sys.argv[1]]\n"
        "from executors.api import JobSecret\n"
        "from hvd_cluster.data.compute.presence import Presence\n"
        "Presence('127.0.0.1', int(sys.argv[2]), JobSecret(b'k' * 32), 'worker 7 of dispatcher 1', 60)\n"
        "sys.stdout.write('!'); sys.stdout.flush(); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, os.getcwd(), str(client._plan().presence_port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.read(1) == b"!"
        with background(client.wait_for_shutdown) as ends:
            process.kill()
    text = "the data service has failed: worker 7 of dispatcher 1 has died"
    assert [str(error) for error in ends] == [text]
    with pytest.raises(
        ExecutorError, match=r"dispatcher 0 has not registered, and never will: .* worker 7 .* has died"
    ):
        client.wait_for_dispatcher_registration(0, SHORT)


def test_a_silent_process_is_named(service, client, monkeypatch):
    monkeypatch.setattr("hvd_cluster.data.compute.presence.WORDS_IN_SILENCE", 0.01)
    presence = presence_of(service, KEY, "worker 7", silence=0.1)
    with pytest.raises(ExecutorError, match=r"worker 7 has been silent for 0\.1 s$"):
        client.wait_for_shutdown(LONG)
    presence.close()


def test_words_and_a_farewell(monkeypatch):
    monkeypatch.setattr("hvd_cluster.data.compute.presence.WORDS_IN_SILENCE", 6000)
    with socket.create_server((LOOPBACK, 0)) as listener:
        with background(Presence, *listener.getsockname(), JobSecret(KEY), "worker 7", LONG) as made:
            connection, _ = listener.accept()
            nonce = connection.recv(NONCE_BYTES)
            connection.sendall(nonce)
            process, server = keys(KEY, nonce, nonce)
            frames, opener = connection.makefile("rb"), Opener(process)
            assert b"worker 7" in frame_of(frames, opener)
            connection.sendall(Sealer(server).seal(b""))
        with connection, frames:
            assert [frame_of(frames, opener) for _ in range(3)] == [b""] * 3
            made[0].close()
            assert b"farewell" in iter(lambda: frame_of(frames, opener), None)


def frame_of(stream, opener):
    return opener.open(stream.read(LENGTH.unpack(stream.read(HEADER_BYTES))[0]))


def test_the_first_loss_is_the_reason(service, client, caplog):
    service.fail("worker 1 has died")
    service.fail("worker 2 has died")
    with pytest.raises(ExecutorError, match="worker 1 has died"):
        client.wait_for_shutdown()
    assert service.reason(0.0) == "worker 1 has died"
    assert [record.getMessage() for record in caplog.records] == ["the data service ends: worker 1 has died"]


def test_a_block_that_raises_fails_the_service(monkeypatch):
    monkeypatch.setattr("hvd_cluster.data.compute.service.LOSS_SECONDS", 0.0)
    service, is_there = ComputeService(1, 1, KEY), threading.Event()

    def attend(client):
        with client.present("worker 7", LONG):
            is_there.set()
            client.wait_for_shutdown()

    with client_of(service) as client, background(attend, client) as ends, suppress(SystemExit), service:
        assert is_there.wait(LONG)
        raise SystemExit(143)
    assert "the process of the compute service ends with SystemExit(143)" in str(ends[0])


def test_another_key_is_refused_and_logged(service, client, caplog):
    with client_of(service, OTHER) as stranger, pytest.raises(SettingsError, match=r"is not to be trusted|refused"):
        stranger.shutdown()
    with pytest.raises((PermissionError, ConnectionAbortedError)):
        presence_of(service, OTHER, "a stranger")
    with pytest.raises(StartTimeoutError):
        client.wait_for_shutdown(SHORT)
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("the signature is wrong" in text for text in texts)
    assert any("does not know the secret" in text for text in texts)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n" * 4, b"\xff" * 60, b""])
def test_a_stranger_is_no_loss(service, client, data):
    with socket.create_connection((LOOPBACK, client._plan().presence_port), LONG) as sock:
        assert len(sock.recv(NONCE_BYTES)) == NONCE_BYTES
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    with pytest.raises(StartTimeoutError):
        client.wait_for_shutdown(SHORT)


def test_silent_strangers_keep_no_process_out(monkeypatch):
    monkeypatch.setattr(strangers.descriptors, "share_of_strangers", lambda *_: 2)
    monkeypatch.setattr(strangers, "SILENCE", 0.05)
    with ComputeService(1, 1, KEY) as service, client_of(service) as client, ExitStack() as stack:
        place = LOOPBACK, client._plan().presence_port
        for _ in range(20):
            stack.enter_context(socket.create_connection(place, LONG))
        Presence(*place, JobSecret(KEY), "worker 7", LONG).close()


def test_a_client_tries_all_addresses(service):
    with socket.create_server((LOOPBACK, 0)) as closed:
        port = closed.getsockname()[1]
    with ComputeService(1, 1, OTHER) as other:
        ports = [port, other.get_port(), service.get_port()]
        addresses = {f"eth{port}": [(LOOPBACK, port)] for port in ports}
        with ComputeClient(addresses, KEY) as client:
            client.register_dispatcher(1, "host:1")


def test_a_service_that_is_not_there(service):
    service.shutdown()
    with (
        client_of(service, timeout=SHORT) as client,
        pytest.raises(ExecutorError, match=r"cannot be reached for 0\.2 s"),
    ):
        client.shutdown()


def test_a_service_that_goes_away_ends_a_wait(service):
    with client_of(service, timeout=SHORT) as client:
        client.register_dispatcher(0, "host:1")
        with background(client.wait_for_dispatcher_registration, 1, LONG) as ends:
            wait_until(lambda: service._server.waiting)
            service.shutdown()
    assert "the compute service at 127.0.0.1 is lost" in str(ends[0])


def test_close_ends_a_wait(service):
    client = client_of(service)
    with background(client.wait_for_shutdown) as ends:
        wait_until(lambda: service._server.waiting)
        client.close()
    assert isinstance(ends[0], ShutDownError)
    with pytest.raises(ShutDownError):
        client.shutdown()


def test_addresses(service):
    pairs = [pair for each in service.addresses().values() for pair in each]
    assert (LOOPBACK, service.get_port()) == pairs[-1]
    with ComputeService(1, 1, KEY, nics=["lo"]) as other:
        assert other.addresses() == {"lo": [(LOOPBACK, other.get_port())]}
        with ComputeClient(other.addresses(), KEY) as client:
            client.shutdown()


@pytest.mark.parametrize("numbers", [(0, 1), (1, 0), (1.5, 1), (1, "2")])
def test_numbers_that_are_not_allowed(numbers):
    with pytest.raises(ValueError, match="must be an integer of at least 1"):
        ComputeService(*numbers, KEY)


def wait_until(condition):
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
