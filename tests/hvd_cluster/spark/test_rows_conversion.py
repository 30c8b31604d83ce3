"""Arrow batches, as Spark makes them, to arrays."""

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from hvd_cluster.spark.rows.columns import Column, ColumnKind, Selection, Stack
from hvd_cluster.spark.rows.conversion import Converter

VECTOR = pa.struct(
    [("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float64()))]
)


def scalar(name, dtype="float32"):
    return Column(name, ColumnKind.SCALAR, dtype)


def converter(*stacks):
    return Converter(
        Selection(tuple(Stack(tuple(columns), len(columns) == 1) for columns in stacks), (), (False, False), 0.0)
    )


def convert(columns, **values):
    [array] = converter(columns).arrays(pa.record_batch({column.name: values[column.name] for column in columns}))
    return array


def dense(*values):
    return {"type": 1, "size": None, "indices": None, "values": list(values)}


def sparse(size, elements):
    return {"type": 0, "size": size, "indices": list(elements), "values": list(elements.values())}


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "float32", "float64", "bool"])
def test_one_scalar_column(dtype):
    values = np.array([1, 0, 3]).astype(dtype)
    array = convert([scalar("a", dtype)], a=values)
    assert array.dtype == dtype
    np.testing.assert_array_equal(array, values)


def test_scalar_columns_stand_side_by_side():
    array = convert([scalar("b"), scalar("a", "int16")], a=np.int16([1, 2, 3]), b=np.float32([4, 5, np.nan]))
    assert array.dtype == np.float32
    assert array.flags.c_contiguous
    np.testing.assert_array_equal(array, [[4, 1], [5, 2], [np.nan, 3]])


def test_a_list_of_one_column_makes_a_matrix():
    stack = Stack((scalar("a"),), single=False)
    batch = pa.record_batch({"a": np.float32([1, 2, 3])})
    [array] = Converter(Selection((stack,), (), (False, False), 0.0)).arrays(batch)
    np.testing.assert_array_equal(array, [[1], [2], [3]])


def test_decimals_become_doubles():
    array = convert([scalar("a", "float64")], a=pa.array([Decimal("1.25"), Decimal("-3.10")], pa.decimal128(10, 2)))
    assert array.dtype == np.float64
    np.testing.assert_array_equal(array, [1.25, -3.1])


def test_arrays():
    values = pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.float32()))
    array = convert([Column("a", ColumnKind.ARRAY, "float32"), scalar("b")], a=values, b=np.float32([7, 8, 9]))
    np.testing.assert_array_equal(array, [[1, 2, 7], [3, 4, 8], [5, 6, 9]])


@pytest.mark.parametrize(
    "vectors",
    [
        [dense(1, 0, 2), dense(0, 0, 3), dense(4, 5, 6)],
        [sparse(3, {0: 1, 2: 2}), sparse(3, {2: 3}), sparse(3, {0: 4, 1: 5, 2: 6})],
        [dense(1, 0, 2), sparse(3, {2: 3}), dense(4, 5, 6)],
        [sparse(3, {0: 1, 2: 2}), dense(0, 0, 3), sparse(3, {0: 4, 1: 5, 2: 6})],
    ],
)
def test_vectors_dense_and_sparse(vectors):
    array = convert([Column("v", ColumnKind.VECTOR, "float64")], v=pa.array(vectors, VECTOR))
    assert array.dtype == np.float64
    np.testing.assert_array_equal(array, [[1, 0, 2], [0, 0, 3], [4, 5, 6]])


def test_a_sparse_vector_without_elements():
    array = convert([Column("v", ColumnKind.VECTOR, "float64")], v=pa.array([sparse(2, {}), dense(1, 2)], VECTOR))
    np.testing.assert_array_equal(array, [[0, 0], [1, 2]])


def test_a_slice_of_a_batch():
    columns = (
        [Column("v", ColumnKind.VECTOR, "float64")],
        [Column("a", ColumnKind.ARRAY, "float64")],
        [scalar("b", "bool")],
    )
    whole = pa.record_batch(
        {
            "v": pa.array([dense(9, 9), sparse(2, {1: 1}), dense(2, 3), sparse(2, {})], VECTOR),
            "a": pa.array([[9.0], [1], [2], [9, 9]]),
            "b": pa.array([True, False, True, None]),
        }
    )
    vectors, arrays, flags = converter(*columns).arrays(whole.slice(1, 2))
    np.testing.assert_array_equal(vectors, [[0, 1], [2, 3]])
    np.testing.assert_array_equal(arrays, [[1], [2]])
    np.testing.assert_array_equal(flags, [False, True])


def string(name):
    return Column(name, ColumnKind.STRING, "object")


@pytest.mark.parametrize("arrow_type", [pa.string(), pa.large_string(), pa.string_view()])
def test_strings(arrow_type):
    values = ["", "plain", "z\u00fcrich \U0001f600", "zero\0 at the end\0"]
    array = convert([string("a")], a=pa.array(values, arrow_type))
    assert (array.dtype, array.shape, array.tolist()) == (object, (4,), values)
    array = convert([string("b"), string("a")], a=pa.array(values, arrow_type), b=pa.array(values[::-1], arrow_type))
    assert array.tolist() == [list(pair) for pair in zip(values[::-1], values, strict=True)]


@pytest.mark.parametrize("arrow_type", [pa.binary(), pa.large_binary()])
def test_binary_data(arrow_type):
    values = [b"", b"\x89PNG\0\xff\0", b"\0"]
    array = convert([Column("a", ColumnKind.BINARY, "object")], a=pa.array(values, arrow_type))
    assert (array.dtype, array.tolist()) == (object, values)
    assert {type(value) for value in array} == {bytes}


def test_strings_that_are_not_utf8_are_refused():
    """Spark casts any binary data to strings."""
    found = pa.array([b"fine", b"\xff\xfe", b"\xfd"], pa.binary())
    broken = pa.Array.from_buffers(pa.string(), 3, found.buffers())
    text = r"column 'a' has a string that is not UTF-8, first in the row \(a=b'\\xff\\xfe', id=2\); .* cast\('binary'\)"
    with pytest.raises(ValueError, match=text):
        converter([string("a")], [scalar("id", "int64")]).arrays(pa.record_batch({"a": broken, "id": [1, 2, 3]}))


KINDS = {
    "scalar": ([1.0, None, None], pa.float64()),
    "array": ([[1.0], None, None], pa.list_(pa.float64())),
    "vector": ([dense(1.0), None, None], VECTOR),
    "string": (["a", None, None], pa.string()),
    "binary": ([b"a", None, None], pa.binary()),
}


@pytest.mark.parametrize("kind", ColumnKind)
def test_nulls_are_refused(kind):
    values, arrow_type = KINDS[kind.value]
    converting = converter([Column("a", kind, "float64")])
    converting.arrays(pa.record_batch({"a": pa.array(values[:1] * 5, arrow_type)}))
    text = r"column 'a' has nulls, first in the row \(a=None\); fill or drop.*subset=\['a'\]"
    with pytest.raises(ValueError, match=text):
        converting.arrays(pa.record_batch({"a": pa.array(values, arrow_type)}))


def test_a_row_with_a_null_is_named_by_its_values():
    columns = [scalar("id", "int64"), Column("v", ColumnKind.VECTOR, "float64")], [scalar("x", "float64")]
    rows = {"id": pa.array([7, 8]), "v": pa.array([dense(*range(99))] * 2, VECTOR), "x": pa.array([1.0, None])}
    with pytest.raises(ValueError, match=r"first in the row \(id=8, v=\{'type': 1,.{40,60}\.\.\., x=None\); fill"):
        converter(*columns).arrays(pa.record_batch(rows))


def test_of_many_columns_some_values_name_the_row():
    columns = [scalar(f"x{number}", "int64") for number in range(9)]
    with pytest.raises(ValueError, match=r"'x8' has nulls, first in the row \(x0=0, x1=1, .* x7=7, \.\.\.\); fill"):
        convert(columns, **{f"x{number}": pa.array([number if number < 8 else None]) for number in range(9)})


def test_nulls_inside_of_arrays_are_refused():
    with pytest.raises(ValueError, match=r"'a' has nulls inside of its arrays, first in the row \(a=\[1.0, None\]"):
        convert([Column("a", ColumnKind.ARRAY, "float64")], a=pa.array([[1.0, 2.0], [1.0, None]]))


SIZES = {
    "arrays": (ColumnKind.ARRAY, pa.list_(pa.float64()), [1.0, 2.0], [1.0]),
    "dense vectors": (ColumnKind.VECTOR, VECTOR, dense(1, 2), dense(1)),
    "sparse vectors": (ColumnKind.VECTOR, VECTOR, sparse(2, {0: 1.0}), sparse(1, {})),
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("before", [0, 4])
def test_other_sizes_are_refused(name, before):
    kind, arrow_type, usual, other = SIZES[name]
    converting = converter([Column("a", kind, "float64")])
    if before:
        converting.arrays(pa.record_batch({"a": pa.array([usual] * before, arrow_type)}))
    text = r"column 'a' has 1 elements in the row \(a=.*\), but 2 in rows before; all rows must"
    with pytest.raises(ValueError, match=text):
        converting.arrays(pa.record_batch({"a": pa.array([usual, usual, other, other], arrow_type)}))


def test_arrays_without_elements_are_refused():
    with pytest.raises(ValueError, match=r"column 'a' has no elements in the row \(a=\[\]\)"):
        convert([Column("a", ColumnKind.ARRAY, "float64")], a=pa.array([[], []], pa.list_(pa.float64())))


@pytest.mark.parametrize(
    "values", [pa.array([True, False, True]), pa.array([2, 0, 1]), pa.array([1, -1, 5], pa.int8())]
)
def test_a_column_says_what_is_for_validation(values):
    column = scalar("v", "int64")
    chosen = Converter(Selection((), (), (False, False), column)).is_validation(column, pa.record_batch({"v": values}))
    np.testing.assert_array_equal(chosen, [True, False, True])
