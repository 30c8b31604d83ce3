"""Errors of calls with wrong arguments, before anything starts; no Spark is needed."""

import pandas
import pytest

from hvd_cluster.spark import run, run_on_dataframe


def train(shard):
    pass


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: run(train, num_procs=2), r"^run\(\) got an unexpected keyword argument 'num_procs'"),
        (
            lambda: run_on_dataframe(train, [1], label_cols="y", num_procs=2),
            r"^run_on_dataframe\(\) got an unexpected keyword argument 'num_procs'",
        ),
        (lambda: run(train, df=[1], schema=1, label_cols="y"), r"^run\(\) got an unexpected keyword argument 'schema'"),
        (lambda: run(train, df=[1]), r"^run\(\) got a df, but no label_cols"),
        (lambda: run(train, label_cols="y"), r"^run\(\) got label_cols, but no df"),
        (lambda: run_on_dataframe(train, [1]), r"^run_on_dataframe\(\) missing .* 'label_cols'"),
        (lambda: run_on_dataframe(train, None, label_cols="y"), r"^df is a builtins.NoneType, but must be a DataFrame"),
        (lambda: run(train, df=[1], label_cols="y"), r"^df is a builtins.list, but must be a DataFrame of Spark"),
        (
            lambda: run(train, df=pandas.DataFrame({"y": [1]}), label_cols="y"),
            r"^df is a pandas.*DataFrame, but must be a DataFrame of Spark, as spark.createDataFrame\(\) makes one",
        ),
    ],
)
def test_arguments_that_make_no_call(call, text):
    with pytest.raises(TypeError, match=text):
        call()
