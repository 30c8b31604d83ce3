"""Which columns become which arrays, and what is refused before anything starts."""

import numpy as np
import pytest
from pyspark.ml.linalg import VectorUDT
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from hvd_cluster.spark.rows.columns import MOST_ARRAYS, ColumnKind, select
from hvd_cluster.spark.rows.feed import Rows

TYPES = {
    "bool": BooleanType(),
    "byte": ByteType(),
    "short": ShortType(),
    "int": IntegerType(),
    "long": LongType(),
    "float": FloatType(),
    "double": DoubleType(),
    "decimal": DecimalType(10, 2),
    "floats": ArrayType(FloatType()),
    "vector": VectorUDT(),
    "string": StringType(),
    "binary": BinaryType(),
    "date": DateType(),
    "timestamp": TimestampType(),
    "map": MapType(StringType(), LongType()),
    "nested": ArrayType(ArrayType(FloatType())),
    "strings": ArrayType(StringType()),
    "twice": LongType(),
}
SCHEMA = StructType([StructField(name, kind) for name, kind in TYPES.items()] + [StructField("twice", FloatType())])


def chosen(feature_cols, label_cols="long", validation=None, sample_weight_col=None):
    return select(SCHEMA, feature_cols, label_cols, validation, sample_weight_col)


@pytest.mark.parametrize(
    ("names", "dtype", "flat"),
    [
        ("float", "float32", True),
        (["float"], "float32", False),
        ("bool", "bool", True),
        (["bool"], "bool", False),
        ("floats", "float32", False),
        (["byte", "short"], "int16", False),
        (["float", "short"], "float32", False),
        (["float", "int"], "float64", False),
        (["float", "double"], "float64", False),
        (["bool", "float"], "float32", False),
        ("decimal", "float64", True),
        (["floats"], "float32", False),
        (["vector"], "float64", False),
        (["float", "floats"], "float32", False),
        (("floats", "vector"), "float64", False),
        ("string", "object", True),
        (["string"], "object", False),
        ("binary", "object", True),
    ],
)
def test_columns_make_one_array_of_their_common_dtype(names, dtype, flat):
    selection = chosen(names)
    [stack] = selection.features
    assert (stack.dtype, stack.flat) == (np.dtype(dtype), flat)
    assert selection.nested == (False, False)


def test_lists_inside_of_the_list_make_a_tuple_of_arrays():
    selection = chosen([["float", "double"], "int"], ["long", "short"])
    assert [[column.name for column in stack.columns] for stack in selection.features] == [["float", "double"], ["int"]]
    assert [stack.dtype for stack in selection.features] == [np.float64, np.int32]
    assert [stack.flat for stack in selection.features] == [False, True]
    assert selection.nested == (True, False)
    assert selection.names == ["float", "double", "int", "long", "short"]


def test_without_feature_cols_all_other_columns_are_features():
    fields = [StructField(name, DoubleType()) for name in "abc"] + [StructField("v", BooleanType())]
    selection = select(StructType(fields), None, "b", "v")
    assert selection.names == ["a", "c", "b", "v"]
    assert selection.has_validation


def test_without_feature_cols_there_must_be_others_of_different_names():
    with pytest.raises(
        ValueError, match="feature_cols is left out, but the DataFrame has 2 columns of the name 'twice'"
    ):
        select(StructType(SCHEMA.fields[-2:] + SCHEMA.fields[:1]), None, "bool", None)
    with pytest.raises(ValueError, match="feature_cols is left out, but the DataFrame has no columns besides"):
        select(StructType(SCHEMA.fields[:1]), None, "bool", None)


def test_names_that_differ_in_case_only():
    fields = [StructField(name, DoubleType()) for name in ("X", "x", "y")]
    assert select(StructType(fields), ["x", "X"], "y", None).names == ["x", "X", "y"]


def test_kinds():
    names = [["float"], ["floats"], ["vector"], ["string"], ["binary"]]
    stacks = chosen(names).features
    assert [column.kind for stack in stacks for column in stack.columns] == list(ColumnKind)
    assert [stack.strings for stack in stacks] == [None, None, None, str, bytes]


@pytest.mark.parametrize(
    ("validation", "has_validation"),
    [(None, False), (0, False), (0.25, True), (np.float32(0.25), True), ("bool", True), ("int", True)],
)
def test_validation(validation, has_validation):
    assert chosen("float", validation=validation).has_validation is has_validation


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            (["absent"],),
            r"feature_cols names 'absent', which the DataFrame does not have; its columns are bool, ",
        ),
        ((["float"], "absent"), r"label_cols names 'absent', which the DataFrame does not have"),
        ((["float"], "long", "absent"), r"validation names 'absent', which the DataFrame does not have"),
        ((["twice"],), r"feature_cols names 'twice', but the DataFrame has 2 columns of that name"),
        ((["float", "float"],), r"feature_cols names 'float' twice"),
        (([["float"], ["int", "float"]],), r"feature_cols names 'float' twice"),
        ((["float", "long"],), r"label_cols names 'long', which feature_cols names, too"),
        ((["float", "bool"], "long", "bool"), r"feature_cols names 'bool', which validation names, too"),
        ((["float"], "bool", "bool"), r"label_cols names 'bool', which validation names, too"),
        (([],), r"feature_cols is \[\], but must be the name of a column or a list of names"),
        (([[]],), r"feature_cols is \[\[\]\], but must be"),
        (([1],), r"feature_cols is \[1\], but must be"),
        (({"float": 1},), r"feature_cols is \{'float': 1\}, but must be"),
        ((["float"], None), r"label_cols is None, but must be"),
        ((["float"], ()), r"label_cols is \(\), but must be"),
        (
            (["float", "string", "long"], "int"),
            r"a list with both 'float' \(numbers\) and 'string' \(strings\), .* each kind a list of its own, as "
            r"in feature_cols=\[\['float', 'long'\], \['string'\]\]",
        ),
        (
            (["binary", "string"],),
            r"'binary' \(binary data\) and 'string' \(strings\), but the columns of a list share",
        ),
        (([["float"], ["string", "floats"]],), r"both 'string' \(strings\) and 'floats' \(numbers\)"),
        ((["float"], "binary"), r"label_cols has the column 'binary', which is of type binary; decode it into numbers"),
        ((["float"], "long", "string"), r"validation names 'string', a column of type string; it must be boolean"),
        ((["date"],), r"'date', which is of type date; turn it into a number"),
        ((["timestamp"],), r"'timestamp', which is of type timestamp; turn it into a number"),
        ((["map"],), r"'map', which is of type map<string,bigint>; columns can have numbers"),
        ((["nested"],), r"'nested', which is of type array<array<float>>; columns can have"),
        ((["strings"],), r"'strings', which is of type array<string>; columns can have"),
        ((["float"], "string"), r"label_cols has the column 'string', which is of type string; index it first"),
        ((["float"], "long", 1), r"validation is 1, but must be a fraction of at least 0 and below 1"),
        ((["float"], "long", -0.1), r"validation is -0.1, but must be"),
        ((["float"], "long", float("nan")), r"validation is nan, but must be"),
        ((["float"], "long", True), r"validation is True, but must be"),
        ((["float"], "long", "double"), r"validation names 'double', a column of type double; it must be boolean"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        chosen(*arguments)


def test_of_many_columns_some_are_named():
    schema = StructType([StructField(f"c{number}", LongType()) for number in range(25)])
    with pytest.raises(ValueError, match=r"its columns are c0, .*c19 and 5 more$"):
        select(schema, ["x"], "c0", None)


def test_only_so_many_arrays():
    names = [f"c{number}" for number in range(MOST_ARRAYS)]
    schema = StructType([StructField(name, LongType()) for name in names])
    assert len(select(schema, [[name] for name in names[1:]], "c0", None).stacks) == MOST_ARRAYS
    assert len(select(schema, names[1:], "c0", None).stacks) == 2
    with pytest.raises(ValueError, match="ask for 257 arrays, but a batch has at most 256"):
        select(StructType([*schema, StructField("x", LongType())]), [[name] for name in names], "x", None)
    texts = StructType([*(StructField(name, StringType()) for name in names[:128]), StructField("x", LongType())])
    assert len(select(texts, [[name] for name in names[:127]], "x", None).stacks) == 128
    with pytest.raises(ValueError, match="ask for 257 arrays"):  # those of strings have twice as many files
        select(texts, [[name] for name in names[:128]], "x", None)


@pytest.mark.parametrize(
    ("batch_size", "seed", "text"),
    [
        (0, 0, "batch_size is 0, but must be an integer of at least 1"),
        (2.0, 0, "batch_size is 2.0, but must"),
        (True, 0, "batch_size is True, but must"),
        (np.int64(0), 0, r"batch_size is np.int64\(0\), but must"),
        (np.True_, 0, "batch_size is np.True_, but must"),
        (1, -1, "seed is -1, but must be an integer of at least 0"),
        (1, None, "seed is None, but must"),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused(batch_size, seed, text):
    with pytest.raises(ValueError, match=text):
        Rows.of(SCHEMA, "long", "float", batch_size, None, True, seed)


def test_numbers_of_numpy():
    rows = Rows.of(SCHEMA, "long", "float", np.int64(4), np.float32(0.5), True, np.int8(1))
    assert (rows.batch_size, rows.selection.validation, rows.seed) == (4, 0.5, 1)
    assert {type(rows.batch_size), type(rows.selection.validation), type(rows.seed)} == {int, float}


def test_weights_are_the_last_array():
    selection = chosen(["float", ["int"]], sample_weight_col="double")
    assert selection.names == ["float", "int", "long", "double"]
    assert (selection.stacks[-1].dtype, selection.stacks[-1].flat) == (np.dtype("float64"), True)
    assert selection.sides == ((2, 1, 1), (True, False, False))
    assert chosen(["float"]).sides == ((1, 1), (False, False))


def test_weights_are_no_features():
    schema = StructType([StructField(name, FloatType()) for name in ("x", "y", "w")])
    assert select(schema, None, "y", None, "w").names == ["x", "y", "w"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("floats", "must have one number for each row"),
        ("absent", "sample_weight_col names 'absent', which the DataFrame does not have"),
        ("string", "sample_weight_col has the column 'string', which is of type string; index it first"),
        ("binary", "sample_weight_col has the column 'binary', which is of type binary"),
        ("float", "feature_cols names 'float', which sample_weight_col names, too"),
        (["double"], r"sample_weight_col is \['double'\], but must be the name of a column"),
    ],
)
def test_weights_that_cannot_be_used(name, text):
    with pytest.raises(ValueError, match=text):
        chosen("float", sample_weight_col=name)
