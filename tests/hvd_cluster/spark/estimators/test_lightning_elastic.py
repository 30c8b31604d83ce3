"""Fits with Lightning on ranks that come and go."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lightning")

from fake_shards import elastic_line, line, same  # noqa: E402
from lightning_fits import ONE, TWO, fit_of, line_module, losses, trained, weight  # noqa: E402
from lightning_fits import modules_by_value as modules_by_value  # noqa: E402  a fixture

from hvd_cluster.spark.estimators.run import RunFolder  # noqa: E402
from hvd_cluster.spark.estimators.store import Store  # noqa: E402
from tests.startup import PATH  # noqa: E402

pytestmark = pytest.mark.leaves("environment")  # torch sets a variable with the first step of an optimizer


@TWO
def test_with_equal_shards_it_is_a_usual_fit(ranks):
    """To the last bit, with accumulation, clipping and a scheduler of steps."""

    def schedule(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def outcome(elastic, *shards):
        arguments = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
        module = line_module(scheduler=schedule, optimizer=torch.optim.Adam)
        return trained(ranks, fit_of(module, epochs=3, arguments=arguments, elastic=elastic), *shards)

    usual = outcome(False, line(20, validation=line(8)), line(20, validation=line(3)))
    elastic = outcome(True, *(elastic_line(20, number, validation=line(8 - 5 * number)) for number in (0, 1)))
    assert same(elastic["model"], usual["model"])
    for one, other in zip(elastic["history"], usual["history"], strict=True):
        assert same({**one, "seconds": 0}, {**other, "seconds": 0})
    assert elastic["best_epoch"] == usual["best_epoch"]


@TWO
@pytest.mark.parametrize(("sharded", "fewer"), [(False, 5), ("rank", 0)])
def test_uneven_and_empty_shards(ranks, sharded, fewer):
    """Each row counts the same in a step. Ranks that see no rows any more count nothing in values and averages."""
    module = line_module(optimizer=torch.optim.Adam)
    shards = [elastic_line(rows, number, validation=line(rows // 3)) for number, rows in enumerate((23, fewer))]
    outcome = trained(ranks, fit_of(module, epochs=30, elastic=True, sharded=sharded), *shards)
    assert [record["rows"] for record in outcome["history"]] == [23 + fewer] * 30
    assert weight(outcome) == pytest.approx(2, abs=0.1)
    alone, by_hand = line_module(optimizer=torch.optim.Adam), []
    optimizer = torch.optim.Adam(alone.parameters(), lr=0.2)  # 0.1 for each rank
    first, last = [[x for (x,), _ in line(rows).torch()] for rows in (23, fewer)]
    for _ in range(30):
        total = 0.0
        for number, x in enumerate(first):
            rows = torch.cat([x, *last[number : number + 1]])
            loss = (alone(rows) - 2 * rows).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
        by_hand.append(total / (23 + fewer))
    assert losses(outcome) == pytest.approx(by_hand, rel=1e-4)


def stopping(trainer, batch_idx):
    """All ranks stop at the end of the epoch in which one of them wants to."""
    if trainer.global_rank == 1 and trainer.current_epoch == 1 and batch_idx == 1:
        trainer.should_stop = True


def calling(function):
    import lightning.pytorch as pl

    class Calls(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            function(trainer, batch_idx)

    return Calls()


@TWO
def test_a_rank_that_wants_to_stop(ranks):
    fit = fit_of(epochs=5, elastic=True, callbacks=[calling(stopping)])
    outcome = trained(ranks, fit, elastic_line(20, 0, validation=line(4)), elastic_line(20, 1, validation=line(0)))
    assert [(record["epoch"], record["rows"]) for record in outcome["history"]] == [(0, 40), (1, 40)]


@TWO
def test_early_stopping_and_the_best_epoch(ranks):
    from lightning.pytorch.callbacks import EarlyStopping

    fit = fit_of(line_module(rate=0.35), epochs=9, elastic=True, callbacks=[EarlyStopping("val_loss", patience=2)])
    shards = [line(12, validation=line(4)), line(12, first=40, validation=line(4))]
    usual = trained(ranks, fit_of(fit.model, epochs=9, callbacks=[EarlyStopping("val_loss", patience=2)]), *shards)
    elastic = [elastic_line(12, 0, validation=line(4)), elastic_line(12, 1, first=40, validation=line(4))]
    outcome = trained(ranks, fit, *elastic)
    assert len(usual["history"]) < 9
    assert losses(outcome, "validation") == losses(usual, "validation")
    assert outcome["best_epoch"] == usual["best_epoch"]
    assert same(outcome["model"], usual["model"])


@TWO
def test_a_number_of_steps(ranks):
    """That ends the second epoch in its middle."""
    fit = fit_of(epochs=5, elastic=True, arguments={"max_steps": 7})
    outcome = trained(ranks, fit, elastic_line(20, 0), elastic_line(20, 1))
    assert [record["rows"] for record in outcome["history"]] == [40, 16]


@ONE
def test_a_hook_that_leaves_steps_out(ranks):
    module = line_module()
    type(module).on_train_batch_start = lambda self, batch, batch_idx: -1 if batch_idx == 2 else None
    with pytest.raises(ValueError, match=r"has returned -1 in step 3 of epoch 1, but workers that come and go"):
        trained(ranks, fit_of(module, elastic=True), elastic_line(20, 0))


@TWO
def test_it_goes_on_from_a_checkpoint(ranks, tmp_path):
    """Also a fit that was complete, and one that has nothing left to do."""

    def outcome(folder, *epochs):
        run = RunFolder(Store.create(str(tmp_path / folder)), "run")
        for count in epochs:
            fit = fit_of(line_module(optimizer=torch.optim.Adam), run=run, epochs=count, elastic=True)
            shards = [elastic_line(20, number, validation=line(4)) for number in (0, 1)]
            found = trained(ranks, fit, *shards)
        return [{**record, "seconds": 0} for record in found["history"]], found["model"]

    assert same(outcome("one", 5), outcome("two", 3, 2))


def test_the_loss_of_ranks_in_a_step_and_in_a_validation(tmp_path):
    """No step is lost or made twice, and the ranks that are left have the learning rate for their number."""
    here = Path(__file__).parent
    command = [sys.executable, "-m", "hvd_cluster", "-np", "3", "--min-np", "1", sys.executable]
    paths = os.pathsep.join([PATH, str(here)])
    done = subprocess.run(
        [*command, here / "elastic_lightning_job.py", tmp_path],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("0 steps lost") == 2
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["rows"][0] == 60
    assert found["rows"][3] == 20
    assert found["losses"][3] < found["losses"][0]
    expected = {"batches": 20, "begun": 1, "steps": 20, "training": True, "unsafe": False}
    assert {name: found[name] for name in expected} == expected
    assert found["rates"] == pytest.approx([found["rate"]])
