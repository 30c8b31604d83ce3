"""Strings and binary data of rows: values of different lengths, in an array of objects or in files.

A file has the values, one after the other, row by row. A second one has for each row the places where its values begin,
and where the last one ends, so that the places are a matrix as any other. Values become objects of Python when a batch
of them is made, however many rows are read at a time: so one batch of long values is in memory, not a window of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Strings = type[str] | type[bytes]

PLACE = np.dtype(np.int64)


@dataclass(frozen=True, slots=True)
class StringRows:
    """Rows of strings or binary data, in the order of ``places``; slices are such rows, too.

    ``data`` has the bytes of all values, those of ``places`` among them: a mapped file, or bytes. ``kind`` is the type
    of the values. ``flat`` says whether the array of them has one dimension.
    """

    places: Array
    data: Any
    kind: Strings
    flat: bool

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of :meth:`objects`."""
        return np.dtype(object)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, rows: slice) -> StringRows:
        return StringRows(self.places[rows], self.data, self.kind, self.flat)

    def objects(self) -> Array:
        """An array of ``str`` or ``bytes``, of shape (rows,) or (rows, values)."""
        data, places = self.data, self.places
        pairs = zip(places[:, :-1].ravel().tolist(), places[:, 1:].ravel().tolist(), strict=True)
        if self.kind is str:
            array = object_array([data[begin:end].decode() for begin, end in pairs])
        else:
            array = object_array([data[begin:end] for begin, end in pairs])
        return array if self.flat else array.reshape(len(places), places.shape[1] - 1)

    def parts(self) -> tuple[Any, Any]:
        """The places and the bytes of neighbouring rows, for a checksum."""
        begin, end = int(self.places[0, 0]), int(self.places[-1, -1])
        return np.ascontiguousarray(self.places).reshape(-1).view(np.uint8).data, memoryview(self.data)[begin:end]


def object_array(values: list[Any]) -> Array:
    """An array of one dimension; NumPy would cut zeros at the end of bytes if it chose the dtype."""
    array: Array = np.empty(len(values), object)
    array[:] = values
    return array


def encoded(array: Array, position: int) -> tuple[Array, bytes]:
    """The places of the values of each row, and the bytes of all of them, which will stand at ``position``.

    Places have the shape (rows, values + 1).
    """
    values = array.reshape(-1).tolist()
    if values and isinstance(values[0], str):
        values = [value.encode() for value in values]
    ends = np.zeros(len(values) + 1, PLACE)
    np.cumsum(np.fromiter(map(len, values), PLACE, len(values)), out=ends[1:])
    width = 1 if array.ndim == 1 else array.shape[1]
    firsts = np.arange(len(array))[:, None] * width
    return ends[firsts + np.arange(width + 1)] + position, b"".join(values)


def is_strings(array: Any) -> bool:
    """Whether ``array`` has strings or binary data: objects, or rows in files."""
    return bool(array.dtype == object)


def objects(rows: Any) -> Array:
    """``rows`` as an array of objects."""
    return rows.objects() if isinstance(rows, StringRows) else rows


def array_bytes(array: Array) -> int:
    """The bytes of the numbers, or of the values of an array of objects, about: a character counts as one byte."""
    return sum(map(len, array.reshape(-1).tolist())) + array.nbytes if is_strings(array) else array.nbytes


def without_rows(kind: Strings, shape: tuple[int, ...]) -> Array:
    """An array of empty values."""
    return object_array([kind()] * int(np.prod(shape))).reshape(shape)
