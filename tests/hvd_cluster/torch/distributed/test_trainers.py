"""Trainers of others on the backend "hvd", with their own launchers: they need no change but its name."""

import os
import subprocess
import sys

import pytest

from tests import startup

TORCHRUN = "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
# Accelerate has no other option that starts several processes here by itself. The script says that they use CPUs.
LAUNCH = "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"
LAUNCH += "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"
BEGIN = """
import os
import torch
from torch import distributed as dist
import hvd_cluster.torch.distributed

torch.manual_seed(1)
rows = torch.utils.data.TensorDataset(torch.randn(32, 4))
loader = torch.utils.data.DataLoader(rows, batch_size=4)
model = torch.nn.Linear(4, 1)
"""
LIGHTNING = """
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.inner = model

    def training_step(self, batch, index):
        return self.inner(batch[0] + dist.get_rank()).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
strategy = DDPStrategy(process_group_backend="hvd")
Trainer(max_epochs=2, accelerator="cpu", devices=2, strategy=strategy, **quiet).fit(Model(), loader)
"""
ACCELERATE = """
from accelerate import Accelerator

dist.init_process_group("hvd")
accelerator = Accelerator(cpu=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trained, optimizer, loader = accelerator.prepare(model, optimizer, loader)
assert isinstance(trained, torch.nn.parallel.DistributedDataParallel)
for batch, in loader:
    optimizer.zero_grad()
    accelerator.backward(trained(batch + dist.get_rank()).square().mean())
    optimizer.step()
assert accelerator.gather(torch.tensor([dist.get_rank()])).tolist() == [0, 1]
"""
END = """
assert dist.get_backend() == "hvd"
weights = [torch.zeros_like(model.weight) for _ in range(2)]
dist.all_gather(weights, model.weight.detach())
os.write(1, f"{dist.get_rank()} {torch.equal(*weights)}\\n".encode())
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("launcher", "script"),
    [(TORCHRUN, LIGHTNING), (LAUNCH, ACCELERATE)],  # accelerate launch uses torchrun
    ids=["lightning", "accelerate"],
)
def test_a_trainer_has_equal_weights_on_all_ranks(tmp_path, launcher, script):
    (tmp_path / "train.py").write_text(BEGIN + script + END)
    command = [sys.executable, "-m", *launcher, tmp_path / "train.py"]
    environment = {**os.environ, "PYTHONPATH": startup.PATH, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if "True" in line) == ["0 True", "1 True"], done.stdout
