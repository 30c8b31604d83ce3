"""Which backend runs the workers of a fit."""

import pytest

from hvd_cluster.spark.estimators.backend import SparkBackend, chosen_backend


def test_spark_by_default():
    assert chosen_backend(None, 3, 1).num_processes() == 3


def test_a_backend_of_ones_own():
    class Mine(SparkBackend):
        """Counts its calls."""

    mine = Mine(2)
    assert chosen_backend(mine, None, 1) is mine


def test_a_number_of_workers_besides_a_backend():
    with pytest.raises(ValueError, match=r"num_proc is 2 and there is a backend, too.*SparkBackend\(num_proc=2\)"):
        chosen_backend(SparkBackend(2), 2, 1)


def test_something_that_is_no_backend():
    with pytest.raises(ValueError, match=r"backend is 3, but must have the methods run\(\) and num_processes\(\)"):
        chosen_backend(3, None, 1)


@pytest.mark.parametrize("number", [0, "two"])
def test_a_number_that_is_not_allowed(number):
    with pytest.raises(ValueError, match="num_proc"):
        SparkBackend(number)
