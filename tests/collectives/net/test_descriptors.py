"""A process without descriptors: it names the lack and the remedy, and so do the ranks that it can still reach."""

import errno
import functools
import os
import resource
import secrets
import textwrap

import pytest

from collectives.api import (
    EngineError,
    HorovodInternalError,
    NoDescriptorError,
    PeerLostError,
    Timeouts,
    Topology,
    World,
)
from collectives.engine import start
from collectives.net import descriptors
from collectives.settings import Settings
from collectives.store.server import RendezvousServer
from tests import limited
from tests.collectives.backends.members import Processes
from tests.collectives.engine.job import PATIENCE, ones, outcome, run

REMEDY = "this process has no file descriptor left; raise the limit of ulimit -n"
LIMIT = 100
STARTED = ("NoneType", "None")


def caused(error, cause):
    """``error``, to which ``cause`` led."""
    error.__context__ = cause
    return error


LACK = OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize(
    "error",
    [
        LACK,
        caused(ImportError("torch is missing"), LACK),
        ImportError("libgloo.so: cannot open shared object file: Too many open files"),
        caused(EngineError("unexpected OSError"), LACK),
        caused(PeerLostError("the rendezvous server cannot be reached"), LACK),
    ],
    ids=repr,
)
def test_a_lack_is_explained_wherever_it_strikes(error):
    found = descriptors.explained(error, 3)
    assert type(found) is NoDescriptorError
    assert str(found).startswith(f"rank 3 cannot connect: {REMEDY}")
    assert descriptors.explained(found, 5) is found  # the explanation of another rank


def test_an_error_with_another_reason_stays():
    error = caused(OSError(errno.ECONNRESET, "reset"), ValueError("odd"))
    assert descriptors.explained(error, 3) is error


def test_the_lack_of_another_rank_is_not_that_of_this_one():
    """The driver tells all ranks how that one was lost."""
    error = HorovodInternalError(
        f"world 2 replaces world 1: rank 0 lost (cannot connect: {REMEDY}, Too many open files)"
    )
    assert descriptors.explained(error, 3) is error


def test_an_error_that_is_its_own_cause_stays():
    error = ValueError("odd")
    error.__cause__ = error
    assert descriptors.explained(error, 3) is error


def test_a_reserve_has_all_its_descriptors_or_none():
    before = len(os.listdir("/proc/self/fd"))
    with descriptors.Reserve(3):
        assert len(os.listdir("/proc/self/fd")) == before + 3
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 2, limit[1]))
    try:
        error = outcome(lambda: descriptors.Reserve(before + 3))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert error.errno == errno.EMFILE
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("victim", "free"), [(0, 3), (0, 4), (0, 6), (0, 8), (0, 9), (0, 10), (1, 2), (1, 3), (1, 4), (1, 5)]
)
def test_all_ranks_hear_which_rank_has_no_descriptors_left(victim, free):
    secret = secrets.token_bytes(16)
    with RendezvousServer(secret) as server:
        body = functools.partial(_start, server.port, secret, victim, free)
        with Processes(3, body) as processes:
            errors = processes.results()
    if free > 4 and errors[victim] == STARTED:  # as few may be enough
        assert errors == [STARTED] * 3
        return
    for rank, (kind, text) in enumerate(errors):
        assert kind == ("NoDescriptorError" if rank == victim else "HorovodInternalError"), errors
        assert text.startswith(f"rank {victim} cannot connect: "), errors
        assert "raise the limit of ulimit -n" in text


@pytest.mark.parametrize("free", [0, 1])
def test_a_rank_that_can_open_nothing_says_so(free):
    secret = secrets.token_bytes(16)
    with RendezvousServer(secret) as server:
        body = functools.partial(_start, server.port, secret, 0, free)
        with Processes(1, body) as processes:
            ((kind, text),) = processes.results()
    assert (kind, text.startswith(f"rank 0 cannot connect: {REMEDY}")) == ("NoDescriptorError", True), text


def _start(port, secret, victim, free, member):
    """The error with which a rank ends, in a process of its own; ``victim`` has ``free`` descriptors."""
    size = max(2, member.size)
    topology = Topology(member.rank, size, member.rank, size, hosts=(), cores=0)
    world = World("test", 0, topology, "node", ("127.0.0.1", port))
    settings = Settings(secret=secret, timeouts=Timeouts(connect=PATIENCE, collective=PATIENCE))
    held = _take_all_but(free) if member.rank == victim else []

    def body():
        engine = start.connect(world, settings)
        try:
            run(engine, ones(engine))
        finally:
            engine.shutdown()

    error = outcome(body)
    for descriptor in held:
        os.close(descriptor)
    return type(error).__name__, str(error)


def _take_all_but(free):
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    held = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        for _ in range(free):
            os.close(held.pop())
    return held


FEW, MORE = 200, 3000
RAISING = f"""
import multiprocessing, os, socket, subprocess
from collectives.net import descriptors

def soft():
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

def tell(line):
    line.send(soft())

resource.setrlimit(resource.RLIMIT_NOFILE, ({FEW}, {MORE}))
"""


def said(source):
    with limited.python(RAISING + textwrap.dedent(source)) as process:
        output, log = limited.ending(process)
    assert log == []
    return [int(word) for word in output.split()]


def test_a_process_raises_its_limit_for_a_block_and_knows_the_first_one():
    found = said("""
        with descriptors.raised_limit():
            print(soft(), descriptors.first_limit())
            descriptors.raise_limit()
        print(soft(), descriptors.first_limit())
    """)
    assert found == [MORE, FEW, FEW, FEW]


def test_a_process_that_is_forked_has_the_first_limit_again():
    found = said("""
        descriptors.raise_limit()
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=tell, args=(theirs,))
        child.start()
        print(soft(), ours.recv())
        child.join()
    """)
    assert found == [MORE, FEW]


def test_a_rank_raises_its_limit_only_if_its_job_needs_more():
    assert said(f"descriptors.provide({FEW // 2}); print(soft())") == [FEW]
    assert said(f"descriptors.provide({FEW}); print(soft())") == [MORE]


def test_where_the_limit_is_the_highest_nothing_changes():
    found = said("""
        limit_descriptors(100)
        print(int(descriptors.raise_limit()), int(descriptors.is_raised()), soft(), descriptors.first_limit())
    """)
    assert found == [0, 0, 100, 100]
