"""Curves in TensorBoard and MLflow, with doubles of the libraries, and with the real ones where they are installed."""

import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest

from hvd_cluster.core import basics
from hvd_cluster.reports import MetricLogger, metric_logger
from hvd_cluster.reports.metrics_reader import metrics


@pytest.fixture
def alone(monkeypatch):
    """Rank 0 of a world of one, without an engine."""
    monkeypatch.setattr(basics, "rank", lambda: 0)
    monkeypatch.setattr(metric_logger, "metrics", SimpleNamespace(average=lambda values, samples, name: values))


class Writer:
    def __init__(self, folder=""):
        self.folder, self.calls = folder, []

    def add_scalar(self, *point):
        self.calls.append(point)

    def flush(self):
        self.calls.append("flush")

    def close(self):
        self.calls.append("close")


@pytest.fixture
def libraries(monkeypatch):
    """Doubles of both; what they got."""
    got = []

    class EventFileWriter(Writer):
        def add_event(self, event):
            got.append(event)

        def flush(self):
            got.append("flush")

        def close(self):
            got.append("close")

    def summary(value):
        return value

    summary.Value = lambda **point: point
    parts = {
        "compat.proto.event_pb2": {"Event": lambda wall_time, step, summary: (step, summary)},
        "compat.proto.summary_pb2": {"Summary": summary},
        "summary.writer.event_file_writer": {"EventFileWriter": EventFileWriter},
    }
    for name in ("", ".compat", ".compat.proto", ".summary", ".summary.writer", *(f".{part}" for part in parts)):
        module = ModuleType(f"tensorboard{name}")
        vars(module).update(parts.get(name[1:], {}))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    mlflow = ModuleType("mlflow")
    mlflow.log_metrics = lambda values, step: got.append((step, values))
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    return got


def test_both_libraries_get_all_points(alone, libraries):
    with MetricLogger(tensorboard="logs", mlflow=True, prefix="train/") as curves:
        assert curves.log({"loss": 0.5}, step=3) == {"loss": 0.5}
    point = {"tag": "train/loss", "simple_value": 0.5}
    assert libraries == [(3, [point]), "flush", (3, {"train/loss": 0.5}), "close"]


def test_a_writer_of_the_script_is_used_again(alone):
    writer = Writer()
    with MetricLogger(writer) as curves:
        curves.log({"a": 1.0, "b": 2.0}, 1)
    curves.log({"a": 3.0}, 2)
    assert writer.calls == [("a", 1.0, 1), ("b", 2.0, 1), "flush", "close", ("a", 3.0, 2), "flush"]


def test_other_ranks_write_nothing(alone, monkeypatch):
    monkeypatch.setattr(basics, "rank", lambda: 1)
    writer = Writer()
    assert MetricLogger(writer).log({"a": 1.0}, 1) == {"a": 1.0}
    assert writer.calls == []


def test_a_point_that_cannot_be_written_is_a_warning(alone, libraries, caplog):
    def fail(values, step):
        raise ConnectionError("no server")

    sys.modules["mlflow"].log_metrics = fail
    assert MetricLogger(mlflow=True).log({"a": 1.0}, 7) == {"a": 1.0}
    assert "the metrics of step 7 are not logged (ConnectionError: no server)" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [({"tensorboard": "x"}, "pip install tensorboard$"), ({"mlflow": True}, "pip install mlflow$")],
)
def test_a_library_that_is_missing(monkeypatch, arguments, said):
    monkeypatch.setattr(metric_logger, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=said):
        MetricLogger(**arguments)


@pytest.mark.skipif(find_spec("tensorboardX") is None, reason="tensorboardX is not installed")
@pytest.mark.filterwarnings("ignore")  # of the library
@pytest.mark.leaves("environment")
def test_a_real_file_of_events(alone, monkeypatch, tmp_path):
    monkeypatch.setattr(metric_logger, "_is_there", lambda name: name == "tensorboardX")
    with MetricLogger(tmp_path / "logs") as curves:
        curves.log({"loss": 0.25}, 1)
    (file,) = (tmp_path / "logs").iterdir()
    assert b"loss" in file.read_bytes()


def test_metrics_is_the_object_of_all_bindings():
    assert metric_logger.metrics is metrics
