"""The backend "HVD" of ray.util.collective: actors, two ways to make a group, all collectives."""

import numpy as np
import pytest
import ray

pytestmark = pytest.mark.leaves("descriptors")  # Ray keeps connections to actors
SIZE = 2


class Actor:
    def __init__(self):
        import hvd_cluster.ray.torch

        assert hvd_cluster.ray.torch

    def join(self, rank, name):
        from ray.util import collective

        collective.init_collective_group(SIZE, rank, "HVD", name)

    def run(self, rank, name):
        import torch
        from ray.util import collective
        from ray.util.collective.types import ReduceOp

        own = np.full(4, rank + 1.0, np.float32)
        collective.allreduce(own, name)
        assert (own == 3.0).all()
        tensor = torch.full((3,), rank + 1)
        collective.allreduce(tensor, name, ReduceOp.PRODUCT)
        assert tensor.tolist() == [2] * 3
        collective.allreduce(tensor.fill_(rank), name, ReduceOp.MAX)
        assert tensor.tolist() == [1] * 3
        collective.broadcast(own.__imul__(rank + 1), 1, name)
        assert (own == 6.0).all()
        own[:] = rank + 1
        collective.reduce(own, 1, name)
        assert own.tolist() == [3.0 if rank == 1 else 1.0] * 4
        parts = [np.zeros(2), np.zeros(2)]
        collective.allgather(parts, np.full(2, float(rank)), name)
        assert [part.tolist() for part in parts] == [[0.0, 0.0], [1.0, 1.0]]
        part = np.zeros(2)
        collective.reducescatter(part, [np.full(2, 1.0), np.full(2, rank + 10.0)], name)
        assert part.tolist() == ([2.0] * 2 if rank == 0 else [21.0] * 2)
        collective.barrier(name)
        return collective.get_rank(name), collective.get_collective_group_size(name)

    def refuse(self, name):
        from ray.util import collective

        with pytest.raises(ValueError, match=r"send\(\) is not available in the backend 'HVD'"):
            collective.send(np.zeros(1), 1 - collective.get_rank(name), name)
        frozen = np.zeros(3)
        frozen.flags.writeable = False
        with pytest.raises(ValueError, match=r"shape \(3,\) cannot be written.*copy"):
            collective.allreduce(frozen, name)
        collective.barrier(name)

    def leave(self, name):
        from ray.util import collective

        collective.destroy_collective_group(name)


@pytest.fixture
def actors(cluster):
    kind = ray.remote(num_cpus=0)(Actor)
    actors = [kind.remote() for _ in range(SIZE)]
    yield actors
    for actor in actors:
        ray.kill(actor)


def on_all(actors, method, *arguments, ranks=True):
    calls = [
        getattr(actor, method).remote(*((rank,) if ranks else ()), *arguments) for rank, actor in enumerate(actors)
    ]
    return ray.get(calls, timeout=60)


def test_actors_that_join_a_group(actors):
    for _ in range(2):  # the name is free again
        on_all(actors, "join", "one")
        assert on_all(actors, "run", "one") == [(0, SIZE), (1, SIZE)]
        on_all(actors, "refuse", "one", ranks=False)
        on_all(actors, "leave", "one", ranks=False)


def test_a_driver_that_declares_a_group(actors):
    from ray.util import collective

    import hvd_cluster.ray.torch

    assert hvd_cluster.ray.torch.HvdGroup.backend() == "HVD"
    collective.create_collective_group(actors, SIZE, [0, 1], "HVD", "two")
    assert on_all(actors, "run", "two") == [(0, SIZE), (1, SIZE)]
    on_all(actors, "leave", "two", ranks=False)
