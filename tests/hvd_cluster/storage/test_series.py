"""Checkpoints of a folder: which stay, which is the latest and the best, and damaged, foreign and missing files."""

import json
import os
from importlib.util import find_spec

import pytest

from collectives.api import InvalidRequestError
from hvd_cluster.storage import folders
from hvd_cluster.storage.folders import CheckpointError, LocalFolder, RemoteFolder, open_folder
from hvd_cluster.storage.series import Note, Series, best_of, manifest_of

needs_fsspec = pytest.mark.skipif(find_spec("fsspec") is None, reason="fsspec is not installed")


@pytest.fixture(params=["path", "file", pytest.param("memory", marks=needs_fsspec)])
def folder(request, tmp_path):
    """Folders of all kinds: a path, a URI, and one of fsspec."""
    if request.param != "memory":
        yield open_folder(tmp_path / "a" / "b" if request.param == "path" else f"file://{tmp_path}/a%20b")
        return
    yield open_folder("memory://checkpoints/a")
    import fsspec

    fsspec.filesystem("memory").rm("/checkpoints", recursive=True)


@pytest.fixture
def series(tmp_path):
    return Series(LocalFolder(tmp_path))


def add(series, step, metric=None, mode="min", keep=2):
    series.add(b"of %d" % step, "test", "bin", Note(step, metric=metric, mode=mode), keep)


def steps(folder):
    return [int(name.split("-")[2].removesuffix(".bin")) for name in folder.names() if name.endswith(".bin")]


def test_what_is_written_is_read(folder):
    series = Series(folder)
    series.add(memoryview(b"data"), "test", "bin", Note(7, 1, 0.5, "max", {"a": [1]}), 1)
    found = series.find("latest")
    assert (found.note, series.read(found)) == (Note(7, 1, 0.5, "max", {"a": [1]}), b"data")
    assert series.path(found) == folder.location("0000001-step-7.bin")


def test_the_newest_and_the_best_stay(folder):
    for step, metric in enumerate([0.5, 0.2, float("nan"), 0.9, None, 0.3]):
        add(Series(folder), step, metric)
    assert steps(folder) == [1, 4, 5]
    assert len(folder.names()) == 6
    series = Series(folder)
    assert [series.find(which).note.step for which in ("latest", "best", 4)] == [5, 1, 4]


@pytest.mark.parametrize(("mode", "best"), [("min", 3), ("max", 2)])
def test_the_best_by_mode_and_the_newest_of_equal_ones(series, mode, best):
    for step, metric in enumerate([0.5, 0.1, 0.9, 0.1]):
        add(series, step, metric, mode, keep=None)
    assert series.find("best").note.step == best


def test_the_latest_is_the_one_that_was_saved_last(series):
    """A training that went back to step 5 has steps again; none is written over."""
    for step in (5, 10, 6, 6):
        add(series, step, keep=None)
    assert series.find("latest").number == 4
    assert series.find(6).number == 4
    assert series.find(10).number == 2


def test_nothing_of_others_is_removed(series, tmp_path):
    for name in ("notes.json", "step-1.bin", ".draft-other"):
        (tmp_path / name).write_text("{}")
    (tmp_path / ".draft-0000001-step-1.bin").write_text("left by a kill")
    for step in range(3):
        add(series, step, keep=1)
    assert sorted(os.listdir(tmp_path)) == [
        *(".draft-other", "0000004-step-2.bin", "0000004-step-2.json", "notes.json", "step-1.bin")
    ]


@pytest.mark.parametrize("text", ["", '{"format": "hvd-che', "\x80"])
def test_a_manifest_that_is_cut_off_does_not_count(series, tmp_path, caplog, text):
    add(series, 1)
    (tmp_path / "0000002-step-2.json").write_bytes(text.encode("latin-1"))
    assert series.find("latest").note.step == 1
    assert "0000002-step-2.json is cut off" in caplog.text
    add(series, 3, keep=1)
    assert sorted(os.listdir(tmp_path)) == ["0000003-step-3.bin", "0000003-step-3.json"]


@pytest.mark.parametrize("text", ["[]", "{}", '{"format": "hvd-checkpoint-9"}', '{"format": "hvd-checkpoint-1"}'])
def test_a_manifest_of_another_program(series, tmp_path, text):
    (tmp_path / "0000002-step-2.json").write_text(text)
    for call in (lambda: series.find("latest"), lambda: add(series, 1)):
        with pytest.raises(CheckpointError, match=r"0000002-step-2.json is not a manifest .*: another program, or"):
            call()


def test_a_folder_without_checkpoints(tmp_path):
    missing = Series(LocalFolder(tmp_path / "missing"))
    assert missing.find("latest", missing_ok=True) is None
    with pytest.raises(
        CheckpointError, match=r"missing has no checkpoint \(it is empty, or does not exist\); give the"
    ):
        missing.find("latest")
    (tmp_path / "model.pt").write_text("")
    with pytest.raises(CheckpointError, match=r"no checkpoint \(it has 1 other files\)"):
        Series(LocalFolder(tmp_path)).find("best")


def test_a_checkpoint_that_is_not_there(series):
    add(series, 3)
    with pytest.raises(CheckpointError, match=r"no checkpoint of 4; give 'latest', 'best' or one of the steps \[3\]"):
        series.find(4, missing_ok=True)
    with pytest.raises(CheckpointError, match=r"has a metric; give hvd.checkpoint.save a metric, or load the latest"):
        series.find("best")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_bytes(b"of"), "has 2 bytes, not 4"),
        (lambda path: path.write_bytes(b"of 2"), "has another content than was written"),
        (lambda path: path.unlink(), "is missing"),
    ],
)
def test_a_damaged_file(series, tmp_path, damage, said):
    add(series, 1)
    damage(tmp_path / "0000001-step-1.bin")
    with pytest.raises(CheckpointError, match=rf"0000001-step-1.bin {said}: restore .*, or remove .*-step-1.json, so"):
        series.read(series.find("latest"))


def test_no_draft_stays_after_an_error(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr(folders.os, "fsync", fail)
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError, match="disk full"):
        LocalFolder(tmp_path / "a").write("name", b"x")
    assert os.listdir(tmp_path / "a") == []


def test_a_manifest_is_json(series, tmp_path):
    add(series, 1, metric=0.5)
    text = (tmp_path / "0000001-step-1.json").read_bytes()
    assert json.loads(text)["note"] == {"step": 1, "epoch": None, "metric": 0.5, "mode": "min", "extra": None}
    assert manifest_of(text) == series.find("best")
    assert best_of([]) is None


def test_folders_that_cannot_be_opened(monkeypatch):
    with pytest.raises(InvalidRequestError, match="the folder of the checkpoints is ''"):
        open_folder("")
    if find_spec("fsspec") is not None:
        with pytest.raises(InvalidRequestError, match="fsspec cannot open 'nonsense://x'"):
            open_folder("nonsense://x")
        assert isinstance(open_folder("memory://x"), RemoteFolder)
    monkeypatch.setattr(folders, "find_spec", lambda name: None)
    with pytest.raises(InvalidRequestError, match="needs fsspec, because its scheme is 's3': pip install fsspec"):
        open_folder("s3://bucket/x")
