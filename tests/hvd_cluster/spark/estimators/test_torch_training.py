"""The training of a TorchEstimator on ranks, without Spark."""

import copy
import math
import shutil

import pytest

torch = pytest.importorskip("torch")

import cloudpickle  # noqa: E402
import fake_shards  # noqa: E402
import numpy as np  # noqa: E402
from fake_shards import FakeShard, TwoHeads, elastic_line, line, same  # noqa: E402

import hvd_cluster.torch as hvd  # noqa: E402
from hvd_cluster.spark.estimators.run import RunFolder  # noqa: E402
from hvd_cluster.spark.estimators.store import Store  # noqa: E402
from hvd_cluster.spark.torch.batches import BatchLayout  # noqa: E402
from hvd_cluster.spark.torch.callbacks import EarlyStopping, FitCallback  # noqa: E402
from hvd_cluster.spark.torch.learning_rates import SchedulerCallback  # noqa: E402
from hvd_cluster.spark.torch.payload import checkpoint_of, packed  # noqa: E402
from hvd_cluster.spark.torch.training import TorchFit, train  # noqa: E402

pytestmark = pytest.mark.leaves("environment")  # torch sets a variable with the first step of an optimizer
ONE, TWO = [pytest.mark.parametrize("ranks", [size], indirect=True) for size in (1, 2)]


@pytest.fixture(autouse=True, scope="module")
def modules_by_value():
    cloudpickle.register_pickle_by_value(fake_shards)
    yield
    cloudpickle.unregister_pickle_by_value(fake_shards)


def fit_of(model=None, optimizer=None, run=None, layout=None, **options):
    torch.manual_seed(0)
    model = model or torch.nn.Linear(1, 1, bias=False)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"losses": torch.nn.functional.mse_loss, "verbose": 0, **options}
    return TorchFit(model, optimizer, layout or BatchLayout(["x"], ["y"]), run or RunFolder(None, "none"), **options)


def trained(ranks, fit, *shards):
    """The outcome of rank 0; the others have none."""
    payload = packed(fit)

    def on_rank(shards):
        from hvd_cluster.core import basics

        torch.set_num_threads(1)
        return train(shards[basics.rank()], payload)

    outcome, *others = ranks.run(on_rank, shards)
    assert not any(others)
    return outcome


def losses(outcome, part="train"):
    return [record[part]["loss"] for record in outcome["history"]]


@ONE
def test_one_rank_trains_as_a_loop_by_hand_does(ranks):
    fit = fit_of(epochs=2, metrics=[lambda output, label: (output - label).abs().mean()])
    model, shard = copy.deepcopy(fit.model), line(10)
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(2):
        total = 0.0
        for (x,), (y,) in shard.torch():
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
        expected.append(total / 10)
    outcome = trained(ranks, fit, shard)
    assert losses(outcome) == pytest.approx(expected)
    assert torch.allclose(outcome["model"]["weight"], model.weight.detach())
    assert [record["epoch"] for record in outcome["history"]] == [0, 1]
    assert [len(record["train"]["all_metrics"][0]) for record in outcome["history"]] == [1, 1]
    assert outcome["history"][0]["rows"] == 10


@TWO
def test_uneven_and_empty_shards(ranks):
    outcome = trained(ranks, fit_of(epochs=4), line(0), line(23))
    assert outcome["history"][0]["rows"] == 23
    assert outcome["model"]["weight"].item() == pytest.approx(2, abs=1e-2)
    assert outcome["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.1)


@TWO
def test_the_learning_rate_is_multiplied_by_the_number_of_ranks(ranks):
    """Two ranks with the same batch take the step of one rank with twice the rate."""
    outcome = trained(ranks, fit_of(), line(4), line(4))
    fit = fit_of()
    (x,), (y,) = next(line(4).torch())
    torch.nn.functional.mse_loss(fit.model(x), y).backward()
    assert torch.allclose(outcome["model"]["weight"], fit.model.weight.detach() - 0.2 * fit.model.weight.grad)


@TWO
def test_averages_are_those_of_all_rows(ranks):
    still = torch.nn.Linear(1, 1, bias=False)
    fit = fit_of(still, torch.optim.SGD(still.parameters(), lr=0.0))
    outcome = trained(ranks, fit, line(3, validation=line(5)), line(20, validation=line(0)))
    for part, rows in (("train", [line(3), line(20)]), ("validation", [line(5)])):
        pairs = [(x, y) for shard in rows for (x,), (y,) in shard.torch()]
        x, y = (torch.cat(side) for side in zip(*pairs, strict=True))
        expected = torch.nn.functional.mse_loss(still(x), y).item()
        assert losses(outcome, part) == pytest.approx([expected])


@TWO
def test_gradients_of_several_batches(ranks):
    """Five batches are two steps of two, and one of the last alone."""
    fit = fit_of(passes=2, epochs=20, compression=hvd.Compression.fp16)
    outcome = trained(ranks, fit, line(20), line(12))
    assert outcome["model"]["weight"].item() == pytest.approx(2, abs=0.05)


class Lost:
    """A step in which a rank is lost, once; the steps since the last commit begin again."""

    def __init__(self, step):
        self.step, self.steps = step, 0

    def __call__(self, *arguments):
        from collectives.api import HostsUpdatedInterrupt
        from hvd_cluster.spark.torch.training import train_minibatch

        self.steps += 1
        if self.steps == self.step:
            raise HostsUpdatedInterrupt(skip_sync=False)
        return train_minibatch(*arguments)


@TWO
def test_rows_of_steps_that_begin_again_count_once(ranks):
    """Two batches make a step, so the first of a pair is not committed when the second one fails."""
    options = {"elastic": True, "epochs": 2, "passes": 2}
    whole, lost = (
        trained(ranks, fit_of(minibatch=minibatch, **options), elastic_line(24, 0), elastic_line(24, 1))
        for minibatch in (None, Lost(4))
    )
    assert [record["rows"] for record in lost["history"]] == [48, 48]
    assert losses(lost) == losses(whole)
    assert same(lost["model"], whole["model"])


@ONE
def test_the_last_batches_take_part(ranks):
    """Three batches with two passes a step: the third one counts half as much as a step has."""
    outcome = trained(ranks, fit_of(passes=2), line(12))
    fit = fit_of()
    weight, batches = fit.model.weight, list(line(12).torch())
    for group in (batches[:2], batches[2:]):
        weight.grad = None
        for (x,), (y,) in group:
            (torch.nn.functional.mse_loss(fit.model(x), y) / 2).backward()
        weight.data -= 0.1 * weight.grad
    assert torch.allclose(outcome["model"]["weight"], weight.detach())


class Overshoot(FitCallback):
    """Makes the second epoch the best one, and writes down what it sees."""

    def on_train_begin(self, model, optimizer, history):
        self.model = model

    def on_epoch_begin(self, epoch):
        weight = {0: 5.0, 1: 2.0, 2: 7.0}[epoch]
        self.model.weight.data.fill_(weight)


@TWO
def test_the_best_epoch_is_kept(ranks):
    still = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(still.parameters(), lr=0.0)
    fit = fit_of(still, optimizer, epochs=3, callbacks=[Overshoot()])
    best = trained(ranks, fit, line(8, validation=line(4)), line(8, validation=line(4)))
    last = trained(ranks, fit, line(8), line(8))
    assert (best["model"]["weight"].item(), best["best_epoch"]) == (2, 1)
    assert (last["model"]["weight"].item(), last["best_epoch"]) == (7, 2)
    assert losses(best, "validation")[1] == 0


class StopOnRank(FitCallback):
    """One rank alone wants to stop."""

    def on_epoch_end(self, epoch, history):
        from hvd_cluster.core import basics

        self.stop_training = basics.rank() == 1 and epoch == 1


@TWO
def test_all_ranks_stop_when_one_does(ranks):
    assert len(losses(trained(ranks, fit_of(epochs=9, callbacks=[StopOnRank()]), line(8), line(8)))) == 2


@ONE
def test_early_stopping(ranks):
    still = torch.nn.Linear(1, 1, bias=False)
    fit = fit_of(still, torch.optim.SGD(still.parameters(), lr=0.0), epochs=9, callbacks=[EarlyStopping(2)])
    assert len(losses(trained(ranks, fit, line(8, validation=line(4))))) == 3
    with pytest.raises(ValueError, match=r"EarlyStopping looks at the loss of the validation, but there is none"):
        trained(ranks, fit, FakeShard([], []))  # before it reads a row


@ONE
def test_a_scheduler(ranks):
    make = [lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]
    make.append(lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0))
    outcome = trained(ranks, fit_of(epochs=2, callbacks=[SchedulerCallback(make[0])]), line(8))
    assert outcome["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.025)
    still = torch.nn.Linear(1, 1, bias=False)
    fit = fit_of(still, torch.optim.SGD(still.parameters(), lr=1e-6), epochs=2, callbacks=[SchedulerCallback(make[1])])
    assert trained(ranks, fit, line(8))["optimizer"]["param_groups"][0]["lr"] == pytest.approx(1e-7)


@TWO
def test_the_rates_of_a_schedule_are_multiplied_by_the_number_of_ranks(ranks):
    """Those that a scheduler sets itself, too; the result has the rates of the user."""
    model = torch.nn.Linear(1, 1, bias=False)
    mine = torch.optim.SGD(model.parameters(), lr=0.3)
    cycle = torch.optim.lr_scheduler.OneCycleLR(mine, 0.1, total_steps=10)
    for _ in range(3):
        mine.step()
        cycle.step()
    make = [lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)]
    make.append(lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=10))
    fit = fit_of(model, torch.optim.SGD(model.parameters(), lr=0.3), epochs=3, callbacks=[SchedulerCallback(make[0])])
    outcome = trained(ranks, fit, line(4), line(4))
    group = outcome["optimizer"]["param_groups"][0]
    expected = mine.param_groups[0]
    names = ["lr", "initial_lr", "max_lr", "min_lr"]
    assert [group[name] for name in names] == pytest.approx([expected[name] for name in names])
    weight = copy.deepcopy(model)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.3)
    twice = make[1](optimizer)
    for _ in range(3):
        (x,), (y,) = next(line(4).torch())
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(weight(x), y).backward()
        optimizer.step()
        twice.step()
    assert outcome["model"]["weight"].item() == pytest.approx(weight.weight.item())


SCHEDULERS = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (2 + epoch)),
    "linear": lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=list(SCHEDULERS))
def test_a_schedule_goes_on_with_a_fit_that_does(make):
    history = [{"train": {"loss": loss}} for loss in (3.0, 2.0, 2.5, 2.6, 2.7, 2.8, 2.9)]

    def rates(optimizer, first, last):
        callback, found = SchedulerCallback(make), []
        callback.on_train_begin(None, optimizer, history[:first])
        for epoch in range(first, last):
            optimizer.step()
            callback.on_epoch_end(epoch, history[: epoch + 1])
            found.append(optimizer.param_groups[0]["lr"])
        return found

    whole, parts = (torch.optim.SGD([torch.ones(1)], lr=0.1) for _ in range(2))
    expected = rates(whole, 0, 7)
    assert rates(parts, 0, 0) + rates(parts, 0, 3) + rates(parts, 3, 7) == pytest.approx(expected)


@ONE
def test_a_loss_that_is_nan_in_the_third_step(ranks):
    shard = line(16)
    shard._sides[1][0][9] = math.nan
    with pytest.raises(FloatingPointError, match=r"the loss is nan in step 3 of epoch 1 on rank 0; look for rows"):
        trained(ranks, fit_of(terminate_on_nan=True, epochs=3), shard)


@ONE
def test_without_the_option_nan_is_in_the_history(ranks):
    shard = line(16)
    shard._sides[1][0][9] = math.nan
    assert math.isnan(losses(trained(ranks, fit_of(), shard))[0])


@ONE
def test_a_minibatch_function(ranks):
    def minibatch(
        model,
        optimizer,
        transform_outputs,
        loss_fn,
        inputs,
        labels,
        sample_weights,
        backward_passes_per_step,
        batch_idx,
    ):
        optimizer.zero_grad()
        outputs, fitted = transform_outputs(model(*inputs) * 2, labels)
        loss = loss_fn(outputs, fitted, sample_weights)
        loss.backward()
        optimizer.step()
        return outputs, loss

    outcome = trained(ranks, fit_of(minibatch=minibatch, epochs=60), line(10))
    assert outcome["model"]["weight"].item() == pytest.approx(1, abs=1e-2)


@ONE
def test_losses_that_are_made_in_the_worker(ranks):
    def make(model, device):
        assert device.type == "cpu"
        return lambda output, label: torch.nn.functional.mse_loss(output, label) + 100 * len(list(model.parameters()))

    assert losses(trained(ranks, fit_of(losses=None, loss_constructors=[make]), line(8)))[0] > 100


@TWO
def test_several_inputs_and_outputs_with_weights_of_rows(ranks):
    torch.manual_seed(0)
    rows = 24
    features = [torch.randn(rows, 2), torch.randn(rows, 1)]
    labels = [features[0].sum(1, keepdim=True), torch.randint(3, (rows, 1))]
    weights = torch.rand(rows, dtype=torch.float64)
    model = TwoHeads()
    groups = [{"params": model.first.parameters(), "lr": 0.05}, {"params": model.second.parameters()}]
    fit = fit_of(
        model,
        torch.optim.Adam(groups, lr=0.01),
        layout=BatchLayout(["pair", "single"], ["y", "class"], "w"),
        losses=[torch.nn.functional.mse_loss, torch.nn.CrossEntropyLoss()],
        loss_weights=[1.0, 0.5],
        metrics=[
            [lambda output, label: output.mean(), lambda output, label: (output.argmax(1) == label).float().mean()]
        ],
        epochs=40,
    )
    shards = [
        FakeShard([x[part] for x in features], [y[part] for y in labels], 4, weights[part])
        for part in (slice(0, 8), slice(8, rows))
    ]
    outcome = trained(ranks, fit, *shards)
    assert losses(outcome)[-1] < losses(outcome)[0] / 2
    assert 0 <= outcome["history"][-1]["train"]["all_metrics"][0][1] <= 1
    assert [group["lr"] for group in outcome["optimizer"]["param_groups"]] == pytest.approx([0.05, 0.01])


@ONE
def test_a_batch_of_one_row_passes_batch_norm(ranks):
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1))
    assert len(losses(trained(ranks, fit_of(model, epochs=2), line(9)))) == 2


@TWO
def test_a_batch_of_one_row_on_one_rank_and_batch_norm_of_all_ranks(ranks):
    from hvd_cluster.torch import SyncBatchNorm

    model = torch.nn.Sequential(SyncBatchNorm(1), torch.nn.Linear(1, 1))
    assert len(losses(trained(ranks, fit_of(model, epochs=2), line(9), line(12)))) == 2


@ONE
def test_steps_and_batches_of_an_epoch(ranks):
    seen = fit_of(train_steps=2, validation_steps=1, validation_batch_size=3)
    outcome = trained(ranks, seen, line(20, validation=line(20)))
    assert outcome["history"][0]["rows"] == 8
    (x,), (y,) = next(line(20, batch_size=3).torch())
    expected = torch.nn.functional.mse_loss(x * outcome["model"]["weight"].item(), y).item()
    assert losses(outcome, "validation") == pytest.approx([expected])


@TWO
def test_no_rows(ranks):
    with pytest.raises(ValueError, match="there are no rows to train with"):
        trained(ranks, fit_of(), line(0, validation=line(4)), line(0, validation=line(4)))


@ONE
def test_no_rows_for_validation(ranks):
    outcome = trained(ranks, fit_of(epochs=2), line(8, validation=line(0)))
    assert outcome["best_epoch"] == 1
    assert "validation" not in outcome["history"][0]


@ONE
def test_an_error_in_the_first_step_tells_about_the_tensors(ranks):
    model = torch.nn.Sequential(torch.nn.Embedding(4, 2), torch.nn.Flatten(), torch.nn.Linear(2, 1))
    with pytest.raises(RuntimeError) as caught:
        trained(ranks, fit_of(model), line(4))
    assert (
        "The model got float32 of shape (4, 1), and the labels are float32 of shape (4, 1)" in caught.value.__notes__[0]
    )
    assert "long()" in caught.value.__notes__[0]


class Fail(FitCallback):
    """Fails at the beginning of an epoch."""

    def __init__(self, at):
        self.at = at

    def on_epoch_begin(self, epoch):
        if epoch == self.at:
            raise OSError("the disk is gone")


@TWO
def test_a_failed_fit_goes_on_from_its_checkpoint(ranks, tmp_path):
    run, shards = RunFolder(Store.create(tmp_path), "mine"), (line(8, validation=line(4)), line(20, validation=line(4)))

    def momentum():
        model = torch.nn.Linear(1, 1, bias=False)
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    torch.manual_seed(3)
    whole = trained(ranks, fit_of(*momentum(), epochs=5), *shards)
    torch.manual_seed(3)
    with pytest.raises(OSError, match="the disk is gone"):
        trained(ranks, fit_of(*momentum(), run=run, epochs=5, callbacks=[Fail(3)]), *shards)
    kept = checkpoint_of(run.read())
    assert len(kept["history"]) == 3
    assert kept["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.01)
    rest = trained(ranks, fit_of(*momentum(), run=run, epochs=5), *shards)
    assert losses(rest) == pytest.approx(losses(whole))
    assert torch.allclose(rest["model"]["weight"], whole["model"]["weight"])
    more = trained(ranks, fit_of(*momentum(), run=run, epochs=2), *shards)
    assert [record["epoch"] for record in more["history"]] == list(range(7))


def far(output, label):
    return torch.nn.functional.mse_loss(output, label) + 10


@TWO
def test_the_best_epoch_of_an_earlier_fit_counts_as_long_as_its_loss_is_of_the_same_kind(ranks, tmp_path):
    """Each value of another loss may be larger than all earlier ones."""
    shards = line(8, validation=line(4)), line(8, validation=line(4))
    trained(ranks, fit_of(run=RunFolder(Store.create(tmp_path / "a"), "mine"), epochs=2, measure="mse"), *shards)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for folder, measure, best in (("a", "mse", 1), ("b", "far", 4)):
        run = RunFolder(Store.create(tmp_path / folder), "mine")
        found = trained(ranks, fit_of(run=run, epochs=3, measure=measure, losses=far), *shards)
        assert found["best_epoch"] == best


@ONE
def test_the_checkpoint_of_another_optimizer_or_model_is_refused(ranks, tmp_path):
    run, shards = RunFolder(Store.create(tmp_path), "mine"), (line(8),)
    model = torch.nn.Linear(1, 1, bias=False)
    trained(ranks, fit_of(model, torch.optim.SGD(model.parameters(), lr=np.float64(0.1)), run), *shards)
    trained(ranks, fit_of(run=run), *shards)  # a number of NumPy is no obstacle
    text = "run_id is 'mine', but the checkpoint of that run is of another model or optimizer: "
    with pytest.raises(ValueError, match=f"{text}its optimizer was SGD, and now it is Adam; give another run_id"):
        trained(ranks, fit_of(model, torch.optim.Adam(model.parameters()), run), *shards)
    with pytest.raises(ValueError, match=text):
        trained(ranks, fit_of(torch.nn.Linear(1, 1), run=run), *shards)


@TWO
@pytest.mark.parametrize("place", ["host", "rank"])
@pytest.mark.parametrize(("rows", "options"), [((8, 8), {}), ((0, 23), {}), ((20, 12), {"passes": 2})])
def test_a_sharded_fit_has_the_result_of_a_plain_one(ranks, place, rows, options, tmp_path):
    """Also on uneven and empty shards, with a best epoch in the middle, and after it goes on from a checkpoint."""

    def outcome(sharded, folder):
        run = RunFolder(Store.create(str(tmp_path / folder)), "run")
        for epochs in (3, 2):
            model = torch.nn.Sequential(torch.nn.Linear(1, 70), torch.nn.Tanh(), torch.nn.Linear(70, 1))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
            torch.manual_seed(0)
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter)
            fit = fit_of(model, optimizer, run, epochs=epochs, sharded=sharded, **options)
            found = trained(ranks, fit, *[line(each, validation=line(4)) for each in rows])
        return found

    plain, sharded = outcome(False, "plain"), outcome(place, "sharded")
    for found in (plain, sharded):
        for record in found["history"]:
            del record["seconds"]
    for key in plain:
        assert same(sharded[key], plain[key]), (key, sharded[key], plain[key])
    assert len(sharded["history"]) == 5


@TWO
def test_buffers_of_a_sharded_fit_are_those_of_the_rank_with_the_most_rows(ranks):
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1))
    fit = fit_of(model, torch.optim.SGD(model.parameters(), lr=0.01), sharded=True)
    outcome = trained(ranks, fit, line(0), line(23))
    assert outcome["model"]["0.num_batches_tracked"].item() == 6
