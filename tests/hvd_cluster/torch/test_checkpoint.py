"""Checkpoints of torch on one, two and three ranks."""

import os
from fractions import Fraction
from functools import partial

import pytest
import torch

import hvd_cluster.torch as hvd
from collectives.api import InvalidRequestError

pytestmark = pytest.mark.parametrize("ranks", [1, 2, 3], indirect=True)


class Training:
    """A model, an optimizer and a scheduler, whose state is made of gradients of all ranks."""

    def __init__(self, seed, sharded=False):
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.optimizer = hvd.DistributedOptimizer(optimizer, self.model.named_parameters(), sharded=sharded)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        hvd.broadcast_parameters(self.model.state_dict(), 0)

    def step(self, number):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number * 100 + hvd.rank()))
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()

    @property
    def parts(self):
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def values(self):
        return [*self.model.state_dict().values(), self.scheduler.get_last_lr()]


def resumed(folder, saves_sharded, loads_sharded):
    """Whether a training goes on as if it had never ended. Each rank has a folder of its own, as on many hosts."""
    folder = os.path.join(folder, str(hvd.rank()))
    first = Training(1, saves_sharded)
    for number in range(4):
        if number == 2:
            extra = {"mean": torch.ones(2), "names": ["a"], "scale": 0.5}
            hvd.checkpoint.save(folder, step=2, epoch=1, metric=0.5, extra=extra, **first.parts)
        first.step(number)
    second = Training(2, loads_sharded)
    found = hvd.checkpoint.load(folder, **second.parts)
    for number in (2, 3):
        second.step(number)
    assert (found.step, found.epoch, found.metric, found.extra["names"]) == (2, 1, 0.5, ["a"])
    assert torch.equal(found.extra["mean"], torch.ones(2))
    assert os.path.basename(found.path) == "0000001-step-2.pt"
    # The statistics of a BatchNorm are rank 0's.
    skipped = {3, 4, 5} if hvd.rank() else set()
    same = [
        torch.equal(torch.as_tensor(a), torch.as_tensor(b))
        for a, b in zip(first.values(), second.values(), strict=True)
    ]
    return [each for number, each in enumerate(same) if number not in skipped]


@pytest.mark.parametrize("kinds", [(False, False), (True, True), (True, False)], ids=str)
def test_a_training_goes_on(ranks, tmp_path, kinds):
    assert all(map(all, ranks.run(resumed, str(tmp_path), *kinds)))
    assert os.listdir(tmp_path) == ["0"]


def test_the_file_is_one_of_torch(ranks, tmp_path):
    ranks.run(partial(hvd.checkpoint.save, tmp_path, step=1, model=torch.nn.Linear(2, 1), extra=[1]))
    states = torch.load(tmp_path / "0000001-step-1.pt", weights_only=True)
    assert states.keys() == {"model", "optimizer", "extra"}
    assert list(states["model"]) == ["weight", "bias"]


def kept(folder):
    model = torch.nn.Linear(2, 1)
    for step, loss in enumerate([0.5, 0.2, 0.4, 0.3]):
        model.weight.data.fill_(step)
        hvd.checkpoint.save(folder, step=step, model=model, metric=loss, keep=1, background=True)
        model.weight.data.fill_(-1)  # the snapshot was taken at once
    found = []
    for which in ("latest", "best"):
        step = hvd.checkpoint.load(folder, which, model=model).step
        found.append((step, model.weight[0, 0].item()))
    hvd.checkpoint.wait()
    return found


def test_the_latest_and_the_best_written_in_the_background(ranks, tmp_path):
    assert ranks.run(kept, str(tmp_path)) == [[(3, 3.0), (1, 1.0)]] * ranks.size
    assert len(os.listdir(tmp_path)) == 4


def in_memory():
    model = torch.nn.Linear(2, 1)
    hvd.checkpoint.save("memory://of-torch/run", step=1, model=model)
    found = hvd.checkpoint.load("memory://of-torch/run", 1, model=model)
    return found.path


def test_a_folder_of_fsspec(ranks):
    pytest.importorskip("fsspec")
    assert ranks.run(in_memory) == ["memory://of-torch/run/0000001-step-1.pt"] * ranks.size


def error_of(call):
    with pytest.raises((hvd.checkpoint.CheckpointError, InvalidRequestError)) as caught:
        call()
    return str(caught.value)


def errors(folder, in_the_way):
    model, optimizer = torch.nn.Linear(2, 1), torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    save, load = hvd.checkpoint.save, hvd.checkpoint.load
    found = {}
    assert load(folder, model=model, missing_ok=True) is None
    found["missing"] = error_of(lambda: load(folder, model=model))
    found["keep"] = error_of(lambda: save(folder, step=1, model=model, keep=0))
    found["state"] = error_of(lambda: save(folder, step=1, model=3))
    found["folder"] = error_of(lambda: save(in_the_way, step=1, model=model))
    save(in_the_way, step=1, model=model, background=True)
    found["background"] = error_of(hvd.checkpoint.wait)
    save(folder, step=1, model=model, extra=Fraction(1, 2))
    found["part"] = error_of(lambda: load(folder, model=model, optimizer=optimizer, weights_only=False))
    found["classes"] = error_of(lambda: load(folder, model=model))
    assert load(folder, model=model, weights_only=False).extra == Fraction(1, 2)
    return found


def test_all_ranks_raise_the_same_error(ranks, tmp_path):
    (tmp_path / "file").write_text("")
    found = ranks.run(errors, str(tmp_path / "run"), str(tmp_path / "file" / "run"))
    assert found == [found[0]] * ranks.size
    for key, said in {
        "missing": "run has no checkpoint (it is empty, or does not exist); give the folder",
        "keep": "keep=0 must be an integer of at least 1, or None to keep all checkpoints",
        "state": "rank 0 cannot make or read the checkpoint (AttributeError: 'int' object has no attribute 'state_",
        "folder": "rank 0 cannot use the storage of the checkpoint (NotADirectoryError",
        "background": "rank 0 cannot use the storage of the checkpoint (NotADirectoryError",
        "part": "0000001-step-1.pt has no state of the optimizer; give it to hvd.checkpoint.save, or leave it out here",
        "classes": "0000001-step-1.pt has classes besides tensors and plain data",
    }.items():
        assert said in found[0][key]


def damaged(folder):
    return error_of(lambda: hvd.checkpoint.load(folder, model=torch.nn.Linear(2, 1)))


def test_a_file_that_is_cut_off_or_foreign(ranks, tmp_path):
    ranks.run(partial(hvd.checkpoint.save, tmp_path, step=1, model=torch.nn.Linear(2, 1)))
    data, manifest = tmp_path / "0000001-step-1.pt", tmp_path / "0000001-step-1.json"
    data.write_bytes(data.read_bytes()[:-100])
    found = ranks.run(damaged, tmp_path)
    assert found == [found[0]] * ranks.size
    assert f"{data} has" in found[0]
    manifest.write_text(manifest.read_text().replace('"torch"', '"keras"'))
    assert (
        "was written by hvd_cluster.keras; load it there, not by hvd_cluster.torch" in ranks.run(damaged, tmp_path)[0]
    )
