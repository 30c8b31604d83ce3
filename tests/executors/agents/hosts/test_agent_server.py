"""Strangers at the driver's port for agents."""

import socket
from contextlib import ExitStack, closing, suppress

from collectives.net import strangers
from executors.agents.hosts.agent import AgentLink
from executors.agents.hosts.agent_server import AgentServer
from executors.api import JobSecret
from tests import limited
from tests.collectives.engine.job import until

CROWD = 300
KEY = "0123456789abcdef" * 4

DRIVER = f"""
import os, subprocess
from collectives.net import strangers
from executors.api import JobSecret
from executors.agents.hosts.agent_server import AgentServer

class Listener:
    def connected(self, link):
        print(link.hello.host, flush=True)
    def disconnected(self, link, text):
        pass

strangers.SILENCE = 0.05
limit_descriptors({{limit}})
with AgentServer("127.0.0.1", JobSecret({KEY!r}.encode()), Listener()) as board:
    print(board.port, flush=True)
    sys.stdin.readline()
    subprocess.run(["true"], stdout=subprocess.PIPE, stdin=subprocess.PIPE, check=True)
    print("started", flush=True)
    sys.stdin.read()
"""


def test_a_crowd_of_silent_connections_takes_neither_the_descriptors_nor_the_place_of_an_agent():
    with limited.python(DRIVER.format(limit=100)) as process, ExitStack() as stack:
        port = int(process.stdout.readline())
        for number in range(CROWD):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), limited.PATIENCE))
            if number % 3 == 0:
                sock.sendall(b"GET / HTTP/1.1")
        process.stdin.write("start\n")
        process.stdin.flush()
        assert process.stdout.readline() == "started\n"
        agent = stack.enter_context(closing(socket.create_connection(("127.0.0.1", port), limited.PATIENCE)))
        AgentLink(agent, JobSecret(KEY.encode()), "node")
        assert process.stdout.readline() == "node\n"
        _, log = limited.ending(process)
    assert len(log) == 1, log
    assert "not shown that they know the secret" in log[0] or "not an agent of this job" in log[0]


def test_a_stranger_has_a_deadline_and_an_agent_has_none(monkeypatch):
    class Listener:
        def connected(self, link):
            links.append(link)

        def disconnected(self, link, text):
            pass

    links = []
    monkeypatch.setattr(strangers, "DEADLINE", 0.2)
    secret = JobSecret()
    with AgentServer("127.0.0.1", secret, Listener()) as board, ExitStack() as stack:
        address = ("127.0.0.1", board.port)
        agent = stack.enter_context(socket.create_connection(address, limited.PATIENCE))
        AgentLink(agent, secret, "node")
        until(lambda: links)
        for _ in range(2):
            stranger = stack.enter_context(socket.create_connection(address, limited.PATIENCE))
            assert b"" in iter(lambda stranger=stranger: stranger.recv(64), None)
        agent.setblocking(False)
        with suppress(BlockingIOError):
            assert agent.recv(1) != b""
