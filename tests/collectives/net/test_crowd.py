"""Silent connections at rank 0, in a process that may open few descriptors."""

import socket
from contextlib import ExitStack

import msgpack

from collectives import handshake
from collectives.api import Timeouts
from collectives.controller.process_sets import ProcessSets
from collectives.handshake.hello import Hello, LocalEnd
from collectives.net.attempts import ConnectAttempt
from collectives.store.memory import MemoryStore
from tests import limited

CROWD = 200
KEY = "round-0/start-0/rank-0"
SECRET = b"not for strangers"

RANK_0 = f"""
from collectives.api import Timeouts
from collectives.net.attempts import ConnectAttempt
from collectives import handshake
from collectives.handshake.hello import Hello, LocalEnd
from collectives.controller.process_sets import ProcessSets
from collectives.net import strangers
from collectives.store.memory import MemoryStore

class Announcing(MemoryStore):
    def set(self, key, value, timeout=None):
        if key == {KEY!r}:
            print(value.hex(), flush=True)

strangers.SILENCE = 0.05
limit_descriptors(40)
with ConnectAttempt({limited.PATIENCE}) as attempt:
    end = LocalEnd(Hello(0, 2, "a"), {SECRET!r}, "127.0.0.1", Timeouts().heartbeat, attempt)
    connected = handshake.connect_channel(end, Announcing(), ProcessSets(2), lambda hosts, cores: b"")
print(connected.hosts)
connected.channel.close()
"""


def test_a_crowd_of_silent_connections_does_not_keep_a_job_from_starting():
    with limited.python(RANK_0) as process, ExitStack() as stack:
        store = MemoryStore()
        entry = bytes.fromhex(process.stdout.readline())
        store.set(KEY, entry)
        for _ in range(CROWD):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(tuple(msgpack.unpackb(entry)["tcp"]))
        with ConnectAttempt(limited.PATIENCE) as attempt:
            end = LocalEnd(Hello(1, 2, "b"), SECRET, "127.0.0.1", Timeouts().heartbeat, attempt)
            connected = handshake.connect_channel(end, store, ProcessSets(2), lambda hosts, cores: b"")
        connected.channel.close()
        output, log = limited.ending(process)
    assert output == "('a', 'b')\n"
    assert len(log) == 1, log
    assert log[0].startswith("WARNING one of too many unauthenticated connections to rank 0 was refused; ")
    assert "raise the limit of ulimit -n" in log[0]
