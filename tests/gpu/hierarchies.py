"""Tensors of a GPU that go in stages: four ranks, which are two hosts for the backends, and share the GPUs here."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from functools import partial

import hvd_cluster
from benchmarks.shared_gpu import variables
from collectives.api import Topology
from collectives.backends import registry
from collectives.net.attempts import ConnectAttempt
from collectives.net.interfaces import LOOPBACK
from collectives.settings import Settings
from tests.collectives.backends.device import Uploading
from tests.collectives.backends.matrix import checks
from tests.collectives.backends.offers import meet
from tests.gpu.backend import CHECK_SECONDS, arrays_of, failed_parts
from tests.gpu.rank import prepare

HOSTS = "aabb"
CONNECT_SECONDS = 60.0
SECRET = b"of the check"
WAYS = {
    "nccl": Settings(secret=SECRET, torus_allreduce=True),
    "tcp": Settings(secret=SECRET, hierarchical_allreduce=True),
    "gloo": Settings(secret=SECRET, hierarchical_allreduce=True, cpu_operations="gloo"),
    "mpi": Settings(secret=SECRET, hierarchical_allreduce=True, cpu_operations="mpi"),
}
"""By the backend between the hosts."""
PARTS = ("large allreduce", "average", "identity")
"""Of the matrix: these take few operations, each of which waits until the GPU has come to all ranks, stage by stage.
Averages of integers connect all ranks."""


def prepared(rank, way):
    """The bootstrap of the GPU of ``rank``."""
    size = len(HOSTS)
    topology = Topology(rank, size, HOSTS[:rank].count(HOSTS[rank]), 2, hosts=tuple(HOSTS), cores=1)
    on_host, on_gpu = registry.prepare(range(size), topology, WAYS[way], LOOPBACK)
    on_host.close()
    return on_gpu


def check_parts(backend, rank, names, way, tell):
    """The parts ``names``; each rank tells the name of a part when that is over."""
    assert not backend.absence, backend.absence
    assert [part.name for part in backend._parts] == ["nccl", way, "nccl"]
    arrays = arrays_of(rank)
    for name, check in checks(len(HOSTS) + 2).items():
        if name in names:
            check(Uploading(backend, arrays))
            tell(name)
    backend.close()


def matrix(member, names, way):
    """In a process for each rank."""
    prepare()
    backend = meet(prepared(member.rank, way), member.store, CONNECT_SECONDS)
    check_parts(backend, member.rank, names, way, member.tell)


def matrix_in_mpi():
    """As :func:`matrix`, in processes of mpirun, which exchange the offers by MPI."""
    from collectives.backends.mpi.library import start_mpi

    prepare()
    world = start_mpi(CONNECT_SECONDS).COMM_WORLD
    bootstrap = prepared(world.Get_rank(), "mpi")
    with ConnectAttempt(CONNECT_SECONDS) as attempt:
        backend = bootstrap.connect(world.allgather(bootstrap.offer), attempt)
    bootstrap.close()
    check_parts(backend, world.Get_rank(), PARTS, "mpi", lambda name: None)
    return "done"


def has_passed_in_mpi():
    """True also where there is no MPI, which is said."""
    if shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None:
        sys.stdout.write("  left out: mpirun or mpi4py is not installed\n")
        return True
    size = len(HOSTS)
    return hvd_cluster.run(matrix_in_mpi, num_proc=size, use_mpi=True, start_timeout=CHECK_SECONDS) == ["done"] * size


def has_passed(way):
    sys.stdout.write(f"NCCL in two hosts, {way} between them\n")
    return has_passed_in_mpi() if way == "mpi" else not failed_parts(len(HOSTS), PARTS, partial(matrix, way=way))


def failed_ways():
    """The backends between the hosts whose hierarchy failed."""
    return [way for way in WAYS if not has_passed(way)]


def main():
    import torch

    from collectives.backends.nccl.bootstrap import load

    gpus = torch.cuda.device_count()
    os.environ["HVD_CHECK_GPUS"] = str(gpus)
    for name, value in variables(len(HOSTS), gpus, load().version).items():
        os.environ.setdefault(name, value)
    sys.exit(bool(failed_ways()))


if __name__ == "__main__":
    from tests.gpu.hierarchies import main as importable_main

    importable_main()
