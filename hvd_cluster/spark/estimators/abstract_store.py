"""A store keeps the runs of fits, with checkpoints, logs and history, and Parquet files of rows to train on."""

from __future__ import annotations

import os
import posixpath
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow import fs as pafs
from pyarrow import parquet

from collectives import override
from hvd_cluster.spark.estimators.filesystems import write_file

__all__ = ["AbstractFilesystemStore", "RemoteStore", "Store"]

CHECKPOINT = "checkpoint"
LOGS = "logs"


class RunStore(ABC):
    """A place for runs and for rows. It can be pickled, and works the same way in the workers.

    Paths are local paths or URIs, as that of the store is, so that Spark can use them, too.
    """

    @staticmethod
    def create(prefix_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Store:
        """The store in the folder ``prefix_path``: a local path, or a URI such as ``hdfs://host/path`` or ``s3://``.

        Other arguments are those of the class: :class:`HDFSStore` for HDFS, :class:`DBFSLocalStore` for DBFS on
        Databricks, otherwise :class:`FilesystemStore`. Raises ValueError for a path that cannot be one.
        """
        from hvd_cluster.spark.estimators import store  # which has the classes below this one

        return store.store_at(checked_prefix(prefix_path), *args, **kwargs)

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether there is a file or a folder at ``path``."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """The content of the file at ``path``. Raises FileNotFoundError."""

    @abstractmethod
    def write_bytes(self, path: str, data: bytes) -> None:
        """Write the file at ``path``, with the folders above it. A reader sees the old file or the new one.

        Raises OSError where that is impossible.
        """

    def write_text(self, path: str, text: str) -> None:
        """As :meth:`write_bytes`, in UTF-8."""
        self.write_bytes(path, text.encode())

    @abstractmethod
    def get_train_data_path(self, idx: int | None = None) -> str:
        """The folder of Parquet files with the rows for training; ``idx`` is the number of the data set."""

    @abstractmethod
    def get_val_data_path(self, idx: int | None = None) -> str:
        """The folder of Parquet files with the rows for validation."""

    @abstractmethod
    def get_test_data_path(self, idx: int | None = None) -> str:
        """The folder of Parquet files with the rows for tests."""

    @abstractmethod
    def saving_runs(self) -> bool:
        """Whether checkpoints and logs are kept."""

    @abstractmethod
    def get_runs_path(self) -> str:
        """The folder of all runs."""

    @abstractmethod
    def get_run_path(self, run_id: str) -> str:
        """The folder of a run. Raises ValueError where ``run_id`` cannot be the name of a folder."""

    @abstractmethod
    def get_checkpoint_path(self, run_id: str) -> str | None:
        """The path of the checkpoint of a run; None if runs are not kept."""

    @abstractmethod
    def get_checkpoints(self, run_id: str, suffix: str = ".ckpt") -> list[str]:
        """The paths of all files of a run that end with ``suffix``, sorted."""

    @abstractmethod
    def get_logs_path(self, run_id: str) -> str | None:
        """The folder of the logs of a run; None if runs are not kept."""

    @abstractmethod
    def get_checkpoint_filename(self) -> str:
        """The name of the checkpoint in the folder of a run."""

    @abstractmethod
    def get_logs_subdir(self) -> str:
        """The name of the folder of logs in the folder of a run."""

    @abstractmethod
    def is_parquet_dataset(self, path: str) -> bool:
        """Whether there are Parquet files at ``path``."""

    @abstractmethod
    def get_parquet_dataset(self, path: str) -> parquet.ParquetDataset:
        """The Parquet files at ``path``. Raises FileNotFoundError."""

    @abstractmethod
    def get_local_output_dir_fn(self, run_id: str) -> Callable[[], AbstractContextManager[str]]:
        """A function that gives a local folder for the output of a run, which its context removes."""

    @abstractmethod
    def sync_fn(self, run_id: str) -> Callable[[str], None]:
        """A function that copies all files of a local folder into the folder of the run."""

    def to_remote(self, run_id: str, dataset_idx: int | None = None) -> RemoteStore:
        """The paths of one run, for functions in workers."""
        return RemoteStore(
            self.get_train_data_path(dataset_idx),
            self.get_val_data_path(dataset_idx),
            self.get_test_data_path(dataset_idx),
            self.saving_runs(),
            self.get_runs_path(),
            self.get_run_path(run_id),
            self.get_checkpoint_path(run_id),
            self.get_logs_path(run_id),
            self.get_checkpoint_filename(),
            self.get_logs_subdir(),
            self.get_local_output_dir_fn(run_id),
            self.sync_fn(run_id),
        )


Store = RunStore
"""Horovod's name."""


@dataclass(frozen=True)
class RemoteStore:
    """The paths of one run in a store, and its two functions."""

    train_data_path: str
    val_data_path: str
    test_data_path: str
    saving_runs: bool
    runs_path: str
    run_path: str
    checkpoint_path: str | None
    logs_path: str | None
    checkpoint_filename: str
    logs_subdir: str
    get_local_output_dir: Callable[[], AbstractContextManager[str]]
    sync: Callable[[str], None]


class AbstractFilesystemStore(Store):
    """A store in a file system. A subclass opens it.

    Args:
        prefix_path: the folder of the store.
        train_path, val_path, test_path, runs_path: folders in the same file system; None means the usual names in
            ``prefix_path``.
        save_runs: whether checkpoints and logs are kept.
        storage_options: options for fsspec, which then opens the file system.
        checkpoint_filename: the name of the checkpoint of a run; None means "checkpoint".
    """

    def __init__(
        self,
        prefix_path: str | os.PathLike[str],
        train_path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        runs_path: str | None = None,
        save_runs: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        checkpoint_filename: str | None = None,
    ) -> None:
        self.prefix_path = self.get_full_path(checked_prefix(prefix_path))
        self._train_path = train_path or self._below("intermediate_train_data")
        self._val_path = val_path or self._below("intermediate_val_data")
        self._test_path = test_path or self._below("intermediate_test_data")
        self._runs_path = runs_path or self._below("runs")
        self._save_runs = save_runs
        self._options = dict(storage_options or {})
        self._checkpoint_filename = _checked_name("checkpoint_filename", checkpoint_filename or CHECKPOINT)
        self._opened: pafs.FileSystem | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}  # connections do not travel

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.prefix_path!r})"

    @abstractmethod
    def _open(self) -> pafs.FileSystem:
        """Raises ValueError or OSError."""

    @abstractmethod
    def get_full_path(self, path: str) -> str:
        """``path`` as the paths of this store are."""

    @abstractmethod
    def get_localized_path(self, path: str) -> str:
        """``path`` as the file system has it, without a scheme."""

    @property
    def fs(self) -> pafs.FileSystem:
        """The file system, of pyarrow. Raises ValueError or OSError where it cannot be opened."""
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    @override
    def exists(self, path: str) -> bool:
        return self._info(path).type is not pafs.FileType.NotFound

    @override
    def read(self, path: str) -> bytes:
        with self.fs.open_input_stream(self.get_localized_path(path), compression=None) as stream:
            data: bytes = stream.read()
        return data

    @override
    def write_bytes(self, path: str, data: bytes) -> None:
        try:
            write_file(self.fs, self.get_localized_path(path), data)
        except OSError as error:
            raise OSError(
                f"{path} cannot be written: {error}; give a store whose folder driver and workers can write"
            ) from error

    @override
    def get_train_data_path(self, idx: int | None = None) -> str:
        return _numbered(self._train_path, idx)

    @override
    def get_val_data_path(self, idx: int | None = None) -> str:
        return _numbered(self._val_path, idx)

    @override
    def get_test_data_path(self, idx: int | None = None) -> str:
        return _numbered(self._test_path, idx)

    @override
    def saving_runs(self) -> bool:
        return self._save_runs

    @override
    def get_runs_path(self) -> str:
        return self._runs_path

    @override
    def get_run_path(self, run_id: str) -> str:
        return posixpath.join(self._runs_path, _checked_name("run_id", run_id))

    @override
    def get_checkpoint_path(self, run_id: str) -> str | None:
        return posixpath.join(self.get_run_path(run_id), self._checkpoint_filename) if self._save_runs else None

    @override
    def get_checkpoints(self, run_id: str, suffix: str = ".ckpt") -> list[str]:
        folder = self.get_run_path(run_id)
        start = self.get_localized_path(folder)
        selector = pafs.FileSelector(start, recursive=True, allow_not_found=True)
        files = [info.path for info in self.fs.get_file_info(selector) if info.is_file and info.path.endswith(suffix)]
        return sorted(posixpath.join(folder, posixpath.relpath(f"/{path}", f"/{start}")) for path in files)

    @override
    def get_logs_path(self, run_id: str) -> str | None:
        return posixpath.join(self.get_run_path(run_id), LOGS) if self._save_runs else None

    @override
    def get_checkpoint_filename(self) -> str:
        return self._checkpoint_filename

    @override
    def get_logs_subdir(self) -> str:
        return LOGS

    @override
    def is_parquet_dataset(self, path: str) -> bool:
        selector = pafs.FileSelector(self.get_localized_path(path), recursive=True, allow_not_found=True)
        return any(info.is_file and info.path.endswith(".parquet") for info in self.fs.get_file_info(selector))

    @override
    def get_parquet_dataset(self, path: str) -> parquet.ParquetDataset:
        return parquet.ParquetDataset(self.get_localized_path(path), filesystem=self.fs)

    @override
    def get_local_output_dir_fn(self, run_id: str) -> Callable[[], AbstractContextManager[str]]:
        _checked_name("run_id", run_id)
        return temporary_folder

    @override
    def sync_fn(self, run_id: str) -> Callable[[str], None]:
        return _Sync(self, self.get_run_path(run_id))

    def _info(self, path: str) -> pafs.FileInfo:
        return self.fs.get_file_info(self.get_localized_path(path))

    def _below(self, name: str) -> str:
        return posixpath.join(self.prefix_path, name)


@dataclass(frozen=True)
class _Sync:
    store: Store
    run_path: str

    def __call__(self, local_run_path: str) -> None:
        root = Path(local_run_path)
        for file in sorted(path for path in root.rglob("*") if path.is_file()):
            self.store.write_bytes(posixpath.join(self.run_path, file.relative_to(root).as_posix()), file.read_bytes())


@contextmanager
def temporary_folder() -> Iterator[str]:
    """The path of a local folder, which is removed at the end."""
    folder = tempfile.mkdtemp(prefix="hvd-run-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def checked_prefix(prefix_path: str | os.PathLike[str]) -> str:
    """Raises ValueError where ``prefix_path`` is no path."""
    path = os.fspath(prefix_path) if isinstance(prefix_path, str | os.PathLike) else prefix_path
    if not isinstance(path, str) or not path:
        raise ValueError(f"prefix_path is {prefix_path!r}, but must be a path or a URI, such as 's3://bucket/folder'")
    return path.rstrip("/") or "/"


def _checked_name(argument: str, name: object) -> str:
    if not isinstance(name, str) or not name or name in (".", "..") or "/" in name:
        raise ValueError(f"{argument} is {name!r}, but must be the name of a folder or file, without '/'")
    return name


def _numbered(path: str, idx: int | None) -> str:
    return path if idx is None else f"{path}.{idx}"
