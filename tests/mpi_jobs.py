"""The ranks of test_mpi_jobs.py: ``python -m tests.mpi_jobs NAME``. They end with the line "done"."""

import os
import sys

import numpy as np
import pytest

from collectives.api import CollectiveTimeoutError, InvalidRequestError, Operation, SettingsError
from collectives.backends.mpi.transport import MpiTransport
from hvd_cluster.core import basics, features
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.ops.arrays import in_place
from hvd_cluster.ops.objects import allgather_object
from hvd_cluster.ops.submission import run


def mpi():
    from mpi4py import MPI

    return MPI


def total(process_set=global_process_set):
    """The sum over 1, 2... of the ranks of a set."""
    numbers = np.array([basics.rank() + 1.0])
    run(Operation.ALLREDUCE, in_place, numbers, f"of {process_set.ranks}", process_set)
    return numbers[0]


def over_mpi():
    """HOROVOD_CPU_OPERATIONS=mpi: one job after the other, with process sets."""
    assert not features.mpi_enabled()
    operations, begin = [], MpiTransport._run
    MpiTransport._run = lambda self, *arguments: (operations.append(self.group.ranks), begin(self, *arguments))[1]
    for _ in range(2):
        basics.init(process_sets=[[0, 1], [1, 2, 3]])
        rank = basics.rank()
        assert (basics.size(), total()) == (4, 10.0)
        if basics.rank() < 2:
            assert total(basics.registered_set([0, 1])) == 3.0
        if basics.rank() > 0:
            assert total(basics.registered_set([1, 2, 3])) == 9.0
        added = basics.add_process_set([0, 3])
        if basics.rank() in (0, 3):
            assert total(added) == 5.0
        assert features.mpi_enabled()
        assert not features.gloo_enabled()
        assert total() == 10.0  # the first rank that shuts down ends the operations of others
        assert features.mpi_threads_supported() == (os.environ.get("HOROVOD_MPI_THREADS_DISABLE") != "1")
        basics.shutdown()
    sets = {ranks for ranks in [(0, 1, 2, 3), (0, 1), (1, 2, 3), (0, 3)] if rank in ranks}
    assert set(operations) == sets


def communicators():
    """Parts of MPI.COMM_WORLD as jobs beside each other, and as process sets of one job."""
    world = mpi().COMM_WORLD
    rank = world.Get_rank()
    part = [3, 1] if rank % 2 else [0, 2]
    basics.init(comm=part)
    assert (basics.rank(), basics.size(), global_process_set.mpi_comm) == (part.index(rank), 2, None)
    assert allgather_object(rank) == part
    basics.init(comm=part)
    basics.init()
    with pytest.raises(InvalidRequestError, match=r"already, with the ranks .*, not \[0, 1, 2, 3\] of MPI.COMM_WORLD"):
        basics.init(comm=world)
    basics.shutdown()

    alone = ProcessSet(mpi().COMM_SELF)
    basics.init(comm=part, process_sets=[alone])  # these ranks exchange their sets, not those of the other job
    assert [basics.engine().process_sets.ranks(id) for id in basics.engine().process_sets.ids()[1:]] == [(0,), (1,)]
    assert total(alone) == basics.rank() + 1
    assert total() == 3.0  # before the first of them shuts down
    basics.shutdown()

    halves = world.Split(rank // 2, -rank)
    basics.init(comm=halves)
    assert (basics.rank(), basics.size(), global_process_set.mpi_comm) == (halves.Get_rank(), 2, halves)
    assert allgather_object(rank) == sorted([rank, rank ^ 1], reverse=True)
    basics.shutdown()

    basics.init(comm=mpi().COMM_SELF)
    assert (basics.size(), total()) == (1, 1.0)
    basics.shutdown()

    pair = world.Create_group(world.Get_group().Incl([0, 3])) if rank in (0, 3) else mpi().COMM_NULL
    own, ends, listed = ProcessSet(halves), ProcessSet(pair), ProcessSet([1, 2])
    basics.init(comm=world, process_sets=[own, ends, listed])
    assert (own.ranks, ends.ranks, ends.included()) == (sorted([rank, rank ^ 1]), [0, 3], rank in (0, 3))
    assert [basics.engine().process_sets.ranks(id) for id in range(1, 5)] == [(0, 1), (2, 3), (0, 3), (1, 2)]
    assert total(own) == sum(own.ranks) + 2
    if ends.included():
        assert total(ends) == 5.0
    basics.init(comm=world, process_sets=[own, ends, listed])
    assert (ends.ranks, ends.process_set_id) == ([0, 3], 3)
    basics.init(process_sets=[ProcessSet(halves)])
    everybody = world.Dup()
    with pytest.raises(InvalidRequestError, match=r"a process set with the ranks .0, 1, 2, 3. exists already"):
        basics.add_process_set(ProcessSet(everybody))
    with pytest.raises(InvalidRequestError, match=r"is MPI.COMM_NULL on this rank, but all ranks add the same"):
        basics.add_process_set(ProcessSet(mpi().COMM_NULL))
    basics.shutdown()


def bad_communicators():
    """Nothing starts, and nothing hangs."""
    world = mpi().COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    cases = {
        f"rank {rank} of it: call init.. only on ranks": [(rank + 1) % size],
        "is MPI.COMM_NULL, but this process is rank": mpi().COMM_NULL,
        r"must be different ranks of MPI.COMM_WORLD, which has 0 to 1 here \(.*MPI": [0, 1, 7],
        "must be different ranks": [rank, rank],
        "must be None for all ranks, a list of ranks of MPI.COMM_WORLD": "world",
        "connects two groups; merge them first": mpi().COMM_SELF.Create_intercomm(0, world, 1 - rank),
    }
    for text, comm in cases.items():
        with pytest.raises(InvalidRequestError, match=text):
            basics.init(comm=comm)
        assert not basics.is_initialized()
    if rank == 0:
        os.environ["HOROVOD_START_TIMEOUT"] = "0.5"
        with pytest.raises(CollectiveTimeoutError, match=r"of the ranks \[0, 1\] of MPI, some did not call hvd.init"):
            basics.init(comm=[0, 1])
        with pytest.raises(SettingsError, match="MPI cannot be used again in this process"):
            basics.init(comm=[0, 1])


def ended_mpi():
    """The script has ended MPI before."""
    mpi().Finalize()
    with pytest.raises(SettingsError, match="MPI_Finalize has ended MPI in this process, which cannot start it again"):
        basics.init()


def few_threads():
    """The script has started MPI with too low a thread level, for which it is told the remedy."""
    import mpi4py

    mpi4py.rc.thread_level = "single"
    mpi()
    with pytest.raises(SettingsError, match=r"several threads take turns to call it: leave mpi4py.rc.thread_level"):
        basics.init()


def alone():
    """Each process is alone in its MPI, because another launcher has started it."""
    with pytest.raises(SettingsError, match=r"MPI \(.*MPI.*\) sees 1.*mpirun.*HOROVOD_GPU_OPERATIONS=mpi out"):
        basics.init()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    os.write(1, b"done\n")
