"""Engines of several ranks in one process: threads, in-process backends, and either kind of channel."""

import contextlib
import functools
import itertools
import os
import socket
import threading
import time

import numpy as np

from collectives.api import Operation, ReduceOp, Request, Timeouts, Topology
from collectives.backends import registry
from collectives.backends.base import Group
from collectives.backends.shm import ShmBootstrap
from collectives.backends.tcp import TcpBootstrap
from collectives.buffers import as_buffer, empty
from collectives.controller.process_sets import ProcessSets
from collectives.engine.engine import Engine
from collectives.engine.registration import SetBackends
from collectives.net.channel import Channel, InprocHub
from collectives.net.interfaces import LOOPBACK
from collectives.net.sockets import Connection, SocketChannel
from collectives.settings import Settings
from collectives.store.memory import MemoryStore, PrefixStore
from tests.collectives.backends.inproc import InprocBackend, InprocGroup
from tests.collectives.backends.members import in_threads
from tests.collectives.backends.offers import meet

PATIENCE = 20.0
TIMEOUTS = Timeouts(connect=10.0, collective=10.0, shutdown=5.0)


class InprocTransport:
    """Channels of an InprocHub."""

    def __init__(self, size):
        hub = InprocHub(size)
        self.channels = [hub.channel(rank) for rank in range(size)]

    def vanish(self, rank):
        """Let the others believe that ``rank`` is gone."""
        self.channels[rank].close()


class SocketTransport:
    """Channels over socket pairs, with threads that watch them."""

    def __init__(self, size):
        pairs = {rank: socket.socketpair() for rank in range(1, size)}
        self._ends = [{rank: Connection(pairs[rank][0]) for rank in pairs}]
        self._ends += [{0: Connection(pairs[rank][1])} for rank in pairs]
        self.channels = [SocketChannel(rank, size, ends) for rank, ends in enumerate(self._ends)]

    def vanish(self, rank):
        """Let the others believe that ``rank`` is gone."""
        for connection in self._ends[rank].values():
            connection.hang_up()


class Formation:
    """A new process set, whose members meet at a place that the first of them makes up."""

    numbers = itertools.count()

    def __init__(self, connect):
        self.prepared = self.closed = 0
        self._connect = connect

    def prepare(self):
        self.prepared += 1
        return b"set-%d" % next(self.numbers)

    def connect(self, offers, check):
        return self._connect("new-" + offers[0].decode())

    def close(self):
        self.closed += 1


class Job:
    """``engines[rank]``, each with a backend for the process sets it is a member of, ``backends[rank]`` by set.

    ``faults`` go to the global set's backends, which are in-process ones unless ``shared_memory`` or ``over_tcp``. Over
    TCP more than two ranks vote in a mesh, or ``in_star``. ``on_hosts``: as if each half of the ranks had a host of its
    own, with shared memory, and TCP between them.
    ``wrap`` may put something around each channel. As many ranks as ``local_size`` says share the cores of this host.
    """

    transport = InprocTransport

    def __init__(
        self,
        size,
        sets=(),
        faults=None,
        wrap=lambda channel: channel,
        local_size=1,
        shared_memory=False,
        over_tcp=False,
        in_star=False,
        on_hosts=False,
        **settings,
    ):
        self.size = size
        self._over_tcp = over_tcp
        self._in_star = in_star
        self._on_hosts = on_hosts
        self._store = MemoryStore() if shared_memory or over_tcp or on_hosts else None
        self._lock, self._groups = threading.Lock(), {"set-0": InprocGroup(size, faults)}
        self.group = self._groups["set-0"]
        self._transport = self.transport(size)
        all_sets = ProcessSets(size, sets)
        hosts = tuple(f"host-{rank}" for rank in range(size))
        self.channels = [wrap(channel) for channel in self._transport.channels]
        chosen = Settings(**({"timeouts": TIMEOUTS} | settings))
        self._timeouts, self._seconds = chosen.timeouts, chosen.timeouts.collective
        self.backends = in_threads(size, lambda rank: self._connect_all(rank, all_sets), PATIENCE)
        self.engines = [
            Engine(
                Topology(rank, size, local_size=local_size, hosts=hosts, cores=2),
                chosen,
                ProcessSets(size, sets),
                self.channels[rank],
                self.backends[rank],
                functools.partial(self._form, rank),
            )
            for rank in range(size)
        ]

    def _connect_all(self, rank, sets):
        members = {id: sets.ranks(id) for id in sets.ids() if rank in sets.ranks(id)}
        return {id: self._set_backends(rank, ranks, f"set-{id}") for id, ranks in members.items()}

    def _form(self, rank, members):
        return Formation(lambda scope: self._connect(rank, members, scope))

    def _connect(self, rank, members, scope):
        return self._set_backends(rank, members, scope)

    def _set_backends(self, rank, members, scope):
        return SetBackends.of([self._backend(rank, members, scope)])

    def _backend(self, rank, members, scope):
        group = Group(tuple(members), members.index(rank), tuple(f"host-{member}" for member in members))
        if self._store is not None:
            if self._on_hosts:
                bootstrap = self._bootstrap_of_hosts(rank, members)
            elif self._over_tcp:
                bootstrap = TcpBootstrap(group, self._seconds, LOOPBACK, b"of the job", crowded=self._in_star)
            else:
                bootstrap = ShmBootstrap(group, self._seconds, crowded=len(members) > len(os.sched_getaffinity(0)))
            return meet(bootstrap, PrefixStore(self._store, scope), TIMEOUTS.connect)
        with self._lock:
            shared = self._groups.setdefault(scope, InprocGroup(len(members)))
        return InprocBackend(group, shared, self._seconds)

    def _bootstrap_of_hosts(self, rank, members):
        hosts = tuple("ab"[2 * member >= self.size] for member in range(self.size))
        settings = Settings(timeouts=self._timeouts)
        return registry.prepare(members, Topology(rank, self.size, hosts=hosts, cores=2), settings, LOOPBACK)[0]

    def vanish(self, rank):
        """Let the others believe that ``rank`` is gone."""
        self._transport.vanish(rank)

    def run(self, body):
        """``body(engine)`` on a thread of each rank; what they return, by rank."""
        return in_threads(self.size, lambda rank: body(self.engines[rank]), PATIENCE)

    def outcomes(self, body):
        """Like :meth:`run`; an error is returned in the place of a result."""
        return self.run(lambda engine: outcome(lambda: body(engine)))

    def shutdown(self):
        """End all engines."""
        self.run(Engine.shutdown)


@contextlib.contextmanager
def running(*args, **kwargs):
    """A job that is shut down at the end."""
    job = Job(*args, **kwargs)
    try:
        yield job
    finally:
        job.shutdown()


def outcome(call):
    """The result of ``call``, or its error."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001
        return error


def submit(engine, array, name=None, operation=Operation.ALLREDUCE, **fields):
    """Put ``array`` in flight; unnamed without a name."""
    request, source = _prepare(array, name, operation, fields)
    return engine.submit(request, source, lambda shape: empty(source.dtype, shape), unnamed=name is None)


def wait(engine, work):
    """The result of ``work`` as an array."""
    return engine.synchronize(work).owner


def run(engine, array, name=None, operation=Operation.ALLREDUCE, **fields):
    """Submit, wait and return the result."""
    request, source = _prepare(array, name, operation, fields)
    work = engine.run(request, source, lambda shape: empty(source.dtype, shape), unnamed=name is None)
    return work.output.owner


def _prepare(array, name, operation, fields):
    source = as_buffer(array)
    fields = {"op": ReduceOp.SUM} | fields
    make = Request if "splits" in fields else kept_request  # wrong splits may equal right ones, or have no hash
    return make(name or operation.value, operation, source.dtype, source.shape, **fields), source


kept_request = functools.lru_cache(Request)
"""The same request for the same arguments, as a binding gives it: a call that repeats takes a shorter way."""


def ones(engine, length=3):
    """A tensor that differs by rank: 1 on rank 0, 2 on rank 1..."""
    return np.full(length, engine.topology.rank + 1.0)


def total(size, length=3):
    """The sum of :func:`ones` over the ranks."""
    return np.full(length, size * (size + 1) / 2.0)


def until(condition, patience=PATIENCE):
    """Wait for ``condition()`` to become true."""
    pause, deadline = threading.Event(), time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        pause.wait(0.001)


class Caller(threading.Thread):
    """One more caller on a rank: it waits for the sum of a tensor, or calls ``body``."""

    def __init__(self, engine, name="never", body=None):
        super().__init__(daemon=True)
        self._body = lambda: body(engine) if body else run(engine, ones(engine), name)
        self._outcome = None
        self.rank = engine.topology.rank
        self.start()

    def run(self):
        self._outcome = outcome(self._body)

    def result(self):
        """The result, or the error."""
        self.join(PATIENCE)
        assert not self.is_alive()
        return self._outcome


class Watched(Channel):
    """A channel that records the sleeping threads, their longest sleep, and the lost ranks."""

    def __init__(self, inner):
        super().__init__(inner.rank, inner.size)
        self._inner = inner
        self.sleeping, self.lost = {}, []
        for name in ("send", "receive", "peek", "wake", "close"):
            setattr(self, name, getattr(inner, name))

    @property
    def has_unsent(self):
        return self._inner.has_unsent

    def poll(self, timeout):
        me = threading.get_ident()
        self.sleeping[me] = timeout
        try:
            self._sleep(timeout)
        finally:
            self.sleeping.pop(me, None)

    def _sleep(self, timeout):
        self._inner.poll(timeout)

    def watch(self, on_lost):
        self._inner.watch(lambda rank: (on_lost(rank), self.lost.append(rank)))

    send = receive = peek = wake = close = None


class Greedy(Watched):
    """A channel where callers get hold of each message first, so that it never wakes the communication thread."""

    def __init__(self, inner):
        super().__init__(inner)
        self._woken = threading.Event()
        self.greedy = True
        self.wake = lambda: (self._woken.set(), inner.wake())

    def _sleep(self, timeout):
        if not (self.greedy and threading.current_thread().name.startswith("hvd-engine")):
            super()._sleep(timeout)
        elif self._woken.wait(timeout):
            del self.sleeping[threading.get_ident()]
            self._woken.clear()

    def is_asleep(self):
        """Whether one thread sleeps here, for longer than any test, and nothing is about to wake it."""
        limits = [PATIENCE + 1 if limit is None else limit for limit in list(self.sleeping.values())]
        return not self._woken.is_set() and len(limits) == 1 and limits[0] > PATIENCE
