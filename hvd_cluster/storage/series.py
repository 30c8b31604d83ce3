"""The checkpoints of one folder: which there are, which stay, and whether one is whole.

Each has a file with its data, and a *manifest*, which is written after it: a small JSON file with the name, the size
and the checksum of the other. A checkpoint without a manifest does not exist. Names have a number that only grows, so
no file is written over, and a kill at any point leaves all checkpoints that were there before. One process writes.
"""

from __future__ import annotations

import json
import logging
import math
import re
import zlib
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvd_cluster.storage.folders import DRAFT, CheckpointError, Data, Folder

logger = logging.getLogger(__name__)

FORMAT = "hvd-checkpoint-1"
MODES = ("min", "max")
_NAME = re.compile(rf"(?:{re.escape(DRAFT)})?(\d{{7,}})-step-\d+\.\w+")


@dataclass(frozen=True)
class Note:
    """The facts about a checkpoint besides its data. ``metric`` tells which is the best, by ``mode``, min or max."""

    step: int
    epoch: int | None = None
    metric: float | None = None
    mode: str = "min"
    extra: Any = None


@dataclass(frozen=True)
class Manifest:
    """A checkpoint that is complete. ``kind`` is the binding that wrote it, ``size`` is in bytes."""

    number: int
    kind: str
    file: str
    size: int
    checksum: int
    note: Note

    def text(self) -> bytes:
        """The content of the file of this manifest."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1).encode()


def manifest_of(text: bytes) -> Manifest | None:
    """The manifest in a file; None if it was cut off. ValueError for a whole one of something else."""
    try:
        fields = json.loads(text)
    except ValueError:
        return None
    try:
        if fields.pop("format") == FORMAT:
            return Manifest(**{**fields, "note": Note(**fields["note"])})
    except (KeyError, TypeError, AttributeError):
        pass
    raise ValueError(f"not a manifest of the format {FORMAT}")


def best_of(manifests: Sequence[Manifest]) -> Manifest | None:
    """The one with the best metric, by the mode of the newest; of equal ones the newest. None if none has a number."""
    counted = [each for each in manifests if each.note.metric is not None and not math.isnan(each.note.metric)]
    if not counted:
        return None
    sign = 1 if counted[-1].note.mode == "max" else -1
    return max(counted, key=lambda each: (sign * (each.note.metric or 0), each.number))


def staying(manifests: Sequence[Manifest], keep: int) -> set[int]:
    """The numbers of the newest ``keep``, and of the best one. ``manifests`` are in the order of their numbers."""
    best = best_of(manifests)
    return {each.number for each in manifests[-keep:]} | ({best.number} if best else set())


class Series:
    """The checkpoints in ``folder``."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def add(self, data: Data, kind: str, suffix: str, note: Note, keep: int | None) -> None:
        """Write a checkpoint. Then remove all but the newest ``keep`` and the best one; none if ``keep`` is None."""
        number = 1 + max(map(_number_of, self._folder.names()), default=0)
        stem = f"{number:07d}-step-{note.step}"
        file = f"{stem}.{suffix}"
        self._folder.write(file, data)
        manifest = Manifest(number, kind, file, len(data), zlib.crc32(data), note)
        self._folder.write(f"{stem}.json", manifest.text())
        if keep is not None:
            self._tidy(keep)

    def _tidy(self, keep: int) -> None:
        """Remove old checkpoints, each manifest first, and what a kill has left. Other files stay."""
        names = [name for name in self._folder.names() if _number_of(name)]
        numbers = staying(self._manifests(names), keep)
        gone = [name for name in names if _number_of(name) not in numbers or name.startswith(DRAFT)]
        for name in sorted(gone, key=lambda name: not name.endswith(".json")):
            self._folder.remove(name)

    def _manifests(self, names: Collection[str]) -> list[Manifest]:
        """Those of ``names``, in the order of their numbers."""
        found = [self._manifest(name) for name in sorted(filter(_is_manifest, names), key=_number_of)]
        return [each for each in found if each is not None]

    def _manifest(self, name: str) -> Manifest | None:
        try:
            manifest = manifest_of(self._folder.read(name))
        except ValueError as error:
            raise CheckpointError(
                f"{self._folder.location(name)} is {error}: another program, or another version of this one, has "
                "written it; move it away, or use another folder"
            ) from None
        if manifest is None:
            logger.warning("%s is cut off, so its checkpoint does not count", self._folder.location(name))
        return manifest

    def find(self, which: str | int, missing_ok: bool = False) -> Manifest | None:
        """The "latest", the "best", or the latest of a step.

        CheckpointError if there is none; None with ``missing_ok``, if there is no checkpoint at all.
        """
        names = self._folder.names()
        found = self._latest(names) if which == "latest" else self._chosen(names, which)
        if found is None and not (missing_ok and not self._manifests(names)):
            raise CheckpointError(self._explained(which, names))
        return found

    def _latest(self, names: Collection[str]) -> Manifest | None:
        listed = sorted(filter(_is_manifest, names), key=_number_of, reverse=True)
        return next((found for name in listed if (found := self._manifest(name)) is not None), None)

    def _chosen(self, names: Collection[str], which: str | int) -> Manifest | None:
        manifests = self._manifests(names)
        if which == "best":
            return best_of(manifests)
        return next((each for each in reversed(manifests) if each.note.step == which), None)

    def _explained(self, which: str | int, names: Collection[str]) -> str:
        place = self._folder.location()
        steps = sorted({each.note.step for each in self._manifests(names)})
        if not steps:
            what = f"it has {len(names)} other files" if names else "it is empty, or does not exist"
            return f"{place} has no checkpoint ({what}); give the folder that hvd.checkpoint.save got"
        if which == "best":
            return f"no checkpoint in {place} has a metric; give hvd.checkpoint.save a metric, or load the latest"
        return f"{place} has no checkpoint of {which!r}; give 'latest', 'best' or one of the steps {steps}"

    def read(self, manifest: Manifest) -> bytes:
        """The data of a checkpoint. CheckpointError if they are not those that were written."""
        try:
            data = self._folder.read(manifest.file)
        except FileNotFoundError:
            raise CheckpointError(self._damaged(manifest, "is missing")) from None
        if len(data) != manifest.size:
            raise CheckpointError(self._damaged(manifest, f"has {len(data)} bytes, not {manifest.size}"))
        if zlib.crc32(data) != manifest.checksum:
            raise CheckpointError(self._damaged(manifest, "has another content than was written"))
        return data

    def _damaged(self, manifest: Manifest, how: str) -> str:
        path = self._folder.location(manifest.file)
        return (
            f"the checkpoint {path} {how}: restore the file, or remove {path.rpartition('.')[0]}.json, so that the "
            "checkpoint before it is the latest"
        )

    def path(self, manifest: Manifest) -> str:
        """Where the data of a checkpoint are."""
        return self._folder.location(manifest.file)


def _is_manifest(name: str) -> bool:
    return bool(_number_of(name)) and name.endswith(".json") and not name.startswith(DRAFT)


def _number_of(name: str) -> int:
    """The number of the checkpoint that a file belongs to; 0 for a file of another kind."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else 0
