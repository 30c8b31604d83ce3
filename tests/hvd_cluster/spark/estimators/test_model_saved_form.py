"""Parameters as JSON and blobs, without Spark."""

import json
import pickle
import threading

import pytest

from hvd_cluster.spark.estimators import saved_form
from hvd_cluster.spark.estimators.saved_form import (
    BlobFormat,
    SavedForm,
    checked_metadata,
    complete_blobs,
    is_plain,
    restored,
)

REVERSED = BlobFormat("reversed", lambda group: pickle.dumps(group)[::-1], lambda data: pickle.loads(data[::-1]))
FORMATS = {"model": REVERSED, "optimizer": REVERSED}


def saved(values, defaults=()):
    return SavedForm.of("a.B", "B_1", "4.3.0", values, dict(defaults), FORMATS)


def pieces_of(form):
    found = {}
    for name, number, data in form.pieces():
        found.setdefault(name, {})[number] = data
    return found


def loaded(form, pieces=None):
    metadata = checked_metadata("/m", form.metadata)
    return restored("/m", metadata, complete_blobs("/m", metadata, pieces or pieces_of(form)), FORMATS)


def test_plain_values_are_json_and_others_blobs(monkeypatch):
    monkeypatch.setattr(saved_form, "PIECE_BYTES", 100)
    factor = 3
    values = {
        "epochs": 2,
        "names": ["a", ["b", "c"]],
        "history": [{"loss": 0.5, "epoch": 0}],
        "nothing": None,
        "model": {1: b"x" * 1000},
        "optimizer": b"y",
        "function": lambda x: factor * x,
    }
    form = saved(values, {"epochs": 1, "hook": len})
    metadata = json.loads(form.metadata)
    assert metadata["paramMap"] == {name: values[name] for name in ("epochs", "names", "history", "nothing")}
    assert metadata["defaultParamMap"] == {"epochs": 1}
    assert (metadata["class"], metadata["uid"], metadata["sparkVersion"]) == ("a.B", "B_1", "4.3.0")
    assert metadata["blobs"]["reversed"]["params"] == ["model", "optimizer"]
    assert metadata["blobs"]["cloudpickle"]["params"] == ["function"]
    assert len(pieces_of(form)["reversed"]) > 10
    found = loaded(form)
    assert found.pop("function")(2) == 6
    assert found == {name: value for name, value in values.items() if name != "function"}


@pytest.mark.parametrize("value", [{1: 2}, b"x", object(), [len], {"a": {1, 2}}])
def test_what_json_would_change_is_not_plain(value):
    assert not is_plain(value)


def test_a_value_that_cannot_be_saved():
    with pytest.raises(ValueError, match=r"parameter 'hook' cannot be saved: .*let it have no locks, files"):
        saved({"function": len, "hook": threading.Lock()})
    with pytest.raises(ValueError, match="parameter 'model' cannot be saved"):
        saved({"optimizer": {1: 2}, "model": threading.Lock()})


def test_a_folder_that_was_not_written_to_the_end(monkeypatch):
    monkeypatch.setattr(saved_form, "PIECE_BYTES", 100)
    form = saved({"model": b"x" * 1000})
    pieces = pieces_of(form)
    del pieces["reversed"][2]
    with pytest.raises(ValueError, match=r"/m is damaged: \d+ of \d+ pieces of its blob 'reversed' are there"):
        loaded(form, pieces)


def test_metadata_of_others():
    with pytest.raises(
        ValueError, match=r"/m has the class 'pyspark.ml.feature.X' in the format None, but here is format"
    ):
        checked_metadata("/m", '{"class": "pyspark.ml.feature.X", "paramMap": {}}')


def test_a_format_that_is_not_known():
    form = saved({"model": b"x"})
    metadata = json.loads(form.metadata)
    with pytest.raises(ValueError, match="a blob of the format 'reversed', but the formats here are cloudpickle"):
        restored("/m", metadata, form.blobs, {})


def test_a_module_that_is_missing():
    lacking = BlobFormat("reversed", bytes, lambda data: __import__("module_that_nobody_has"))
    with pytest.raises(ValueError, match="/m cannot be loaded: No module named 'module_that_nobody_has'; install"):
        restored("/m", {"paramMap": {}}, {"reversed": b""}, {"model": lacking})
