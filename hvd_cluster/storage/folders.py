"""Folders of the local disk, and of all that fsspec opens, in which each file is written once."""

from __future__ import annotations

import contextlib
import importlib
import os
import posixpath
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

from collectives import InvalidRequestError, override

Data: TypeAlias = "bytes | memoryview"
DRAFT = ".draft-"
"""The beginning of the name of a file while it is written."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. The text has the path, and what to do; it is the same on all ranks."""


class Folder(ABC):
    """Files by name. No file is written over: each name is used once."""

    @abstractmethod
    def names(self) -> list[str]:
        """The names of all files; none where there is no folder. OSError where it cannot be read."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The content of a file. OSError, such as FileNotFoundError, where that is impossible."""

    @abstractmethod
    def write(self, name: str, data: Data) -> None:
        """Make a file, and the folder. It is on the disk, or in the store, when this returns. OSError if not."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

    @abstractmethod
    def location(self, name: str = "") -> str:
        """The path or the URI of a file, or of the folder."""


class LocalFolder(Folder):
    """A folder of a file system that this machine has mounted.

    A file is written under another name, synced, and renamed, which is atomic: after a loss of power, too, there is
    the whole file or none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()

    @override
    def names(self) -> list[str]:
        try:
            return sorted(os.listdir(self._path))
        except FileNotFoundError:
            return []

    @override
    def read(self, name: str) -> bytes:
        return (self._path / name).read_bytes()

    @override
    def write(self, name: str, data: Data) -> None:
        self._create()
        draft = self._path / f"{DRAFT}{name}"
        try:
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.rename(self._path / name)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        _sync(self._path)

    def _create(self) -> None:
        if not self._path.is_dir():
            self._path.mkdir(parents=True, exist_ok=True)
            _sync(self._path.parent)

    @override
    def remove(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)

    @override
    def location(self, name: str = "") -> str:
        return str(self._path / name)


def _sync(folder: Path) -> None:
    """Put the names of a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RemoteFolder(Folder):
    """A folder of a file system of fsspec.

    An object of a store appears when its upload has ended. Other file systems may show a file that is not whole, and
    a rename may be a copy. So a file gets its name at once, and its readers have to notice one that is cut off.
    """

    def __init__(self, filesystem: Any, path: str, uri: str) -> None:
        self._filesystem = filesystem
        self._path = path
        self._uri = uri

    @override
    def names(self) -> list[str]:
        self._filesystem.invalidate_cache(self._path)
        try:
            return sorted(posixpath.basename(path) for path in self._filesystem.ls(self._path, detail=False))
        except FileNotFoundError:
            return []

    @override
    def read(self, name: str) -> bytes:
        data: bytes = self._filesystem.cat_file(self._of(name))
        return data

    @override
    def write(self, name: str, data: Data) -> None:
        self._filesystem.makedirs(self._path, exist_ok=True)
        self._filesystem.pipe_file(self._of(name), bytes(data))

    @override
    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.rm_file(self._of(name))

    def _of(self, name: str) -> str:
        return f"{self._path.rstrip('/')}/{name}"

    @override
    def location(self, name: str = "") -> str:
        return f"{self._uri.rstrip('/')}/{name}".rstrip("/")


def is_uri(path: str) -> bool:
    """Whether ``path`` begins with a scheme."""
    return "://" in path


def open_folder(path: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Folder:
    """The folder of a path, or of a URI of a scheme that fsspec knows; ``options`` are for fsspec.

    InvalidRequestError for an empty path, for another scheme, and where fsspec is needed and not installed.
    """
    text = os.fspath(path)
    if not text:
        raise InvalidRequestError(
            "the folder of the checkpoints is ''; give the path of a folder, such as 'checkpoints'"
        )
    if not is_uri(text):
        return LocalFolder(Path(text))
    parts = urlsplit(text)
    if parts.scheme == "file" and not options:
        return LocalFolder(Path(unquote(parts.path)))
    return RemoteFolder(*open_fsspec(text, options or {}, f"its scheme is {parts.scheme!r}"), text)


def open_fsspec(uri: str, options: Mapping[str, Any], why: str) -> tuple[Any, str]:
    """The file system of fsspec for ``uri``, and the path there.

    InvalidRequestError where fsspec is not installed, which is needed because of ``why``, and for a scheme that it
    cannot open.
    """
    if find_spec("fsspec") is None:
        scheme = urlsplit(uri).scheme
        raise InvalidRequestError(
            f"{uri!r} needs fsspec, because {why}: pip install fsspec, and what it needs for {scheme}; or use a local "
            "path"
        )
    try:
        filesystem, path = importlib.import_module("fsspec.core").url_to_fs(uri, **options)
    except (ValueError, ImportError) as error:
        raise InvalidRequestError(f"fsspec cannot open {uri!r}: {error}; use another scheme, or install it") from error
    return filesystem, path
