"""The columns that a transform adds."""

import numpy as np
import pyarrow as pa
import pytest

from hvd_cluster.spark.estimators.outputs import (
    OutputColumn,
    check_names_are_free,
    check_outputs,
    needs_width,
    output_columns,
    widths_of,
)


@pytest.mark.parametrize(
    ("spark_type", "width", "expected"),
    [
        ("bigint", 1, "bigint"),
        ("bigint", None, "bigint"),
        ("bigint", 3, None),
        ("boolean", 1, "boolean"),
        ("float", 1, "float"),
        ("decimal(10,2)", 1, "double"),
        ("vector", 1, None),
        ("vector", None, None),
        ("array<float>", 1, None),
        (None, 1, "double"),
        (None, 2, None),
    ],
)
def test_the_type_is_that_of_the_label_or_a_vector(spark_type, width, expected):
    types = {} if spark_type is None else {"y": spark_type}
    (column,) = output_columns(["y"], None, types, [width])
    assert column == OutputColumn("y__output", "y", expected)


def test_names():
    columns = output_columns(["y", ["a", "b"]], None, {"y": "int"})
    assert [column.name for column in columns] == ["y__output", "a_b__output"]
    assert columns[1].spark_type is None
    assert [column.name for column in output_columns(["y", "z"], ["p", "q"], {})] == ["p", "q"]


@pytest.mark.parametrize("names", [["p"], ["p", "q", "r"], ["p", "p"]])
def test_a_name_for_each_label(names):
    with pytest.raises(ValueError, match=r"output_cols is .* one name for each of the label columns"):
        output_columns(["y", "z"], names, {})


def test_only_labels_of_one_number_need_a_trial():
    types = {"v": "vector", "a": "array<int>", "y": "int"}
    assert [needs_width(label, types) for label in ("v", "a", "y", "unknown", ["y", "z"])] == [
        *(False, False, True, True, False)
    ]


@pytest.mark.parametrize(
    ("spark_type", "values", "expected"),
    [
        ("float", [0.5, -1.5], [0.5, -1.5]),
        ("int", [0.5, 1.5, -2.6], [0, 2, -3]),
        ("tinyint", [300.0, -300.0, 5.2], [127, -128, 5]),
        ("bigint", [1e30, -1e30, 3.0], [2**63 - 1, -(2**63), 3]),
        ("bigint", [np.nan, np.inf, 1.0], [None, None, 1]),
        ("boolean", [0.4, 0.6, np.nan], [False, True, None]),
        ("double", [np.nan], [np.nan]),
    ],
)
def test_numbers_are_rounded_for_integers(spark_type, values, expected):
    array = OutputColumn("p", "y", spark_type).arrow(np.array(values)[:, None], len(values))
    assert array.type == OutputColumn("p", "y", spark_type).arrow_type
    np.testing.assert_equal(array.to_pylist(), expected)


def test_a_vector_has_all_elements():
    array = OutputColumn("p", "y", None).arrow(np.arange(12, dtype=np.float32).reshape(2, 2, 3), 2)
    assert array.type == pa.list_(pa.float64())
    assert array.to_pylist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert OutputColumn("p", "y", None).arrow(np.ones(2), 2).to_pylist() == [[1.0], [1.0]]


def test_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"for 3 rows the model returned an output of shape \(1, 2\) for 'y'"):
        OutputColumn("p", "y", None).arrow(np.ones((1, 2)), 3)
    with pytest.raises(ValueError, match=r"the model returned 2 numbers for each row, an output of shape \(3, 2\)"):
        OutputColumn("p", "y", "int").arrow(np.ones((3, 2)), 3)
    with pytest.raises(ValueError, match=r"the model returned 2 outputs, but there are 1 label columns: \['y'\]"):
        check_outputs([np.ones(3), np.ones(3)], ["y"])
    assert widths_of([np.ones(1), np.ones((1, 2, 3))], ["y", "z"]) == [1, 6]


def test_a_name_that_is_taken():
    columns = output_columns(["y"], ["P"], {})
    check_names_are_free(columns, ["p", "q"], case_sensitive=True)
    with pytest.raises(ValueError, match=r"has a column 'P' already, .* setOutputCols"):
        check_names_are_free(columns, ["p", "q"], case_sensitive=False)
