"""The bytes of a model on their way to the Python workers of Spark: once for each executor, not in each task."""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass
from typing import Any

from pyspark import SparkFiles
from pyspark.sql import SparkSession
from pyspark.sql.utils import is_remote

from hvd_cluster.spark.estimators.scoring import ModelSource

__all__ = ["ModelShipment", "digest_of"]

# Up to here the closure of the UDF has the bytes in it; Spark warns of closures of about 1 MB.
MOST_INLINE_BYTES = 128 << 10


def digest_of(data: bytes) -> str:
    """A name for ``data``."""
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class InlineSource:
    """The bytes themselves."""

    data: bytes

    def read(self) -> bytes:
        """The bytes."""
        return self.data


@dataclass(frozen=True)
class BroadcastSource:
    """A broadcast variable, which a classic session cuts in pieces, and executors share."""

    broadcast: Any

    def read(self) -> bytes:
        """The bytes."""
        data: bytes = self.broadcast.value
        return data


@dataclass(frozen=True)
class ArtifactSource:
    """A file that Spark Connect has uploaded in pieces, and brings to the executors."""

    name: str

    def read(self) -> bytes:
        """The bytes."""
        with open(SparkFiles.get(self.name), "rb") as file:
            return file.read()


@dataclass(frozen=True)
class ModelShipment:
    """Bytes that a session has been told of: the same bytes in the same session need no second way."""

    session: Any
    digest: str
    source: ModelSource

    @classmethod
    def of(cls, session: SparkSession, data: bytes, digest: str, earlier: ModelShipment | None) -> ModelShipment:
        """``earlier`` is the one before, if any, which may be that of the same bytes."""
        if earlier is not None and earlier.digest == digest and earlier.session is session:
            return earlier
        return cls(session, digest, _source(session, data, digest))


def _source(session: SparkSession, data: bytes, digest: str) -> ModelSource:
    if len(data) <= MOST_INLINE_BYTES:
        return InlineSource(data)
    return _uploaded(session, data, digest) if is_remote() else BroadcastSource(session.sparkContext.broadcast(data))


def _uploaded(session: SparkSession, data: bytes, digest: str) -> ArtifactSource:
    """An artifact has the name of its file."""
    source = ArtifactSource(f"hvd-model-{digest}")
    with tempfile.TemporaryDirectory(prefix="hvd-model-") as folder:
        path = os.path.join(folder, source.name)
        with open(path, "wb") as file:
            file.write(data)
        session.addArtifacts(path, file=True)
    return source
