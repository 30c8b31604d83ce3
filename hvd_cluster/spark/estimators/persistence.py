"""Estimators and models in folders, alone and as stages of pipelines, written by Spark where it can write.

A folder has ``metadata`` as Spark ML knows it, JSON with all plain values, and Parquet files in ``blobs`` with the
rest: the columns ``name``, ``piece`` and ``data``. Blobs run code when they are loaded, so load only what you trust.
"""

from __future__ import annotations

import importlib
import logging
import posixpath
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, ClassVar, TypeVar

import pyarrow as pa
from pyarrow import fs as pafs
from pyarrow import parquet
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter
from pyspark.sql import SparkSession
from pyspark.sql.utils import is_remote

from collectives import override
from hvd_cluster.spark.estimators.filesystems import open_filesystem
from hvd_cluster.spark.estimators.saved_form import (
    BlobFormat,
    Piece,
    SavedForm,
    checked_metadata,
    complete_blobs,
    restored,
)

__all__ = ["Persistent", "PersistentReader", "PersistentWriter"]

logger = logging.getLogger(__name__)

P = TypeVar("P", bound="Persistent")

SCHEMA = pa.schema({"name": pa.string(), "piece": pa.int32(), "data": pa.binary()})
PIECES_AT_ONCE = 4  # far below the limits of Spark for a message, and for the results of a job


class Persistent(MLWritable, MLReadable[Any]):
    """A class that can be saved and loaded: it has parameters of Spark, and can be made without arguments.

    ``BLOB_FORMATS`` says for some parameters how they become bytes, ``NOT_SAVED`` which ones a folder does not have.
    """

    BLOB_FORMATS: ClassVar[Mapping[str, BlobFormat]] = {}
    NOT_SAVED: ClassVar[frozenset[str]] = frozenset({"store", "backend"})

    @override
    def write(self) -> PersistentWriter:
        """The writer: ``write().overwrite().save(path)`` replaces what is at ``path``."""
        return PersistentWriter(self)

    @classmethod
    @override
    def read(cls) -> PersistentReader:
        """The reader: ``read().load(path)``, or ``load(path)``."""
        return PersistentReader(cls)

    @classmethod
    def load_without_spark(cls: type[P], path: str) -> P:
        """Load the files of ``save(path)`` in a process without a session of Spark: a model, its history, an optimizer.

        ``path`` is a local path or a URI that pyarrow opens, or fsspec where it is there. It runs code in the files.
        Raises FileNotFoundError where there is nothing, ValueError for another class and for damaged files.
        """
        filesystem, folder = open_filesystem(path)
        metadata = checked_metadata(path, _first_line(filesystem, posixpath.join(folder, "metadata")))
        pieces: dict[str, dict[int, bytes]] = {}
        if metadata["blobs"]:
            table = parquet.read_table(posixpath.join(folder, "blobs"), filesystem=filesystem, schema=SCHEMA)
            _collect(pieces, table)
        return _instance(cls, path, metadata, pieces)

    def _saved_form(self, spark_version: str) -> SavedForm:
        params: Any = self
        values = {param.name: value for param, value in params._paramMap.items()}
        left_out = sorted(name for name in self.NOT_SAVED & values.keys() if values[name] is not None)
        if left_out:
            logger.warning("%s: %s will not be saved; set it again after load", params.uid, " and ".join(left_out))
        return SavedForm.of(
            f"{type(self).__module__}.{type(self).__name__}",
            params.uid,
            spark_version,
            {name: value for name, value in values.items() if name not in self.NOT_SAVED},
            {param.name: value for param, value in params._defaultParamMap.items() if param.name not in self.NOT_SAVED},
            self.BLOB_FORMATS,
        )


class PersistentWriter(MLWriter):
    """Writes one estimator or model."""

    def __init__(self, instance: Persistent) -> None:
        super().__init__()
        self._instance = instance

    @override
    def save(self, path: str) -> None:
        """Write the folder ``path``. Raises ValueError, before anything is written, where a value cannot be saved.

        Spark raises an error where ``path`` exists, unless :meth:`overwrite` was called.
        """
        form = self._instance._saved_form(self.sparkSession.version)
        if self.shouldOverwrite:
            self._handleOverwrite(path)
        self._write(path, form)

    @override
    def saveImpl(self, path: str) -> None:
        """As :meth:`save`, where nothing is at ``path``."""
        self._write(path, self._instance._saved_form(self.sparkSession.version))

    @override
    def _handleOverwrite(self, path: str) -> None:
        """Delete what is there. The base class does so through the JVM, which a client of Spark Connect has not."""
        if not is_remote():
            super()._handleOverwrite(path)
            return
        from pyspark.ml.util import ML_CONNECT_HELPER_ID
        from pyspark.ml.wrapper import JavaWrapper

        JavaWrapper(java_obj=ML_CONNECT_HELPER_ID)._call_java("handleOverwrite", path, True)

    def _write(self, path: str, form: SavedForm) -> None:
        spark = self.sparkSession
        metadata = spark.createDataFrame([(form.metadata,)], "value string")
        metadata.coalesce(1).write.text(posixpath.join(path, "metadata"))
        for number, table in enumerate(_tables(form.pieces())):
            mode = "append" if number else "error"
            spark.createDataFrame(table).coalesce(1).write.mode(mode).parquet(posixpath.join(path, "blobs"))


class PersistentReader(MLReader[Any]):
    """Reads what was saved as ``cls``, or as a subclass."""

    def __init__(self, cls: type[Persistent]) -> None:
        super().__init__()
        self._cls = cls

    @override
    def load(self, path: str) -> Any:
        """Load the files of ``save(path)``, which runs code in them. Raises ValueError as ``load_without_spark``."""
        spark = self.sparkSession
        first = spark.read.text(posixpath.join(path, "metadata")).first()
        metadata = checked_metadata(path, first[0] if first else "{}")
        return _instance(self._cls, path, metadata, _read_pieces(spark, path, metadata["blobs"]))


def _read_pieces(spark: SparkSession, path: str, blobs: Mapping[str, Any]) -> dict[str, dict[int, bytes]]:
    pieces: dict[str, dict[int, bytes]] = {}
    for name, described in blobs.items():
        table = spark.read.parquet(posixpath.join(path, "blobs")).where(f"name = '{name}'")
        for first in range(0, described["pieces"], PIECES_AT_ONCE):
            some = table.where(f"piece >= {first} AND piece < {first + PIECES_AT_ONCE}")
            _collect(pieces, some.toArrow())
    return pieces


def _tables(pieces: Iterator[Piece]) -> Iterator[pa.Table]:
    while some := list(islice(pieces, PIECES_AT_ONCE)):
        yield pa.table([pa.array(column) for column in zip(*some, strict=True)], schema=SCHEMA)


def _collect(pieces: dict[str, dict[int, bytes]], table: pa.Table) -> None:
    columns = (table[name].to_pylist() for name in SCHEMA.names)
    for name, number, data in zip(*columns, strict=True):
        pieces.setdefault(name, {})[number] = bytes(data)


def _first_line(filesystem: pafs.FileSystem, folder: str) -> str:
    """The text in the one file of ``folder`` that has any. Raises FileNotFoundError."""
    for info in filesystem.get_file_info(pafs.FileSelector(folder)):
        if info.is_file and info.base_name.startswith("part-") and info.size:
            with filesystem.open_input_stream(info.path) as stream:
                text: str = stream.read().decode()
            return text
    raise FileNotFoundError(f"{folder} has no metadata of an estimator or a model")


def _instance(cls: type[P], path: str, metadata: Mapping[str, Any], pieces: Mapping[str, Mapping[int, bytes]]) -> P:
    saved = _saved_class(cls, path, metadata["class"])
    values = restored(path, metadata, complete_blobs(path, metadata, pieces), saved.BLOB_FORMATS)
    instance: Any = saved()
    instance._resetUid(metadata["uid"])
    instance._setDefault(**metadata["defaultParamMap"])
    instance._set(**values)
    found: P = instance
    return found


def _saved_class(cls: type[P], path: str, name: str) -> type[P]:
    """The class with the full ``name``, which must be ``cls`` or a subclass. Raises ValueError."""
    if name == f"{cls.__module__}.{cls.__name__}":
        return cls
    module, _, own = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), own)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{path} has a {name}, which cannot be imported: {error}; make its module importable"
        ) from error
    if not (isinstance(found, type) and issubclass(found, cls)):
        raise ValueError(f"{path} has a {name}, not a {cls.__name__}; load it with {own}.load(path)")
    return found
