"""How the tests let a process of a pool go from world to world."""

import os
from contextlib import closing
from dataclasses import replace

import hvd_cluster.torch as hvd
from collectives.api import Topology
from collectives.settings import Settings, world_from_environment
from collectives.store.client import RendezvousClient
from collectives.store.memory import PrefixStore
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


def await_center(round):
    """Return when rank 0 is in the world ``round``, where this process is a newcomer.

    In a start of an earlier world rank 0 would hear of this one, and end that start.
    """
    world = world_from_environment(os.environ)
    secret = Settings.from_environment(os.environ, world.topology).secret
    with closing(RendezvousClient(*world.rendezvous, secret, 60.0)) as client:
        PrefixStore(client, world.job).get(f"round-{round}/start-0/rank-0", 60.0)


def start_in(round, rank, size):
    """init(), in a process that the launcher starts in the world ``round``."""
    changed = {"HOROVOD_ROUND": round, "HOROVOD_RANK": rank, "HOROVOD_SIZE": size}
    changed |= {"HOROVOD_LOCAL_RANK": rank, "HOROVOD_LOCAL_SIZE": size}
    os.environ.update({name: str(value) for name, value in changed.items()})
    hvd.init()
