"""File systems of pyarrow and fsspec by URI, and files that appear whole or not at all."""

from __future__ import annotations

import os
import posixpath
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from pyarrow import fs as pafs

from hvd_cluster.storage.folders import is_uri, open_fsspec

__all__ = ["is_uri", "open_filesystem", "write_file"]

ARROW_SCHEMES = {"file", "s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss"}
OBJECT_STORES = {"s3", "s3a", "gcs", "gs", "abfs", "abfss", "az", "adl"}


def open_filesystem(prefix: str, options: Mapping[str, Any] | None = None) -> tuple[pafs.FileSystem, str]:
    """The file system of the URI or local path ``prefix``, and the path of it there.

    pyarrow opens local paths, file, s3, gs, hdfs, viewfs and abfs. fsspec, where it is installed, opens other schemes,
    and all where there are ``options``, which are its own. Raises ValueError for a scheme that none of them knows.
    """
    if not is_uri(prefix):
        return pafs.LocalFileSystem(), os.path.abspath(prefix)
    scheme = urlsplit(prefix).scheme
    if scheme in ARROW_SCHEMES and not options:
        filesystem, path = pafs.FileSystem.from_uri(prefix)
        return filesystem, path
    return _of_fsspec(prefix, scheme, options or {})


def _of_fsspec(prefix: str, scheme: str, options: Mapping[str, Any]) -> tuple[pafs.FileSystem, str]:
    why = "storage_options are given" if scheme in ARROW_SCHEMES else f"pyarrow knows no scheme {scheme!r}"
    filesystem, path = open_fsspec(prefix, options, why)
    return pafs.PyFileSystem(pafs.FSSpecHandler(filesystem)), path


def is_object_store(filesystem: pafs.FileSystem) -> bool:
    """Whether a file of ``filesystem`` appears when it is closed, and cannot be renamed at once."""
    return filesystem.type_name.rpartition("fsspec+")[2] in OBJECT_STORES


def write_file(filesystem: pafs.FileSystem, path: str, data: bytes) -> None:
    """Write ``data`` to ``path``, with the folders above it. A reader sees the old file or the new one.

    Raises OSError where that is impossible.
    """
    if is_object_store(filesystem):
        _write(filesystem, path, data)
        return
    folder, name = posixpath.split(path)
    filesystem.create_dir(folder, recursive=True)
    draft = posixpath.join(folder, f".{name}.{uuid.uuid4().hex}")
    try:
        _write(filesystem, draft, data)
        _replace(filesystem, draft, path)
    except BaseException:
        _remove(filesystem, draft)
        raise


def _write(filesystem: pafs.FileSystem, path: str, data: bytes) -> None:
    with filesystem.open_output_stream(path) as stream:
        stream.write(data)


def _replace(filesystem: pafs.FileSystem, draft: str, path: str) -> None:
    """HDFS renames to new names only, so there is a moment without a file."""
    if filesystem.type_name == "hdfs":
        _remove(filesystem, path)
    filesystem.move(draft, path)


def _remove(filesystem: pafs.FileSystem, path: str) -> None:
    if filesystem.get_file_info(path).type is not pafs.FileType.NotFound:
        filesystem.delete_file(path)
