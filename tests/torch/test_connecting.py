"""Ranks that are killed while two hosts of two ranks connect, at every stage: all others end, and name them."""

import os
import pickle
import signal
import time
from dataclasses import replace

import pytest

from tests.namespaces import HOSTS, Network, Unavailable

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
CONNECT_SECONDS = 20.0
LATE_SECONDS = 2.0
BOUND_SECONDS = 10.0
"""Survivors take some milliseconds, a busy machine longer; less than the start timeout, in any case."""


@pytest.fixture(scope="module")
def pool():
    """Ranks 0 and 1 on the first host, 2 and 3 on the second; each start happens in forks of them."""
    from tests.torch.pool import Pool

    try:
        with Network() as network:
            pool = Pool(4, [host for host in HOSTS for _ in range(2)], network=network)
            try:
                yield pool
            finally:
                pool.close()
    except Unavailable as reason:
        pytest.skip(f"no hosts in network namespaces: {reason}")


def start_in_fork(number, stage, victim, seconds):
    """The end of a start in round ``number``: the victim's time of death, or the error of a survivor and its time."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, pickle.dumps(start(number, stage, victim, seconds, writer)))
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as stream:
        found = stream.read()
    os.waitpid(child, 0)
    return pickle.loads(found)


def start(number, stage, victim, seconds, writer):
    from collectives.engine import bootstrap
    from collectives.settings import Settings, world_from_environment

    world = replace(world_from_environment(os.environ), round=number)
    settings = Settings.from_environment(os.environ, world.topology)
    settings = replace(settings, timeouts=replace(settings.timeouts, connect=seconds))
    if world.topology.rank == victim:
        place_trap(stage, victim, writer)
    try:
        bootstrap.connect(world, settings).barrier()
    except Exception as error:  # noqa: BLE001
        return time.monotonic(), type(error).__name__, str(error), getattr(error, "ranks", ())
    return time.monotonic(), "None", "", ()


def place_trap(stage, rank, writer):
    """Let this process kill itself when it comes to ``stage``."""
    from collectives.backends.gloo.joining import GlooJoining
    from collectives.backends.hierarchical_joining import HierarchicalJoining
    from collectives.control.handshake import member
    from collectives.control.handshake.admission import Admission
    from collectives.control.handshake.callee import Callee
    from collectives.control.handshake.entries import Entries
    from collectives.engine import bootstrap

    def die(*_, **__):
        os.write(writer, pickle.dumps(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    def die_after(step):
        return lambda *rest: (step(*rest), die())

    if stage == "before its hello":
        Callee._send_hello, Entries.publish = die, die_after(Entries.publish)
    elif stage == "after its hello":
        Callee._send_hello, Admission.answer = die_after(Callee._send_hello), die
    elif stage == "before its offer":
        bootstrap._Groups.offer_at = die
    elif stage == "within its host":
        member._connect_host, Admission.confirm = die, die
    elif stage == "before its backends":
        bootstrap._assemble = die
    elif stage == "in its first backend":
        HierarchicalJoining.connect = die
    else:
        GlooJoining.connect = die


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("stage", STAGES)
def test_every_survivor_names_the_rank_that_was_killed(pool, stage, victim):
    number = 1 + STAGES.index(stage) * len(VICTIMS) + victim
    outcomes = pool.run(start_in_fork, number, stage, victim, LATE_SECONDS if stage == LATE else CONNECT_SECONDS)
    died = outcomes.pop(victim)
    seconds = [round(end - died, 3) for end, *_ in outcomes]
    for _, kind, text, ranks in outcomes:
        assert kind == "PeerLostError" or (stage == LATE and kind == "CollectiveTimeoutError"), text
        assert ranks == (victim,), text
    assert max(seconds) < BOUND_SECONDS
