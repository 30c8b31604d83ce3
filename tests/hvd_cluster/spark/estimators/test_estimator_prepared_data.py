"""The small functions about rows that are written before a fit."""

from types import SimpleNamespace

import pytest

from hvd_cluster.spark.estimators.prepared_data import check_validation, to_list


@pytest.mark.parametrize("validation", [None, 0, 0.5, "kept"])
def test_a_validation_that_is_allowed(validation):
    check_validation(validation)
    check_validation(validation, SimpleNamespace(columns=["kept"]))


@pytest.mark.parametrize("validation", [1, -0.1, True, ["kept"], "other"])
def test_a_validation_that_is_not_allowed(validation):
    with pytest.raises(ValueError, match="validation"):
        check_validation(validation, SimpleNamespace(columns=["kept"]))


def test_lists():
    assert to_list(None, 2) is None
    assert to_list(3, 2) == to_list([3], 2) == [3, 3]
    assert to_list([3, 4], 2) == [3, 4]
    with pytest.raises(ValueError, match="there are 3 values, but there must be one, or 2"):
        to_list([1, 2, 3], 2)
