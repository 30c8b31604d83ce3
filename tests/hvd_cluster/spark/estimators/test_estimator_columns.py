"""Which columns of a DataFrame are the features, labels and weights of a fit."""

import pytest
from pyspark.sql.types import FloatType, StringType, StructField, StructType

from hvd_cluster.spark.estimators.columns import FitColumns, check_kinds, check_labels, has_strings, key_of
from hvd_cluster.spark.estimators.params import EstimatorParams
from hvd_cluster.spark.rows.columns import select_features


def schema(*names):
    return StructType([StructField(name, FloatType()) for name in names])


def settings(**given):
    return EstimatorParams(**given).settings()


def test_all_other_columns_are_features():
    found = FitColumns.of(
        schema("a", "b", "w", "v", "y"), settings(label_cols=["y"], sample_weight_col="w", validation="v")
    )
    assert found == FitColumns(["a", "b"], ["y"], "w")


def test_each_tensor_is_a_matrix():
    found = FitColumns.of(schema("a", "b", "c", "y"), settings(feature_cols=["a", ["b", "c"]], label_cols="y"))
    assert found.arguments() == {
        "feature_cols": [["a"], ["b", "c"]],
        "label_cols": [["y"]],
        "sample_weight_col": None,
    }
    assert [key_of(group) for group in found.features] == ["a", ("b", "c")]


def test_labels_must_be_named():
    with pytest.raises(ValueError, match="label_cols is left out"):
        FitColumns.of(schema("a"), settings())


def test_there_must_be_features():
    with pytest.raises(ValueError, match="feature_cols is left out, but the DataFrame has no columns besides"):
        FitColumns.of(schema("y"), settings(label_cols=["y"]))


@pytest.mark.parametrize("given", [{"loss_weights": [1.0]}, {"label_shapes": [[1], [1], [1]]}])
def test_a_list_for_the_labels_has_one_for_each(given):
    with pytest.raises(ValueError, match=r"(loss_weights|label_shapes) has [13] values, but label_cols names 2"):
        check_labels(["y", "z"], settings(**given))


STRING_SCHEMA = StructType([StructField("x", FloatType()), StructField("text", StringType())])


@pytest.mark.parametrize(
    ("features", "types", "text"),
    [
        (
            ["text"],
            {"text": "double"},
            "'text' has strings, but the model was trained with a column of type double; cast",
        ),
        (["text"], {"text": "binary"}, "'text' has strings, but the model was trained with a column of type binary"),
        (["x", "text"], {"x": "string"}, "'x' has numbers, but the model was trained with a column of type string"),
    ],
)
def test_a_model_gets_what_it_was_trained_with(features, types, text):
    stacks = select_features(STRING_SCHEMA, [[name] for name in features]).features
    check_kinds(stacks, {})
    check_kinds(stacks, {"text": "string collate UNICODE", "x": "double"})
    with pytest.raises(ValueError, match=text):
        check_kinds(stacks, types)


def test_whether_there_are_strings():
    assert has_strings(FitColumns(["x", ["a", "b"]], ["y"]), {"x": "int", "a": "string", "y": "int"})
    assert not has_strings(FitColumns(["x", "z"], ["y"]), {"x": "array<string>", "y": "string"})
