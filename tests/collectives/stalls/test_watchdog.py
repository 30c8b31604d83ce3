"""Hosts between which the cable is cut: network namespaces, joined by one link."""

import ctypes
import os
import secrets
import subprocess

import pytest

from collectives.controller.process_sets import ProcessSets
from collectives.handshake import connect_channel
from collectives.handshake.hello import Hello, LocalEnd
from collectives.net.attempts import ConnectAttempt
from collectives.store.memory import MemoryStore
from tests.collectives.backends.members import in_threads
from tests.collectives.engine.job import PATIENCE, until

CLONE_NEWNET = 0x40000000  # setns(2)
HOSTS = ("a", "b", "b")


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=PATIENCE)


@pytest.fixture
def namespaces():
    """Two namespaces with the addresses 10.99.0.1 and 10.99.0.2; the name of the first is that of its link, too."""
    names = [f"hvd{secrets.token_hex(3)}{end}" for end in "ab"]
    made = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
            ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
            for number, name in enumerate(names, 1):
                ip("-n", name, "address", "add", f"10.99.0.{number}/24", "dev", name)
                ip("-n", name, "link", "set", name, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield names
    finally:
        for name in made:
            ip("netns", "delete", name)


def enter(name):
    """Move this thread into the network namespace ``name``."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@pytest.mark.parametrize("talking", [False, True])
def test_a_host_that_falls_silent_is_lost(namespaces, talking):
    """With and without a message under way, both sides notice it; only the kernel measures the time."""

    def meet(rank):
        name = namespaces[HOSTS[rank] == "b"]
        enter(name)
        address = f"10.99.0.{namespaces.index(name) + 1}"
        with ConnectAttempt(PATIENCE) as attempt:
            end = LocalEnd(Hello(rank, 3, HOSTS[rank]), b"secret", address, 1.0, attempt)
            return connect_channel(end, store, ProcessSets(3), lambda *_: b"").channel

    store = MemoryStore()
    channels = in_threads(3, meet, PATIENCE)
    lost = [[], [], []]
    try:
        for channel, found in zip(channels, lost, strict=True):
            channel.watch(found.append)
        ip("-n", namespaces[1], "link", "set", namespaces[1], "down")
        if talking:
            for channel in channels:
                channel.send(0 if channel.rank else 1, b"\x91\x06")
        until(lambda: sorted(lost[0]) == [1, 2] and lost[1] == lost[2] == [0])
    finally:
        for channel in channels:
            channel.close()
