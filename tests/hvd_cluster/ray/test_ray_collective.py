"""The backend "HVD" of ray.util.collective: actors, two ways to make a group, all collectives."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import ray

pytestmark = pytest.mark.leaves("descriptors")  # Ray keeps connections to actors
SIZE = 2
ROOT = Path(__file__).parents[3]


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


TRAINER = """
import sys
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train():
    import torch
    from ray.train.torch import prepare_model
    from torch import distributed

    torch.manual_seed(1)
    model = prepare_model(torch.nn.Linear(4, 1))
    torch.manual_seed(distributed.get_rank())
    model(torch.randn(8, 4)).square().mean().backward()
    own = model.module.weight.grad
    both = [torch.zeros_like(own) for _ in range(2)]
    distributed.all_gather(both, own)
    return distributed.get_backend(), type(model).__name__, torch.equal(*both)


ray.init(runtime_env={"worker_process_setup_hook": "hvd_cluster.torch.distributed.register"})
scaling, run = ScalingConfig(num_workers=2), RunConfig(storage_path=sys.argv[1])
trainer = TorchTrainer(train, torch_config=TorchConfig(backend="hvd"), scaling_config=scaling, run_config=run)
print("result", trainer.fit().return_value)
"""


@pytest.mark.timeout(600)
@pytest.mark.leaves("processes")  # Ray starts worker processes before they are needed
def test_a_torch_trainer_on_the_backend_of_torch(cluster, tmp_path):
    """The hook is one of a job, which needs a driver of its own."""
    pytest.importorskip("pandas")
    (tmp_path / "train.py").write_text(TRAINER)
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, tmp_path / "train.py", tmp_path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "result ('hvd', 'DistributedDataParallel', True)" in done.stdout, done.stderr
