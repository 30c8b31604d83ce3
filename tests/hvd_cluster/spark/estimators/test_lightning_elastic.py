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


def stopping_at_the_start(trainer, batch_idx):
    """Also a wish in the hook before the first step."""
    trainer.should_stop = trainer.should_stop or trainer.current_epoch == 1


def calling(function):
    import lightning.pytorch as pl

    class Calls(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            function(trainer, -1)

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            function(trainer, batch_idx)

    return Calls()


@TWO
@pytest.mark.parametrize(
    ("function", "least", "epochs"), [(stopping, None, 2), (stopping, 4, 4), (stopping_at_the_start, None, 2)]
)
def test_a_rank_that_wants_to_stop(ranks, function, least, epochs):
    fit = fit_of(epochs=5, elastic=True, callbacks=[calling(function)], arguments={"min_epochs": least})
    outcome = trained(ranks, fit, elastic_line(20, 0, validation=line(4)), elastic_line(20, 1, validation=line(0)))
    assert [(record["epoch"], record["rows"]) for record in outcome["history"]] == [
        (each, 40) for each in range(epochs)
    ]


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


@ONE
def test_the_number_of_steps_is_not_known(ranks):
    module = line_module()
    type(module).configure_optimizers = lambda self: [self.optimizer(self.parameters())][
        self.trainer.estimated_stepping_batches
    ]
    with pytest.raises(ValueError, match=r"estimated_stepping_batches is asked for, but .* leave min_num_proc"):
        trained(ranks, fit_of(module, elastic=True), elastic_line(20, 0))


@TWO
def test_it_goes_on_from_a_checkpoint(ranks, tmp_path):
    """Also with a limit for the number of steps, for which Lightning counts epochs in another way."""

    def outcome(folder, *epochs):
        run = RunFolder(Store.create(str(tmp_path / folder)), "run")
        for count in epochs:
            module, arguments = line_module(optimizer=torch.optim.Adam), {"max_steps": 100}
            fit = fit_of(module, run=run, epochs=count, elastic=True, arguments=arguments)
            shards = [elastic_line(20, number, validation=line(4)) for number in (0, 1)]
            found = trained(ranks, fit, *shards)
        return [{**record, "seconds": 0} for record in found["history"]], found["model"]

    assert same(outcome("one", 5), outcome("two", 3, 2))


def found_by(folder, mode, *options):
    """The results of the ranks of elastic_lightning_job.py, and its messages."""
    here = Path(__file__).parent
    command = [sys.executable, "-m", "hvd_cluster", *options, sys.executable, here / "elastic_lightning_job.py"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([PATH, str(here)]), "OMP_NUM_THREADS": "1"}
    arguments = [*command, folder, mode]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(path.read_text()) for path in sorted(folder.glob("found-*.json"))], done.stderr


def test_the_loss_of_ranks_in_a_step_and_in_a_validation(tmp_path):
    """No step is lost or made twice, and the rank that is left has the learning rate for one. So has the history."""
    (found,), messages = found_by(tmp_path, "deaths", "-np", "3", "--min-np", "1")
    assert messages.count("0 steps lost") == 2
    assert found["rows"] == [60, 40, 20, 20]
    assert found["losses"][3] < found["losses"][0]
    for rows, values in zip(found["rows"], found["values"], strict=True):
        assert {"count": rows, "mean": 3.0, "validations": 1.0}.items() <= values.items()
    expected = {"batches": 20, "begun": 1, "steps": 12, "training": True, "unsafe": False}
    assert {name: found[name] for name in expected} == expected
    assert found["rates"] == pytest.approx([found["rate"]])


def test_a_rank_that_comes_in_the_middle_of_an_epoch(tmp_path):
    """Both ranks go on with the same weights, the same counts and the learning rate for two."""
    script = tmp_path / "hosts.sh"
    script.write_text(f"#!/bin/sh\nif [ -e {tmp_path}/grow ]; then echo localhost:2; else echo localhost:1; fi\n")
    script.chmod(0o755)
    options = ("-np", "1", "--min-np", "1", "--max-np", "2", "--host-discovery-script", str(script))
    (first, second), messages = found_by(tmp_path, "growth", *options)
    assert "0 steps lost" in messages
    assert (first["rows"][0], first["rows"][-1]) == (20, 40)
    assert all({"validations": 1.0, "mean": 3.0}.items() <= values.items() for values in first["values"])
    assert [values["count"] for values in first["values"]] == first["rows"]
    for name in ("weight", "steps", "batches", "rates"):
        assert first[name] == second[name]
    assert first["rates"] == pytest.approx([2 * first["rate"]])
    assert (first["begun"], second["begun"]) == (1, 1)
