"""Stores in the file systems of pyarrow and fsspec, in HDFS, and in DBFS on Databricks."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping
from typing import Any

from pyarrow import fs as pafs

from collectives import override
from hvd_cluster.spark.estimators.abstract_store import AbstractFilesystemStore, RemoteStore, Store, checked_prefix
from hvd_cluster.spark.estimators.filesystems import is_uri, open_filesystem

__all__ = [
    "AbstractFilesystemStore",
    "DBFSLocalStore",
    "FilesystemStore",
    "HDFSStore",
    "LocalStore",
    "RemoteStore",
    "Store",
]

DATABRICKS = "DATABRICKS_RUNTIME_VERSION"


def store_at(path: str, *args: Any, **kwargs: Any) -> Store:
    """The store for ``path``, with the other arguments of its class."""
    if path.startswith("hdfs://"):
        return HDFSStore(path, *args, **kwargs)
    if DBFSLocalStore.matches(path) and DATABRICKS in os.environ:
        return DBFSLocalStore(path, *args, **kwargs)
    return FilesystemStore(path, *args, **kwargs)


class FilesystemStore(AbstractFilesystemStore):
    """A store at a local path or a URI: what pyarrow opens (file, s3, gs, hdfs, abfs), or fsspec where it is there."""

    @override
    def _open(self) -> pafs.FileSystem:
        return open_filesystem(self.prefix_path, self._options)[0]

    @override
    def get_full_path(self, path: str) -> str:
        return path if is_uri(path) else os.path.abspath(path)

    @override
    def get_localized_path(self, path: str) -> str:
        """Only the path of the store is a URI as the user has written it: what is below it is taken as it is."""
        if not is_uri(path):
            return path
        start = f"{self.prefix_path}/"
        own, below = (self.prefix_path, path.removeprefix(start)) if path.startswith(start) else (path, "")
        root = open_filesystem(own, self._options)[1]
        return posixpath.join(root, below) if below else root


class LocalStore(FilesystemStore):
    """A store in a folder of this host, or in one that all hosts share, at the same path."""

    @override
    def get_full_path(self, path: str) -> str:
        local = path.removeprefix("file://")
        if is_uri(local):
            raise ValueError(f"a LocalStore has a local path, not {path!r}; Store.create({path!r}) opens that")
        return os.path.abspath(local)


class HDFSStore(AbstractFilesystemStore):
    """A store in HDFS, by pyarrow and Hadoop's libhdfs.

    Args:
        prefix_path: a path, or ``hdfs://host:port/path``.
        host, port: of the name node; None means those of ``prefix_path``, or else of Hadoop's configuration.
        user: the user of HDFS; None means that of the process.
        kerb_ticket: the path of Kerberos' cache of tickets.
        driver: must be "libhdfs".
        extra_conf: more of Hadoop's configuration.
        paths: the other arguments of :class:`AbstractFilesystemStore`, by keyword.
    """

    def __init__(
        self,
        prefix_path: str | os.PathLike[str],
        host: str | None = None,
        port: int | None = None,
        user: str | None = None,
        kerb_ticket: str | None = None,
        driver: str = "libhdfs",
        extra_conf: Mapping[str, str] | None = None,
        **paths: Any,
    ) -> None:
        if driver != "libhdfs":
            raise ValueError(f"driver is {driver!r}, but only 'libhdfs' is there; leave it out")
        address, _, _ = checked_prefix(prefix_path).removeprefix("hdfs://").partition("/")
        named = checked_prefix(prefix_path).startswith("hdfs://")
        self._address = _hdfs_address(address if named else "", host, port)
        self._hadoop = {"user": user, "kerb_ticket": kerb_ticket, "extra_conf": dict(extra_conf or {}) or None}
        super().__init__(prefix_path, **paths)

    @override
    def _open(self) -> pafs.FileSystem:
        host, port = self._address
        return pafs.HadoopFileSystem(host, port, **self._hadoop)

    @override
    def get_full_path(self, path: str) -> str:
        host, port = self._address
        address = "" if host == "default" else host if port == 0 else f"{host}:{port}"
        return f"hdfs://{address}/{self.get_localized_path(path).lstrip('/')}"

    @override
    def get_localized_path(self, path: str) -> str:
        return f"/{path.removeprefix('hdfs://').partition('/')[2]}" if path.startswith("hdfs://") else path


def _hdfs_address(address: str, host: str | None, port: int | None) -> tuple[str, int]:
    """Host and port for pyarrow, where "default" and 0 mean those of Hadoop's configuration."""
    own, _, number = address.partition(":")
    if number and not number.isdigit():
        raise ValueError(f"the address of HDFS is {address!r}, but must be host or host:port")
    return host or own or "default", port or int(number or 0)


class DBFSLocalStore(FilesystemStore):
    """A store in the file system of Databricks, which all its nodes have at /dbfs."""

    @staticmethod
    def matches(path: str) -> bool:
        """Whether ``path`` is one of DBFS."""
        return path.startswith(("dbfs:/", "/dbfs/", "file:///dbfs/"))

    @override
    def get_full_path(self, path: str) -> str:
        """For Spark, as ``dbfs:/path``."""
        for start in ("file:///dbfs/", "/dbfs/", "dbfs:///", "dbfs:/"):
            if path.startswith(start):
                return f"dbfs:/{path.removeprefix(start)}"
        raise ValueError(f"{path!r} is no path of DBFS; it must begin with dbfs:/ or /dbfs/")

    @override
    def get_localized_path(self, path: str) -> str:
        """As ``/dbfs/path``."""
        return f"/dbfs/{self.get_full_path(path).removeprefix('dbfs:/')}"

    @override
    def _open(self) -> pafs.FileSystem:
        return pafs.LocalFileSystem()
