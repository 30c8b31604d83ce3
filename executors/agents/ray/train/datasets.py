"""The parts of datasets of Ray Data that belong to the ranks of a job."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from executors.api import ExecutorError

if TYPE_CHECKING:
    from ray.data import DataIterator

_shards: dict[str, DataIterator] = {}


def split(datasets: object, ranks: int) -> dict[str, list[DataIterator]]:
    """The part of each rank, by the name of the dataset; all parts have the same number of rows.

    Raises TypeError unless ``datasets`` is a dict of datasets.
    """
    if not isinstance(datasets, Mapping) or not all(hasattr(each, "streaming_split") for each in datasets.values()):
        raise TypeError(
            f"datasets is {datasets!r}, but must be a dict of datasets of Ray Data by name, such as "
            '{"train": ray.data.range(64)}'
        )
    return {name: dataset.streaming_split(ranks, equal=True) for name, dataset in datasets.items()}


class Sharded:
    """``function`` for all ranks; while it runs, :func:`get_dataset_shard` gives the rank's own part of ``splits``."""

    def __init__(self, function: Callable[..., Any], splits: Mapping[str, Sequence[DataIterator]]) -> None:
        self._function = function
        self._splits = splits
        self.__qualname__ = getattr(function, "__qualname__", None) or repr(function)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        rank = int(os.environ["HOROVOD_RANK"])
        _shards.update({name: parts[rank] for name, parts in self._splits.items()})
        try:
            return self._function(*args, **kwargs)
        finally:
            _shards.clear()


def get_dataset_shard(name: str = "train") -> DataIterator:
    """This rank's part of the dataset ``name`` that :meth:`RayExecutor.run` got.

    Every rank has to read its part, because the parts advance together. Raises ExecutorError if there is none.
    """
    if name not in _shards:
        known = ", ".join(map(repr, _shards)) or "none"
        raise ExecutorError(
            f"no dataset {name!r} was given to this function (datasets: {known}); call "
            f"RayExecutor.run(..., datasets={{{name!r}: dataset}})"
        )
    return _shards[name]
