"""A forked child of the process with the server, such as a worker of a DataLoader of rank 0."""

import multiprocessing
import os
import socket
import stat

import pytest

from collectives.store.client import RendezvousClient
from collectives.store.server import RendezvousServer
from tests.collectives.store.wire import SECRET, eventually, in_thread

SECONDS = 20.0


def live(server, line):
    """Disown ``server`` in a child, tell how many of its sockets are left, and wait for the end of the test."""
    before = len(internet_sockets())
    server.disown()
    server.stop()
    line.send((before, len(internet_sockets())))
    line.poll(SECONDS)


def internet_sockets():
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            number = os.dup(int(name))
        except OSError:  # that of the listing
            continue
        if stat.S_ISSOCK(os.fstat(number).st_mode):
            with socket.socket(fileno=number) as sock:
                found += [sock.family] if sock.family in (socket.AF_INET, socket.AF_INET6) else []
        else:
            os.close(number)
    return found


@pytest.fixture
def served():
    with RendezvousServer(SECRET) as server, RendezvousClient(server.address, server.port, SECRET, SECONDS) as client:
        yield server, client


def test_a_child_drops_its_copy_and_the_parent_goes_on(served):
    server, client = served
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=live, args=(server, theirs))
    with ours, theirs, in_thread(lambda: client.get("key", SECONDS)) as value:
        eventually(lambda: server.waiting == 1)
        with server.store._changed:  # another thread may hold it at the fork
            child.start()
        try:
            assert ours.poll(SECONDS)
            before, after = ours.recv()
            assert before - after == 2  # the listener, and the connection of the call that waits
            client.set("key", b"value")
            assert value() == b"value"
            server.stop()
            socket.create_server((server.address, server.port)).close()
        finally:
            ours.send(None)
            child.join(SECONDS)
    assert child.exitcode == 0
