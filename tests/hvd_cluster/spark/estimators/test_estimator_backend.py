"""Which backend runs the workers of a fit."""

import pytest

from hvd_cluster.spark.estimators.backend import Backend, SparkBackend, chosen_backend


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


def test_a_backend_that_cannot_bring_the_rows():
    class Here(Backend):
        def run(self, fn, args=(), kwargs=None, env=None):
            return [fn(*args, **(kwargs or {}))]

        def num_processes(self):
            return 1

    with pytest.raises(ValueError, match=r"has no method run_on_dataframe.*subclass of SparkBackend"):
        chosen_backend(Here(), None, 1)


@pytest.mark.parametrize("number", [0, "two"])
def test_a_number_that_is_not_allowed(number):
    with pytest.raises(ValueError, match="num_proc"):
        SparkBackend(number)
