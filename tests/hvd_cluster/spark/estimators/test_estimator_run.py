"""The folder of a run, and which epochs a fit has after an earlier one."""

import functools
import json
import os
import subprocess
import sys
from importlib.util import find_spec

import cloudpickle
import numpy as np
import pytest

from hvd_cluster.spark.estimators.columns import FitColumns
from hvd_cluster.spark.estimators.estimator import FitPlan
from hvd_cluster.spark.estimators.run import EpochRange, RunFolder, fingerprint
from hvd_cluster.spark.estimators.store import Store


@pytest.mark.parametrize(
    ("epochs", "done", "earlier", "expected"),
    [
        (5, 0, None, (0, 5)),
        (5, 3, (0, 5), (0, 5)),  # it failed: two are left
        (5, 5, (0, 5), (5, 10)),  # it was complete: five more
        (5, 7, (5, 10), (5, 10)),
        (2, 3, (0, 5), (0, 3)),  # nothing is left of the two
        (4, 3, None, (3, 7)),  # a checkpoint that does not say
    ],
)
def test_the_epochs_after_an_earlier_fit(epochs, done, earlier, expected):
    assert EpochRange.of(epochs, done, earlier) == EpochRange(*expected)


class Loss:
    def __init__(self, weights):
        self.weights = weights


def shifted(by):
    return lambda output, label: output - label + by


@pytest.mark.parametrize(
    ("value", "others"),
    [
        ("mse", ["mae", None, ["mse"]]),
        (shifted(1), [shifted(2), lambda output, label: label - output, abs]),
        (functools.partial(max, 1), [functools.partial(max, 2), functools.partial(min, 1)]),
        (Loss(np.array([1.0, 2.0])), [Loss(np.array([1.0, 3.0])), Loss([1.0, 2.0])]),
        ({"a": 0.5, "b": [1]}, [{"a": 0.5, "b": [2]}, {"a": 0.5}]),
    ],
    ids=["text", "function", "partial", "object", "weights"],
)
def test_what_a_loss_is_of_can_be_compared_between_processes(value, others):
    same = cloudpickle.loads(cloudpickle.dumps(value))
    assert fingerprint(value) == fingerprint(same)
    assert fingerprint(value) not in map(fingerprint, others)


def test_a_function_with_a_variable_that_has_no_value_yet():
    def loss(output):
        return later

    assert fingerprint(loss) == fingerprint(loss)
    later = 1
    assert loss(None) == later


def test_a_value_that_holds_itself_has_an_end():
    loop = Loss(None)
    loop.weights = [loop]
    assert fingerprint(loop) == fingerprint(loop)


def test_a_run_is_written_and_read(tmp_path):
    run = RunFolder.of(Store.create(tmp_path), "mine", "pytorch")
    assert run.read() is None
    run.check_writable({"epochs": 3})
    run.write(b"weights", [{"epoch": 0}])
    assert run.read() == b"weights"
    assert json.loads((tmp_path / "runs/mine/logs/history.json").read_text()) == [{"epoch": 0}]


def test_each_run_has_a_name_of_its_own(tmp_path):
    names = {RunFolder.of(Store.create(tmp_path), None, "pytorch").run_id for _ in range(3)}
    assert len(names) == 3
    assert all(name.startswith("pytorch_") for name in names)


def test_a_run_id_without_a_store():
    with pytest.raises(ValueError, match=r"run_id is 'mine', but there is no store.*Store.create"):
        RunFolder.of(None, "mine", "pytorch")


def test_a_store_that_cannot_be_written(tmp_path):
    (tmp_path / "runs").write_text("in the way")
    with pytest.raises(ValueError, match=r"the store cannot be written: .*fit.json.*give a store=") as caught:
        RunFolder.of(Store.create(tmp_path), "mine", "pytorch").check_writable({})
    assert str(caught.value).count("give a store") == 1


def test_two_fits_of_one_run_at_once_are_refused(tmp_path):
    """Another run, and the same one afterwards, are fine."""
    run, other = (RunFolder.of(Store.create(tmp_path), name, "pytorch") for name in ("mine", "yours"))
    for _ in range(2):
        with run.taken(), other.taken():
            again = RunFolder.of(Store.create(tmp_path), "mine", "pytorch").taken()
            with pytest.raises(ValueError, match=r"run_id is 'mine', and another fit .* has that run under way"), again:
                pass
    with RunFolder(None, "mine").taken(), RunFolder(None, "mine").taken():
        pass


def test_a_fit_that_is_refused_leaves_the_folder_of_the_other_one_alone(tmp_path):
    """The files say what the fit under way is about."""
    run = RunFolder.of(Store.create(tmp_path), "mine", "pytorch")
    first, second = (plan_of(run, epochs) for epochs in (3, 7))
    with first.taken():
        with pytest.raises(ValueError, match="has that run under way"), second.taken():
            pass
        about = json.loads((tmp_path / "runs/mine/fit.json").read_text())
    assert about == {"features": ["x"], "labels": ["y"], "epochs": 3}


def plan_of(run, epochs):
    """One that nobody carries out."""
    columns = FitColumns(["x"], ["y"])
    return FitPlan({"epochs": epochs}, columns, {}, run, None, {}, {}, print, (), None, {})


def test_without_a_store_nothing_is_written():
    run = RunFolder.of(None, None, "pytorch")
    run.check_writable({})
    run.write(b"weights", [])
    assert run.read() is None


def test_a_store_that_keeps_no_runs(tmp_path):
    run = RunFolder.of(Store.create(tmp_path, save_runs=False), "mine", "pytorch")
    run.check_writable({})
    run.write(b"weights", [])
    assert run.read() is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not all(map(find_spec, ("torch", "lightning", "keras"))), reason="needs all frameworks")
def test_trainings_do_not_load_pyspark():
    """A worker has no use for it, and would start a second later."""
    names = "lightning.training", "keras.training", "estimators.parquet"
    script = "".join(f"import hvd_cluster.spark.{name}\n" for name in names)
    script += "import sys; print('pyspark' in sys.modules)"
    environment = {**os.environ, "KERAS_BACKEND": "torch"}
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "False\n"
