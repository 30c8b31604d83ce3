"""Pure: the parameters of an estimator or a model as JSON and blobs, and back."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle

__all__ = ["PICKLES", "BlobFormat", "Piece", "SavedForm", "complete_blobs", "restored"]

FORMAT = 1
PIECE_BYTES = 4 << 20
Piece = tuple[str, int, bytes]
"""The name of a blob, the number of the piece, and its content."""


@dataclass(frozen=True)
class BlobFormat:
    """How values that JSON cannot hold become bytes: a dictionary by the names of parameters, and back."""

    name: str
    dump: Callable[[dict[str, Any]], bytes]
    load: Callable[[bytes], dict[str, Any]]


PICKLES = BlobFormat("cloudpickle", cloudpickle.dumps, cloudpickle.loads)
"""For functions and objects of any class. To load it runs code."""


@dataclass(frozen=True)
class SavedForm:
    """The content of a folder: the text of the metadata, and blobs by the name of their format."""

    metadata: str
    blobs: Mapping[str, bytes]

    @classmethod
    def of(
        cls,
        class_name: str,
        uid: str,
        spark_version: str,
        values: Mapping[str, Any],
        defaults: Mapping[str, Any],
        formats: Mapping[str, BlobFormat],
    ) -> SavedForm:
        """The parameters ``values``; ``formats`` says for some of them how they become bytes.

        Raises ValueError where a value cannot be saved.
        """
        plain = {name: value for name, value in values.items() if is_plain(value)}
        groups: dict[str, tuple[BlobFormat, dict[str, Any]]] = {}
        for name in values.keys() - plain.keys():
            blob_format = formats.get(name, PICKLES)
            groups.setdefault(blob_format.name, (blob_format, {}))[1][name] = values[name]
        blobs = {name: _dumped(blob_format, group) for name, (blob_format, group) in groups.items()}
        described = {name: _described(blob, sorted(groups[name][1])) for name, blob in blobs.items()}
        metadata = {
            "class": class_name,
            "timestamp": int(time.time() * 1000),
            "sparkVersion": spark_version,
            "uid": uid,
            "paramMap": plain,
            "defaultParamMap": {name: value for name, value in defaults.items() if is_plain(value)},
            "language": "Python",
            "format": FORMAT,
            "blobs": described,
        }
        return cls(json.dumps(metadata, separators=(",", ":")), blobs)

    def pieces(self) -> Iterator[Piece]:
        """All blobs, cut in pieces of 4 MiB."""
        for name, blob in self.blobs.items():
            for number, first in enumerate(range(0, len(blob), PIECE_BYTES)):
                yield name, number, blob[first : first + PIECE_BYTES]


def is_plain(value: Any) -> bool:
    """Whether JSON gives ``value`` back; a tuple comes back as a list."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(type(key) is str for key in value) and all(map(is_plain, value.values()))
    return value is None or type(value) in (bool, int, float, str)


def _described(blob: bytes, params: list[str]) -> dict[str, Any]:
    pieces = -(-len(blob) // PIECE_BYTES)
    return {"params": params, "pieces": pieces, "sha256": hashlib.sha256(blob).hexdigest()}


def _dumped(blob_format: BlobFormat, group: dict[str, Any]) -> bytes:
    try:
        return blob_format.dump(group)
    except Exception as error:
        name = next((each for each in sorted(group) if not _can_dump(blob_format, each, group[each])), None)
        which = f"parameter {name!r}" if name else f"parameters {', '.join(sorted(group))}"
        raise ValueError(
            f"{which} cannot be saved: {error}; let it have no locks, files, sockets or sessions in it"
        ) from error


def _can_dump(blob_format: BlobFormat, name: str, value: Any) -> bool:
    try:
        blob_format.dump({name: value})
    except Exception:  # noqa: BLE001  a pickle may raise anything
        return False
    return True


def complete_blobs(
    path: str, metadata: Mapping[str, Any], pieces: Mapping[str, Mapping[int, bytes]]
) -> dict[str, bytes]:
    """The blobs that the ``metadata`` of the folder ``path`` lists. Raises ValueError where one is not whole."""
    blobs = {}
    for name, described in metadata["blobs"].items():
        found = pieces.get(name, {})
        blob = b"".join(found.get(number, b"") for number in range(described["pieces"]))
        if hashlib.sha256(blob).hexdigest() != described["sha256"]:
            raise ValueError(
                f"{path} is damaged: {len(found)} of {described['pieces']} pieces of its blob {name!r} are there, and "
                "they are not what was saved; it was perhaps not written to the end: save again"
            )
        blobs[name] = blob
    return blobs


def restored(
    path: str, metadata: Mapping[str, Any], blobs: Mapping[str, bytes], formats: Mapping[str, BlobFormat]
) -> dict[str, Any]:
    """The values of the parameters. It runs code in the blobs. Raises ValueError where a class or module is missing."""
    values = dict(metadata["paramMap"])
    known = {each.name: each for each in (PICKLES, *formats.values())}
    for name, blob in blobs.items():
        if name not in known:
            raise ValueError(f"{path} has a blob of the format {name!r}, but the formats here are {', '.join(known)}")
        try:
            values |= known[name].load(blob)
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"{path} cannot be loaded: {error}; install the modules that the saved model or function needs"
            ) from error
    return values


def checked_metadata(path: str, text: str) -> dict[str, Any]:
    """The metadata in ``text``. Raises ValueError where it is of another kind."""
    metadata: dict[str, Any] = json.loads(text)
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{path} has the class {metadata.get('class')!r} in the format {metadata.get('format')!r}, but here is "
            f"format {FORMAT} of the estimators and models of hvd-cluster; load it with its own class, or save it again"
        )
    return metadata
