"""Parameters, batches by names, values that are logged, and learning rates, in one process."""

import warnings

import pytest

torch = pytest.importorskip("torch")

from hvd_cluster.spark.estimators.params import EstimatorParams  # noqa: E402
from hvd_cluster.spark.lightning import LightningEstimator  # noqa: E402
from hvd_cluster.spark.lightning.batches import NamedLayout, filler, form_of, rows_in  # noqa: E402
from hvd_cluster.spark.lightning.fit_recorder import scale_checkpoint  # noqa: E402
from hvd_cluster.spark.lightning.logged_values import PhaseValues, ValueRecorder, loss_of, merged  # noqa: E402
from hvd_cluster.spark.torch.learning_rates import scale_optimizers, scale_schedulers  # noqa: E402

# torch sets a variable.
pytestmark = pytest.mark.leaves("environment")


def matrix(rows, columns, dtype=torch.float64):
    return torch.arange(rows * columns).reshape(rows, columns).to(dtype)


def test_a_batch_has_a_tensor_for_each_name():
    layout = NamedLayout(["image", ["a", "b"]], ["y", "class", ["u", "v"], "flag"], "w", [[-1, 2, 2], [-1, 2]])
    features = matrix(3, 4), matrix(3, 2)
    labels = matrix(3, 1), matrix(3, 1, torch.int32), matrix(3, 2), matrix(3, 1, torch.bool)
    batch = layout.batch((features, labels, matrix(3, 1).reshape(-1)), torch.float32)
    assert form_of(batch) == {
        "image": (torch.float32, (2, 2)),
        ("a", "b"): (torch.float32, (2,)),
        "y": (torch.float32, ()),
        "class": (torch.int64, ()),
        ("u", "v"): (torch.float32, (2,)),
        "flag": (torch.bool, ()),
        "w": (torch.float32, ()),
    }
    assert torch.equal(batch["a", "b"], features[1].float())
    assert rows_in(batch) == 3
    assert form_of(filler(form_of(batch))) == form_of(batch)


def test_the_transformation_may_add_tensors():
    layout = NamedLayout(["x"], ["y"], None, None, [[1]], lambda batch: batch | {"twice": batch["x"] * 2})
    batch = layout.batch(((matrix(3, 1),), (matrix(3, 1),)), torch.float32)
    assert torch.equal(batch["twice"], matrix(3, 1) * 2)
    assert batch["y"].shape == (3, 1)
    lossy = NamedLayout(["x"], ["y"], None, None, None, lambda batch: {"x": batch["x"]})
    with pytest.raises(ValueError, match="transformation_fn returned no tensor for 'y'"):
        lossy.batch(((matrix(3, 1),), (matrix(3, 1),)), torch.float32)


def test_the_rows_of_a_batch_of_any_kind():
    assert rows_in({"name": "text", "x": torch.ones(5, 2)}) == 5
    assert rows_in([torch.ones(()), (torch.ones(3),)]) == 3
    assert rows_in("text") == 0
    assert set(form_of({"name": "text", "x": torch.ones(5, 2)})) == {"x"}


@pytest.mark.parametrize("name", sorted(set(LightningEstimator.PARAMETERS) - set(EstimatorParams.PARAMETERS)))
def test_a_parameter_of_lightning_has_a_setter_and_a_getter(name):
    estimator = LightningEstimator()
    value = {"trainer_args": {"min_epochs": 2}, "input_shapes": [[-1, 2]]}.get(name, 1)
    for accessor in LightningEstimator.PARAMETERS[name].accessor_names:
        assert getattr(estimator, f"set{accessor}")(value) is estimator
        assert getattr(estimator, f"get{accessor}")() == value
    assert estimator.hasParam(name)


class Logging(torch.nn.Module):
    """Writes down what reaches Lightning."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def log(
        self,
        name,
        value,
        logger=None,
        on_step=None,
        reduce_fx="mean",
        sync_dist=False,
        sync_dist_group=None,
        batch_size=None,
    ):
        self.seen.append((name, float(value), sync_dist))

    def on_train_epoch_end(self):
        """As that of Lightning."""

    on_validation_epoch_end = on_train_epoch_end


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (1 * 3 + 4 * 1) / 4),
        ({"reduce_fx": "avg"}, (1 * 3 + 4 * 1) / 4),
        ({"reduce_fx": torch.sum}, 5),
        ({"reduce_fx": "min"}, 1),
        ({"reduce_fx": max}, 4),
        ({"batch_size": 1}, 2.5),
    ],
)
def test_values_of_steps_are_combined(options, expected):
    module = Logging()
    recorder, parts = ValueRecorder(module), [PhaseValues(), PhaseValues()]
    for part, value, rows in zip(parts, (1.0, torch.tensor([4.0])), (3, 1), strict=True):
        recorder.begin(part, rows, is_training=True)
        module.log("v", value, sync_dist=True, **options)
        recorder.end(torch.as_tensor(value))
    total = merged(part.plain() for part in parts)
    assert total.logged["v"].number() == expected
    assert total.loss.number() == (1 * 3 + 4 * 1) / 4
    assert total.rows == 4
    assert module.seen == [("v", 1.0, False), ("v", 4.0, False)]  # nobody waits for other ranks


def test_values_between_steps_pass():
    module = Logging()
    recorder = ValueRecorder(module)
    module.log("late", 3, sync_dist=True)
    assert module.seen == [("late", 3.0, True)]
    assert recorder.between == {"late": 3.0}


def test_the_loss_of_a_step():
    loss = torch.ones(())
    assert loss_of(loss) is loss_of({"loss": loss}) is loss
    assert loss_of(None) is loss_of({}) is loss_of("text") is None


SCHEDULERS = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (2 + epoch)),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6, eta_min=0.01),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.7, total_steps=9),
    "cyclic": lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, 0.1, 0.4, step_size_up=2),
    "sequential": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6, eta_min=0.01),
        ],
        [3],
    ),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=list(SCHEDULERS))
def test_a_schedule_is_the_same_curve_times_the_ranks(make):
    def started():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
        return optimizer, make(optimizer)

    def rates(optimizer, scheduler):
        found = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer has made no step; an argument of a scheduler is old
            for _ in range(7):
                found.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
                scheduler.step()
        return found

    expected = rates(*started())
    optimizer, scheduler = started()
    scale_optimizers([optimizer], 4)
    scale_schedulers([scheduler], 4)
    checkpoint = {"optimizer_states": [optimizer.state_dict()], "lr_schedulers": [scheduler.state_dict()]}
    assert rates(optimizer, scheduler) == pytest.approx([4 * rate for rate in expected])
    scale_checkpoint(checkpoint, 1 / 4)
    optimizer, scheduler = started()
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    scheduler.load_state_dict(checkpoint["lr_schedulers"][0])
    assert rates(optimizer, scheduler) == pytest.approx(expected)
