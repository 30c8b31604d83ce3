"""Ranks that are killed, or stop, while two hosts of two ranks connect: all others end, and name them."""

import os
import pickle
import signal
import time
from dataclasses import replace
from functools import partial

import pytest

from tests.collectives.engine.job import until
from tests.namespaces import HOSTS
from tests.networks import network_or_skip

VICTIMS = range(4)
LATE = "before its hello"
"""At this stage no other rank knows the victim: the start timeout ends the wait."""
STAGES = (
    LATE,
    "after its hello",
    "before its offer",
    "within its host",
    "before its backends",
    "in its first backend",
    "in its backend between hosts",
)
SERVES = "as it serves its host"
LARGE = (LATE, SERVES, *STAGES[2:3], *STAGES[4:])
"""The stages in a large world, where ranks 2 and 3 are connected before they connect within their host."""
CONNECT_SECONDS = 20.0
LATE_SECONDS = 3.0
BOUND_SECONDS = 15.0
"""Survivors take some milliseconds, a busy machine longer; less than the start timeout, in any case."""


@pytest.fixture(scope="module")
def pool():
    """Ranks 0 and 1 on the first host, 2 and 3 on the second; each start happens in forks of them."""
    from tests.hvd_cluster.torch.pool import Pool

    with network_or_skip() as network:
        pool = Pool(4, [host for host in HOSTS for _ in range(2)], network=network)
        try:
            yield pool
        finally:
            pool.close()


def start_in_fork(folder, number, stage, victim, seconds, end=signal.SIGKILL, most_direct=None):
    """The end of a start in round ``number``: the time when the victim got the signal ``end``, or a survivor's error.

    With the time of a victim that was stopped comes its process. ``most_direct``: a world of more ranks is large.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            believe(most_direct)
            os.write(
                writer, pickle.dumps(start(folder, number, stage, victim, seconds, partial(meet_end, writer, end)))
            )
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as stream:
        found = pickle.load(stream)
    if isinstance(found, float) and end == signal.SIGSTOP:
        return found, child
    os.waitpid(child, 0)
    return found


def believe(most_direct):
    """What a large world is."""
    from collectives.handshake import hello

    hello.MOST_DIRECT = hello.MOST_DIRECT if most_direct is None else most_direct


def meet_end(writer, end, *_, **__):
    os.write(writer, pickle.dumps(time.monotonic()))
    os.kill(os.getpid(), end)


def reap(parent, child):
    """Remove the process that was stopped, on the rank that started it."""
    if int(os.environ["HOROVOD_RANK"]) == parent:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def start(folder, number, stage, victim, seconds, die):
    """``folder`` gets a file when a survivor has sent its hello."""
    from collectives.engine import start
    from collectives.handshake.dial import Callee
    from collectives.settings import Settings, world_from_environment

    world = replace(world_from_environment(os.environ), round=number)
    settings = Settings.from_environment(os.environ, world.topology)
    settings = replace(settings, timeouts=replace(settings.timeouts, connect=seconds))
    if world.topology.rank == victim:
        place_trap(stage, partial(await_hellos, folder, victim, die) if stage == "after its hello" else die)
    else:
        Callee._send_hello = followed(Callee._send_hello, (folder / str(world.topology.rank)).touch)
    try:
        start.connect(world, settings).barrier()
    except Exception as error:  # noqa: BLE001
        return time.monotonic(), type(error).__name__, str(error), getattr(error, "ranks", ())
    return time.monotonic(), "None", "", ()


def followed(step, then):
    """``step``, and ``then()`` after it."""
    return lambda *rest: (step(*rest), then())


def await_hellos(folder, victim, die, *_):
    """A rank that calls when the start has ended already finds nobody, and has to wait for the next start."""
    until(lambda: len(list(folder.iterdir())) == len(set(VICTIMS) - {0, victim}))
    die()


def place_trap(stage, die):
    """Let this process call ``die`` when it comes to ``stage``."""
    from collectives.backends.gloo.bootstrap import GlooBootstrap
    from collectives.backends.hierarchical.backend import HierarchicalBootstrap
    from collectives.backends.tcp.bootstrap import TcpBootstrap
    from collectives.engine import start
    from collectives.handshake import connect
    from collectives.handshake.admission import Admission
    from collectives.handshake.dial import Callee
    from collectives.handshake.entries import Entries
    from collectives.handshake.leaders import Forwarder

    if stage == "before its hello":
        Callee._send_hello, Entries.publish = die, followed(Entries.publish, die)
    elif stage == "after its hello":
        Callee._send_hello, Admission.answer = followed(Callee._send_hello, die), die
    elif stage == "before its offer":
        start._Groups.offer_at = die
    elif stage == SERVES:
        Forwarder.serve = die
    elif stage == "within its host":
        connect._connect_host, Admission.confirm = die, die
    elif stage == "before its backends":
        start._assemble = die
    elif stage == "in its first backend":
        HierarchicalBootstrap.connect = die
    else:
        GlooBootstrap.connect = TcpBootstrap.connect = die


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("stage", STAGES)
def test_every_survivor_names_the_rank_that_was_killed(pool, stage, victim, tmp_path):
    check_kill(pool, 1 + STAGES.index(stage) * len(VICTIMS) + victim, stage, victim, tmp_path)


@pytest.mark.parametrize(
    ("stage", "victim"), [(stage, victim) for stage in LARGE for victim in (0, 2, 3) if stage != SERVES or victim == 2]
)
def test_every_survivor_in_a_large_world_names_the_rank_that_was_killed(pool, stage, victim, tmp_path):
    """Rank 2 leads rank 3."""
    check_kill(pool, 200 + LARGE.index(stage) * len(VICTIMS) + victim, stage, victim, tmp_path, 1)


def check_kill(pool, number, stage, victim, folder, most_direct=None):
    seconds = LATE_SECONDS if stage == LATE else CONNECT_SECONDS
    outcomes = pool.run(start_in_fork, folder, number, stage, victim, seconds, signal.SIGKILL, most_direct)
    died = outcomes.pop(victim)
    seconds = [round(end - died, 3) for end, *_ in outcomes]
    for _, kind, text, ranks in outcomes:
        assert kind == "PeerLostError" or (stage == LATE and kind == "CollectiveTimeoutError"), text
        assert ranks == (victim,), text
    assert max(seconds) < BOUND_SECONDS


@pytest.mark.parametrize(
    ("stage", "victim"),
    [
        ("before its offer", 2),
        ("within its host", 2),
        ("within its host", 3),
        ("before its backends", 0),
        ("in its first backend", 3),
        ("in its backend between hosts", 2),
    ],
)
def test_every_survivor_names_the_rank_that_stopped(pool, stage, victim, tmp_path):
    """A stopped process keeps its connections, so the start timeout ends the wait."""
    check_stop(pool, 100 + STAGES.index(stage) * len(VICTIMS) + victim, stage, victim, tmp_path)


@pytest.mark.parametrize(
    ("stage", "victim"),
    [
        (SERVES, 2),
        ("before its offer", 2),
        ("before its offer", 3),
        ("before its backends", 0),
        ("before its backends", 3),
        ("in its first backend", 2),
    ],
)
def test_every_survivor_in_a_large_world_names_the_rank_that_stopped(pool, stage, victim, tmp_path):
    """Rank 2 leads rank 3."""
    check_stop(pool, 300 + LARGE.index(stage) * len(VICTIMS) + victim, stage, victim, tmp_path, 1)


@pytest.mark.parametrize(
    ("operations", "stage", "victim"),
    [
        ("shm", "before its backends", 1),
        ("tcp", "before its backends", 0),
        ("tcp", "in its backend between hosts", 2),
        ("gloo", "before its backends", 0),
        ("gloo", "in its backend between hosts", 2),
    ],
)
def test_every_survivor_on_one_host_names_the_rank_that_stopped(fresh_pool, operations, stage, victim, tmp_path):
    """Gloo connects to a stopped process, for which the kernel answers."""
    check_stop(fresh_pool(3, None, {"HOROVOD_CPU_OPERATIONS": operations}), 1, stage, victim, tmp_path)


def check_stop(pool, number, stage, victim, folder, most_direct=None):
    outcomes = pool.run(start_in_fork, folder, number, stage, victim, LATE_SECONDS, signal.SIGSTOP, most_direct)
    stopped, child = outcomes.pop(victim)
    pool.run(reap, victim, child)
    for _, kind, text, ranks in outcomes:
        assert kind == "CollectiveTimeoutError", text
        assert ranks == (victim,), text
    assert max(end - stopped for end, *_ in outcomes) < BOUND_SECONDS
