"""How the tests let a process of a pool go from world to world."""

import os
from dataclasses import replace

import hvd_cluster.torch as hvd
from collectives.api import Topology
from collectives.settings import world_from_environment
from hvd_cluster.core import basics


def place(rank, size, hosts=""):
    """``hosts`` has a letter for the host of each rank; without it all are on one."""
    names = tuple(hosts) or ("localhost",) * size
    local_rank, local_size = names[:rank].count(names[rank]), names.count(names[rank])
    return Topology(rank, size, local_rank, local_size, hosts=names, cores=0)


def go_to(round, rank, size, hosts=""):
    """Change to the world ``round``, as ``rank``; see :func:`place`."""
    world = world_from_environment(os.environ)
    host = hosts[rank] if hosts else world.host
    basics.change_world(replace(world, round=round, topology=place(rank, size, hosts), host=host))


def start_in(round, rank, size):
    """init(), in a process that the launcher starts in the world ``round``."""
    changed = {"HOROVOD_ROUND": round, "HOROVOD_RANK": rank, "HOROVOD_SIZE": size}
    changed |= {"HOROVOD_LOCAL_RANK": rank, "HOROVOD_LOCAL_SIZE": size}
    os.environ.update({name: str(value) for name, value in changed.items()})
    hvd.init()
