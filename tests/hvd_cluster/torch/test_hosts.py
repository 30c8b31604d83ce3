"""Two hosts of two ranks, each host a network namespace."""

import itertools
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import hvd_cluster.torch as hvd
from hvd_cluster.core import basics
from tests.collectives.engine.job import until
from tests.namespaces import HOSTS

HEARTBEAT_SECONDS = 2


@pytest.fixture
def pool(network, fresh_pool):
    """Initialized ranks 0 and 1 on the first host, 2 and 3 on the second."""
    hosts = [host for host in HOSTS for _ in range(2)]
    pool = fresh_pool(4, hosts, {"HOROVOD_HEARTBEAT_SECONDS": str(HEARTBEAT_SECONDS)}, network=network)
    pool.run(hvd.init)
    return pool


def check_everything(nbytes):
    """The backends that each operation ran on."""
    backends = set()
    basics.engine().events.subscribe(lambda event: backends.add(getattr(event, "backend", None)))
    rank, length = hvd.rank(), nbytes // 4
    mine = torch.full((length,), rank + 1.0)
    assert torch.equal(hvd.allreduce(mine, op=hvd.Sum), torch.full((length,), 10.0))
    assert torch.equal(hvd.allreduce(mine, op=hvd.Average), torch.full((length,), 2.5))
    assert torch.equal(hvd.allreduce(mine * (1 + 2j), op=hvd.Sum), torch.full((length,), 10 + 20j))
    rows = hvd.allgather(torch.full((rank * length, 2), rank))
    assert torch.equal(rows[:, 1], torch.arange(4).repeat_interleave(torch.arange(4) * length))
    for root in range(4):
        assert torch.equal(hvd.broadcast(mine, root), torch.full((length,), root + 1.0))
    received, splits = hvd.alltoall(torch.arange(4).repeat_interleave(length), torch.tensor([length] * 4))
    assert torch.equal(received, torch.full((4 * length,), rank))
    assert splits.tolist() == [length] * 4
    scattered = hvd.reducescatter(torch.arange(4.0).repeat_interleave(length), op=hvd.Sum)
    assert torch.equal(scattered, torch.full((length,), 4.0 * rank))
    hvd.barrier()
    return backends - {None}, hvd.local_size(), hvd.cross_size()


@pytest.mark.parametrize("nbytes", [8, 1 << 20])
def test_everything_works_in_stages_by_default(pool, nbytes):
    assert pool.run(check_everything, nbytes) == [({"hierarchical"}, 2, 2)] * 4


def reduce_for_ever(nbytes, marker, victim=None):
    """``marker`` is a file that says that the allreduces run; the ``victim`` kills itself then."""
    values = torch.ones(nbytes // 4)
    for step in itertools.count():
        hvd.allreduce_(values, op=hvd.Average, name="values")
        if step == 10 and hvd.rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 10 and hvd.rank() == 0:
            marker.touch()


def reduce_until_error(*arguments):
    """The name and the text of the error that ends the allreduces, and the ranks that it names."""
    with pytest.raises(hvd.HorovodInternalError) as caught:
        reduce_for_ever(*arguments)
    hvd.shutdown()
    return type(caught.value).__name__, str(caught.value), getattr(caught.value, "ranks", ())


@pytest.mark.parametrize("nbytes", [8, 1 << 23])
def test_a_cut_link_ends_all_ranks_which_name_one_of_the_other_host(pool, network, nbytes, tmp_path):
    marker = tmp_path / "running"
    with ThreadPoolExecutor(1) as background:
        ends = background.submit(pool.run, reduce_until_error, nbytes, marker)
        until(marker.exists, 60)
        network.cut()
        found = ends.result()
    for rank, (kind, text, named) in enumerate(found):
        assert kind == "PeerLostError", text
        assert [each // 2 for each in named] == [1 - rank // 2], (rank, text)


@pytest.mark.parametrize("victim", [0, 3])
def test_a_killed_rank_is_named_on_both_hosts(pool, victim, tmp_path):
    outcomes = pool.outcomes(reduce_until_error, 1 << 20, tmp_path / "running", victim)
    survivors = [outcome.unwrap() for rank, outcome in enumerate(outcomes) if rank != victim]
    assert outcomes[victim] is None
    assert all(kind == "PeerLostError" and f"rank {victim}" in text for kind, text, _ in survivors), survivors
