"""Epochs on two ranks: different numbers of batches, checkpoints, early ends, metrics."""

import pytest
import torch

from tests.hvd_cluster.lightning.training import fit, flat, loader, regression, rows, trainer, weights

CLOSE = {"rel": 1e-4, "abs": 1e-6}


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 3)


def test_ranks_with_different_numbers_of_batches(pair, tmp_path):
    """Rank 0 has two batches in an epoch, and rank 1 has five. All go on from the state of rank 1."""
    inputs, targets = rows(28)
    parts = [(inputs[:8], targets[:8]), (inputs[8:], targets[8:])]

    def uneven():
        import hvd_cluster.torch as hvd

        module = regression(scheduler=halving)
        module.seen = []
        module.on_validation_end = lambda: module.seen.append((module.global_step, flat(weights(module))))
        batches, held_out = loader(4, parts[hvd.rank()]), loader(7, share=(hvd.rank(), 2))
        made = fit(module, batches, held_out, enable_checkpointing=True, default_root_dir=tmp_path, logger=False)
        rate = made.optimizers[0].param_groups[0]["lr"]
        return module.seen, rate, made.callback_metrics["error"].item(), made.checkpoint_callback.best_model_path

    one, two = pair.run(uneven)
    assert one == two
    assert [step for step, _ in one[0]] == [5, 10]
    assert one[0][-1][1] == pytest.approx(pair.run(lambda: _by_hand(parts))[0], **CLOSE)


def _by_hand(parts):
    """The same with a loop of torch; a rank without a batch counts as one with gradients of zero."""
    module = regression()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    scheduler = halving(optimizer)
    for _ in range(2):
        batches = [list(loader(4, part)) for part in parts]
        for step in range(5):
            optimizer.zero_grad()
            for own in batches:
                if step < len(own):
                    ((module.network(own[step][0]) - own[step][1]).square().mean() / 2).backward()
            optimizer.step()
            scheduler.step()
    return flat(weights(module))


def test_accumulated_gradients_of_uneven_epochs(pair):
    def uneven():
        import hvd_cluster.torch as hvd

        module = regression(scheduler=halving)
        made = fit(module, loader(4, rows(8 + 12 * hvd.rank())), accumulate_grad_batches=2)
        return flat(weights(module)), made.global_step, made.callback_metrics["loss_epoch"].item()

    one, two = pair.run(uneven)
    assert one == two
    assert one[1] == 2 * 3


class Rows(torch.utils.data.IterableDataset):
    """Its length is not known."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(zip(*self.data, strict=True))


def test_a_rank_without_batches(pair):
    inputs, targets = rows(12)

    def empty():
        import hvd_cluster.torch as hvd

        count = 12 * hvd.rank()
        module = regression()
        module.log = lambda *_, **__: None  # a rank without batches has nothing to log, and other ranks would wait
        batches = torch.utils.data.DataLoader(Rows((inputs[:count], targets[:count])), batch_size=4)
        made = fit(module, batches)
        return flat(weights(module)), made.global_step

    one, two = pair.run(empty)
    assert one == two
    assert one[1] == 6


def test_steps_of_uneven_epochs_end_together(pair):
    def limited():
        import hvd_cluster.torch as hvd

        module = regression()
        made = fit(module, loader(4, rows(8 + 12 * hvd.rank())), max_steps=7, max_epochs=-1)
        return flat(weights(module)), made.global_step, made.current_epoch

    one, two = pair.run(limited)
    assert one == two
    assert one[1] == 7


def test_resuming_gives_what_a_training_without_a_break_gives(pair, tmp_path):
    def start():
        import hvd_cluster.torch as hvd

        module = regression(scheduler=halving)
        batches = loader(4, share=(hvd.rank(), 2))
        made = fit(module, batches, batches, max_epochs=1)
        folder = tmp_path / str(hvd.rank())
        folder.mkdir()
        made.save_checkpoint(folder / "own.ckpt")
        made.save_checkpoint(tmp_path / "shared.ckpt")
        return (folder / "own.ckpt").exists()

    def go_on():
        import hvd_cluster.torch as hvd

        module = regression(seed=5, scheduler=halving)
        made = fit(module, loader(4, share=(hvd.rank(), 2)), ckpt_path=tmp_path / "shared.ckpt")
        return flat(weights(module)), made.global_step

    def without_a_break():
        import hvd_cluster.torch as hvd

        module = regression(scheduler=halving)
        made = fit(module, loader(4, share=(hvd.rank(), 2)))
        return flat(weights(module)), made.global_step

    assert pair.run(start) == [True, False]
    assert pair.run(go_on) == pair.run(without_a_break)


def test_all_ranks_stop_early_in_the_same_epoch(pair):
    """The error of rank 0 falls, and that of rank 1 rises."""

    def stop():
        from lightning.pytorch.callbacks import EarlyStopping

        import hvd_cluster.torch as hvd

        module = regression()
        direction = 1 if hvd.rank() else -1
        module.validation_step = lambda batch, batch_idx: module.log("own", float(direction * module.current_epoch))
        stopping = EarlyStopping("own", patience=2)
        batches = loader(4, share=(hvd.rank(), 2))
        made = fit(module, batches, batches, max_epochs=9, callbacks=[stopping])
        return made.current_epoch, flat(weights(module))

    one, two = pair.run(stop)
    assert one == two
    assert one[0] == 3


def test_metrics_see_the_rows_of_all_ranks(pair):
    """Rank 0 has 8 rows and rank 1 has 12, so the states have different shapes."""
    inputs, targets = rows(20)
    parts = [(inputs[:8], targets[:8]), (inputs[8:], targets[8:])]

    def measure():
        import torchmetrics

        import hvd_cluster.torch as hvd

        module = regression()
        module.mean, module.all = torchmetrics.MeanSquaredError(), torchmetrics.CatMetric()
        own = module.own = torchmetrics.MeanMetric(dist_sync_fn=lambda state, group: [state])

        def validation_step(batch, batch_idx):
            found = module.network(batch[0])
            module.mean(found, batch[1])
            module.all.update(batch[1])
            own.update(len(batch[1]))
            module.log("mean", module.mean, on_epoch=True)

        module.validation_step = validation_step
        module.on_validation_epoch_end = lambda: module.log("rows", float(len(module.all.compute())))
        found = trainer().validate(module, loader(4, parts[hvd.rank()]), verbose=False)[0]
        return found, module.mean.dist_sync_fn is None, own.dist_sync_fn is not None

    def expected():
        return (regression().network(inputs) - targets).square().mean().item()

    one, two = pair.run(measure)
    assert one == two
    assert one[0]["rows"] == 20
    assert one[0]["mean"] == pytest.approx(pair.run(expected)[0], rel=1e-5)
    assert one[1:] == (True, True)


def test_a_rank_that_fails_does_not_wait_for_the_others(fresh_pool):
    def fail():
        import hvd_cluster.torch as hvd

        hvd.init()
        module = regression()
        if hvd.rank() == 1:
            module.on_train_batch_end = lambda *_: 1 / 0
        try:
            fit(module, loader(4, share=(hvd.rank(), 2)))
        except ZeroDivisionError:
            hvd.shutdown()
            return "failed"
        except hvd.HorovodInternalError as error:
            return str(error)

    one, two = fresh_pool(2).run(fail)
    assert two == "failed"
    assert "rank 1" in one
