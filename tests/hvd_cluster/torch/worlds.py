"""How the tests let a process of a pool go from world to world."""

import os
from dataclasses import replace

import hvd_cluster.torch as hvd
from collectives.api import Topology
from collectives.settings import world_from_environment
from hvd_cluster.core import basics


def place(rank, size):
    """On the one host of these worlds."""
    return Topology(rank, size, rank, size, hosts=("localhost",) * size, cores=0)


def go_to(round, rank, size):
    """Change to the world ``round``, as ``rank``."""
    basics.change_world(replace(world_from_environment(os.environ), round=round, topology=place(rank, size)))


def start_in(round, rank, size):
    """init(), in a process that the launcher starts in the world ``round``."""
    changed = {"HOROVOD_ROUND": round, "HOROVOD_RANK": rank, "HOROVOD_SIZE": size}
    changed |= {"HOROVOD_LOCAL_RANK": rank, "HOROVOD_LOCAL_SIZE": size}
    os.environ.update({name: str(value) for name, value in changed.items()})
    hvd.init()
