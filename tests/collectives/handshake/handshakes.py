"""Handshakes among threads, for tests."""

from collectives.api import (
    Timeouts,
)
from collectives.controller.process_sets import ProcessSets
from collectives.handshake import HandshakeResult, Hello, connect_channel
from collectives.handshake.hello import LocalEnd
from collectives.net.attempts import ConnectAttempt
from collectives.store.memory import MemoryStore
from tests.collectives.backends.members import in_threads
from tests.collectives.engine.job import PATIENCE, outcome

SECRET = b"not for strangers"


LOCALHOST = "127.0.0.1"


KEY = "round-0/start-0/rank-0"


def connect(
    hello,
    store,
    secret=SECRET,
    address=LOCALHOST,
    timeout=PATIENCE,
    offer=lambda hosts, cores: b"",
    starts=None,
    local=(0, 1),
):
    """:func:`connect_channel` with what is usual here."""
    with ConnectAttempt(timeout) as attempt:
        end = LocalEnd(hello, secret, address, Timeouts().heartbeat, attempt, *local)
        return connect_channel(end, store, ProcessSets(hello.size), offer, starts)


def connect_all(hellos, store=None, secrets=None, timeout=PATIENCE, tell=lambda connected: connected.hosts):
    """The connection of each of ``hellos``, or its error. All connect at once; their channels are closed afterwards."""

    def body(index):
        secret = secrets[index] if secrets else SECRET
        result = outcome(lambda: connect(hellos[index], store, secret, timeout=timeout))
        if isinstance(result, HandshakeResult):
            channels[index] = result.channel
            return tell(result)
        return result

    store, channels = store or MemoryStore(), {}
    try:
        return in_threads(len(hellos), body, PATIENCE)
    finally:
        for channel in channels.values():
            channel.close()


def ranks(size, hosts=("node",)):
    return [Hello(rank, size, hosts[rank % len(hosts)]) for rank in range(size)]
