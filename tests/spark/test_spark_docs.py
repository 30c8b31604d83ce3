"""What docs/spark.md shows runs as it stands there."""

import re
from pathlib import Path

import pytest
from pyspark.sql import functions as F

torch = pytest.importorskip("torch")

# Spark keeps its own processes and connections.
pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.leaves("descriptors", "processes")]

PAGE = Path(__file__).parents[2] / "docs" / "spark.md"


def test_the_snippet(spark):
    [snippet] = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    columns = [F.randn(number).cast("float").alias(f"x{number}") for number in range(28)]
    df = spark.range(1000).select(*columns).withColumn("y", F.col("x3") - F.col("x5"))
    names = {"__name__": "snippet", "df": df}
    exec(compile(snippet, PAGE.name, "exec"), names)
    first, second = names["states"]
    assert set(first) == {"weight", "bias"}
    assert all(first[name].equal(second[name]) for name in first)
    torch.manual_seed(0)
    learnt = first["weight"][0] - torch.nn.Linear(28, 1).weight[0]
    assert learnt[3] > 0 > learnt[5]
