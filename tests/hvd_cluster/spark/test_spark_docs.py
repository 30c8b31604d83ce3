"""The blocks of the docs that need Spark run as they stand there."""

import pytest
from pyspark.sql import functions as F

from tests.doc_blocks import blocks, execute

torch = pytest.importorskip("torch")

# Spark keeps its own processes and connections.
pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.leaves("descriptors", "processes")]


@pytest.fixture
def df(spark):
    columns = [F.randn(number).cast("float").alias(f"x{number}") for number in range(28)]
    return spark.range(1000).select(*columns).withColumn("y", F.col("x3") - F.col("x5"))


@pytest.mark.parametrize("block", blocks("spark"), ids=lambda block: block.name)
def test_a_block(df, block):
    first, second = execute(block, df=df)["states"]
    assert set(first) == {"weight", "bias"}
    assert all(first[name].equal(second[name]) for name in first)
    torch.manual_seed(0)
    learnt = first["weight"][0] - torch.nn.Linear(28, 1).weight[0]
    assert learnt[3] > 0 > learnt[5]


@pytest.mark.leaves("environment", "threads")  # torch sets a variable with the first optimizer, TensorFlow has threads
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras with NumPy 2
@pytest.mark.parametrize("block", blocks("estimator"), ids=lambda block: block.name)
def test_a_block_with_an_estimator(df, block, capsys):
    if "import keras" in block.code:
        pytest.importorskip("keras")
    names = execute(block, df=df)
    history = names["fitted"].getHistory()
    assert history[-1]["train"]["loss"] < history[0]["train"]["loss"] or len(history) == 1
    if "scored" in names:
        assert names["scored"].columns == [*df.columns, "prediction"]
        assert len(capsys.readouterr().out.splitlines()) == len(history)
