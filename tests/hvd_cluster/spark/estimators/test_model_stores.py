"""Stores: paths, files that appear whole, other file systems."""

import os
import pickle
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import fs as pafs
from pyarrow import parquet

from hvd_cluster.spark.estimators import filesystems
from hvd_cluster.spark.estimators.store import (
    AbstractFilesystemStore,
    DBFSLocalStore,
    FilesystemStore,
    HDFSStore,
    LocalStore,
    Store,
)
from hvd_cluster.storage import folders


@pytest.fixture(params=["local", "uri", "memory"])
def store(request, tmp_path):
    prefix = {"local": str(tmp_path), "uri": f"file://{tmp_path}", "memory": f"memory://{tmp_path.name}/store"}
    if request.param == "memory":
        pytest.importorskip("fsspec")
    return Store.create(prefix[request.param])


def test_a_file_comes_back(store):
    path = store.get_checkpoint_path("run_1")
    assert not store.exists(path)
    store.write_bytes(path, b"\x00\xff" * 1000)
    assert store.exists(path)
    assert store.exists(store.get_run_path("run_1"))
    assert store.read(path) == b"\x00\xff" * 1000
    store.write_text(path, "später")
    assert store.read(path).decode() == "später"
    copy = pickle.loads(pickle.dumps(store))
    assert copy.read(path) == store.read(path)


def test_names_of_runs_are_no_part_of_the_uri(store):
    """What a URI would take for an escape or a mistake."""
    for run in ("my run", "r%41", "Läufer"):
        store.write_bytes(store.get_checkpoint_path(run), run.encode())
        assert store.read(store.get_checkpoint_path(run)).decode() == run
    assert not store.exists(store.get_checkpoint_path("rA"))
    assert store.get_checkpoints("my run", suffix="") == [store.get_checkpoint_path("my run")]


def test_the_checkpoints_of_a_run(store):
    for name in ("b.ckpt", "a.ckpt", "logs/events", "deep/c.ckpt"):
        store.write_bytes(f"{store.get_run_path('run')}/{name}", b"x")
    store.write_bytes(f"{store.get_run_path('other')}/d.ckpt", b"x")
    folder = store.get_run_path("run")
    assert store.get_checkpoints("run") == [f"{folder}/{name}" for name in ("a.ckpt", "b.ckpt", "deep/c.ckpt")]
    assert len(store.get_checkpoints("run", suffix="")) == 4
    assert store.get_checkpoints("none") == []


def test_reading_what_is_not_there_is_an_error(store):
    with pytest.raises(FileNotFoundError):
        store.read(store.get_checkpoint_path("run"))


def test_a_local_folder_becomes_that_of_the_run(store):
    remote = store.to_remote("run", 3)
    with remote.get_local_output_dir() as folder:
        (Path(folder) / "logs").mkdir()
        (Path(folder) / "logs" / "events").write_bytes(b"events")
        (Path(folder) / remote.checkpoint_filename).write_bytes(b"weights")
        remote.sync(folder)
    assert not Path(folder).exists()
    assert store.read(remote.checkpoint_path) == b"weights"
    assert store.read(f"{remote.logs_path}/events") == b"events"
    assert remote.train_data_path == f"{store.prefix_path}/intermediate_train_data.3"
    assert remote.run_path == f"{remote.runs_path}/run"


def test_parquet_files(store):
    folder = store.get_train_data_path()
    assert not store.is_parquet_dataset(folder)
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.table({"x": [1, 2, 3]}), sink)
    store.write_bytes(f"{folder}/part-0.parquet", sink.getvalue().to_pybytes())
    assert store.is_parquet_dataset(folder)
    assert store.get_parquet_dataset(folder).read()["x"].to_pylist() == [1, 2, 3]


def test_horovods_layout(tmp_path):
    store = FilesystemStore(tmp_path, checkpoint_filename="model.pt", val_path=f"{tmp_path}/validation")
    assert store.get_runs_path() == f"{tmp_path}/runs"
    assert store.get_checkpoint_path("a") == f"{tmp_path}/runs/a/model.pt"
    assert store.get_logs_path("a") == f"{tmp_path}/runs/a/{store.get_logs_subdir()}"
    assert store.get_train_data_path() == f"{tmp_path}/intermediate_train_data"
    assert store.get_val_data_path(2) == f"{tmp_path}/validation.2"
    assert store.get_test_data_path() == f"{tmp_path}/intermediate_test_data"
    assert store.saving_runs()
    without = FilesystemStore(tmp_path, save_runs=False)
    assert (without.get_checkpoint_path("a"), without.get_logs_path("a")) == (None, None)
    assert isinstance(store, AbstractFilesystemStore)


def test_a_relative_path_means_the_same_folder_later(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = Store.create("here")
    monkeypatch.chdir("/")
    store.write_text(store.get_checkpoint_path("run"), "x")
    assert (tmp_path / "here" / "runs" / "run" / "checkpoint").read_text() == "x"


@pytest.mark.parametrize("run_id", ["", "..", "a/b", None])
def test_a_run_id_is_the_name_of_a_folder(tmp_path, run_id):
    with pytest.raises(ValueError, match=r"run_id is .* must be the name of a folder"):
        Store.create(tmp_path).get_run_path(run_id)


@pytest.mark.parametrize("prefix", ["", None, 3])
def test_a_prefix_is_a_path(prefix):
    with pytest.raises((ValueError, TypeError), match=r"prefix_path is|expected str"):
        Store.create(prefix)


def test_a_scheme_that_nobody_knows(monkeypatch):
    with pytest.raises(ValueError, match="nonsense"):
        Store.create("nonsense://x").write_text("nonsense://x/y", "")
    monkeypatch.setattr(folders, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs fsspec, because pyarrow knows no scheme 'sftp'"):
        filesystems.open_filesystem("sftp://host/x")
    with pytest.raises(ValueError, match="needs fsspec, because storage_options are given"):
        filesystems.open_filesystem("s3://bucket/x", {"anon": True})


def test_a_store_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    store = Store.create(tmp_path / "file")
    with pytest.raises(OSError, match=r"checkpoint cannot be written: .*give a store whose folder"):
        store.write_bytes(store.get_checkpoint_path("run"), b"")


def test_a_reader_never_sees_half_a_file(tmp_path):
    """Two writers and a reader, which looks again and again."""
    store = Store.create(tmp_path)
    path = store.get_checkpoint_path("run")
    contents = [bytes([number]) * 300_000 for number in range(2)]
    store.write_bytes(path, contents[0])

    def write(content):
        for _ in range(30):
            store.write_bytes(path, content)

    writers = [threading.Thread(target=write, args=(content,)) for content in contents]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert store.read(path) in contents
    for writer in writers:
        writer.join(60)
    assert os.listdir(store.get_run_path("run")) == ["checkpoint"]


def test_a_draft_does_not_stay(tmp_path, monkeypatch):
    def fail(filesystem, draft, path):
        assert filesystem.get_file_info(draft).is_file
        raise OSError("disk full")

    monkeypatch.setattr(filesystems, "_replace", fail)
    with pytest.raises(OSError, match="disk full"):
        Store.create(tmp_path).write_bytes(f"{tmp_path}/a/file", b"x")
    assert os.listdir(tmp_path / "a") == []


class ObjectStore:
    """Notes what is done with it."""

    def __init__(self, type_name):
        self.type_name = type_name

    def __getattr__(self, name):
        raise AssertionError(f"{name} is not for object stores")

    def open_output_stream(self, path):
        return pa.OSFile(path, "wb")


@pytest.mark.parametrize("type_name", ["s3", "py::fsspec+s3", "gcs", "abfs"])
def test_an_object_appears_when_it_is_closed_so_it_is_written_in_place(tmp_path, type_name):
    filesystems.write_file(ObjectStore(type_name), f"{tmp_path}/key", b"data")
    assert (tmp_path / "key").read_bytes() == b"data"


def test_paths_of_hdfs():
    store = Store.create("hdfs://name-node:9000/data/runs", user="ann", save_runs=True)
    assert isinstance(store, HDFSStore)
    assert store.get_checkpoint_path("r") == "hdfs://name-node:9000/data/runs/runs/r/checkpoint"
    assert store.get_localized_path(store.get_run_path("r")) == "/data/runs/runs/r"
    assert HDFSStore("/data", host="h", port=8020).prefix_path == "hdfs://h:8020/data"
    assert HDFSStore("/data").prefix_path == "hdfs:///data"
    assert HDFSStore("hdfs://h/data").prefix_path == "hdfs://h/data"
    assert pickle.loads(pickle.dumps(store)).prefix_path == store.prefix_path
    with pytest.raises(ValueError, match="driver is 'libhdfs3'"):
        HDFSStore("/data", driver="libhdfs3")
    with pytest.raises(ValueError, match="the address of HDFS is 'h:x'"):
        HDFSStore("hdfs://h:x/data")


def test_hdfs_is_opened_with_its_arguments(monkeypatch):
    opened = []
    monkeypatch.setattr(pafs, "HadoopFileSystem", lambda *args, **kwargs: opened.append((args, kwargs)) or "opened")
    store = HDFSStore("hdfs://h:1/x", user="ann", extra_conf={"a": "b"})
    assert store.fs == store.fs == "opened"
    assert opened == [(("h", 1), {"user": "ann", "kerb_ticket": None, "extra_conf": {"a": "b"}})]


def test_hdfs_renames_to_new_names_only(tmp_path):
    class Hdfs:
        type_name = "hdfs"
        inner = pafs.LocalFileSystem()

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def move(self, source, target):
            assert not Path(target).exists()
            self.inner.move(source, target)

    for content in (b"one", b"two"):
        filesystems.write_file(Hdfs(), f"{tmp_path}/file", content)
    assert (tmp_path / "file").read_bytes() == b"two"


@pytest.mark.parametrize("prefix", ["dbfs:/team/store", "/dbfs/team/store", "file:///dbfs/team/store"])
def test_paths_of_dbfs(prefix, monkeypatch):
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "17.3")
    store = Store.create(prefix)
    assert isinstance(store, DBFSLocalStore)
    assert store.get_run_path("r") == "dbfs:/team/store/runs/r"
    assert store.get_localized_path(store.get_run_path("r")) == "/dbfs/team/store/runs/r"
    assert store.fs.type_name == "local"
    monkeypatch.delenv("DATABRICKS_RUNTIME_VERSION")
    assert not isinstance(Store.create("/dbfs/team/store"), DBFSLocalStore)


def test_a_local_store_refuses_uris(tmp_path):
    assert LocalStore(f"file://{tmp_path}").prefix_path == str(tmp_path)
    with pytest.raises(ValueError, match=r"a LocalStore has a local path, not 's3://bucket'; Store.create"):
        LocalStore("s3://bucket")


def test_fsspec_is_not_needed_for_local_paths(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    store = Store.create(tmp_path)
    store.write_text(store.get_checkpoint_path("r"), "x")
    assert store.read(store.get_checkpoint_path("r")) == b"x"
