"""Which columns of a DataFrame are the features, labels and weights of a fit."""

import pytest
from pyspark.sql.types import FloatType, StructField, StructType

from hvd_cluster.spark.estimators.columns import FitColumns, check_labels, key_of
from hvd_cluster.spark.estimators.params import EstimatorParams


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
