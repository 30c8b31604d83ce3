"""The rows of a shard as a ``tf.data.Dataset``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hvd_cluster.spark.spill import Form

__all__ = ["dataset"]

Windows = Callable[[], Iterator[Sequence[Any]]]
Pack = Callable[[Sequence[Any]], Any]


def dataset(
    windows: Windows, forms: Sequence[Form], widths: Sequence[int], batch_size: int, pack: Pack, batches: int
) -> Any:
    """A dataset of so many ``batches``; ``pack`` makes one of its tensors, which have the order of ``forms``.

    Each call of ``windows`` is an epoch of arrays, of ``batch_size`` rows or a multiple; only the last may have fewer.
    TensorFlow takes their memory as it is, and cuts them without Python. ``widths`` are zero if there are no rows.
    """
    import tensorflow as tf

    specs = tuple(
        tf.TensorSpec([None] if form.flat else [None, width or None], tf.as_dtype(form.dtype))
        for form, width in zip(forms, widths, strict=True)
    )

    def arrays() -> Iterator[tuple[Any, ...]]:
        return (tuple(map(np.ascontiguousarray, each)) for each in windows())

    def cut(*arrays: Any) -> Any:
        firsts = tf.data.Dataset.range(0, tf.shape(arrays[0], tf.int64)[0], batch_size)
        return firsts.map(lambda first: pack([array[first : first + batch_size] for array in arrays]))

    found = tf.data.Dataset.from_generator(arrays, output_signature=specs).flat_map(cut)
    return found.apply(tf.data.experimental.assert_cardinality(batches))
