"""The scores of rows, without Spark."""

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DoubleType,
    FloatType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from hvd_cluster.spark.estimators import scoring
from hvd_cluster.spark.estimators.outputs import OutputColumn
from hvd_cluster.spark.estimators.scoring import Scoring, predicted
from hvd_cluster.spark.estimators.shipping import InlineSource
from hvd_cluster.spark.rows.columns import select_features

SCHEMA = StructType(
    [
        StructField("a", DoubleType()),
        StructField("b", LongType()),
        StructField("r", ArrayType(FloatType())),
        StructField("text", StringType()),
        StructField("image", BinaryType()),
    ]
)
loads = []


def load(data, gpu):
    """A model that adds up its inputs, and another output of twice the first input."""
    loads.append((data, gpu))
    return lambda inputs: [sum(each.sum(1) for each in inputs), 2 * inputs[0]]


@pytest.fixture(autouse=True)
def nothing_loaded():
    loads.clear()
    scoring._loaded.clear()
    yield
    scoring._loaded.clear()


def scoring_of(features=(["a", "b"], ["r"]), digest="one", load=load, **options):
    outputs = (OutputColumn("p", "y", "bigint"), OutputColumn("q", "v", None))
    settings = {"keep": False, "batch_size": None, "on_gpu": False, **options}
    selection = select_features(SCHEMA, [list(each) for each in features])
    return Scoring(InlineSource(b"model"), digest, load, selection, outputs, **settings)


def columns(*rows):
    """As they come: ``a`` and ``b`` in one array."""
    pairs, arrays = ([(a, b) for a, b, _ in rows], [r for _, _, r in rows])
    return pa.array(pairs, pa.list_(pa.float64())), pa.array(arrays, pa.list_(pa.float32()))


def test_several_inputs_and_outputs():
    batches = [columns((1.0, 2, [3.0, 4.0]), (0.5, 1, [0.0, 0.0])), columns((2.0, 0, [1.0, 1.0]))]
    first, second = scoring_of().batches(iter(batches))
    assert first.to_pylist() == [{"o0": 10, "o1": [2.0, 4.0]}, {"o0": 2, "o1": [1.0, 2.0]}]
    assert second.to_pylist() == [{"o0": 4, "o1": [4.0, 0.0]}]


def test_one_column_comes_without_a_tuple():
    (scores,) = scoring_of(features=[["a"]]).batches(iter([pa.array([1.0, 2.0])]))
    assert scores.to_pylist() == [{"o0": 1, "o1": [2.0]}, {"o0": 2, "o1": [4.0]}]


def test_no_rows():
    (scores,) = scoring_of().batches(iter([columns()]))
    assert len(scores) == 0
    assert [scores.type.field(number).type for number in range(2)] == [pa.int64(), pa.list_(pa.float64())]
    assert list(scoring_of().batches(iter([]))) == []


def test_nulls_are_refused_or_kept():
    rows = columns((1.0, 2, [3.0]), (None, 1, [0.0]), (1.0, 1, None), (0.0, 0, [5.0]))
    with pytest.raises(ValueError, match=r"column 'a' has nulls, first in the row \(a=None, b=1.0\)"):
        list(scoring_of().batches(iter([rows])))
    (scores,) = scoring_of(keep=True).batches(iter([rows]))
    assert [row["o0"] for row in scores.to_pylist()] == [6, None, None, 5]
    assert [row["o1"] for row in scores.to_pylist()] == [[2.0, 4.0], None, None, [0.0, 0.0]]
    nulls = columns((None, 1, [0.0]))
    (scores,) = scoring_of(keep=True).batches(iter([nulls]))
    assert scores.to_pylist() == [{"o0": None, "o1": None}]
    inside = columns((1.0, 1, [None]))
    with pytest.raises(ValueError, match="nulls inside of its arrays"):
        list(scoring_of(keep=True).batches(iter([inside])))


@pytest.mark.parametrize("keep", [False, True])
def test_strings(keep):
    """They are objects, and their length says how many rows a model gets at once."""
    sizes = []

    def predict(inputs):
        texts, images = inputs
        sizes.append(len(texts))
        lengths = np.array([[len(text) + len(image)] for text, image in zip(texts[:, 0], images[:, 0], strict=True)])
        return [lengths, texts.shape[1] * lengths]

    strings = scoring_of(features=[["text"], ["image"]], load=lambda data, gpu: predict, keep=keep)
    texts, images = pa.array(["", "z\u00fcrich", None]), pa.array([b"\0", None, b"x"])
    given = [(texts, images), (pa.array(["a" * 10_000] * 99), pa.array([b""] * 99))]
    if not keep:
        with pytest.raises(ValueError, match=r"column 'text' has nulls, first in the row \(text=None, image=b'x'\)"):
            list(strings.batches(iter(given)))
        given[0] = texts.fill_null("!"), images.fill_null(b"")
    first, second = strings.batches(iter(given))
    assert [row["o0"] for row in first.to_pylist()] == ([1, None, None] if keep else [1, 6, 2])
    assert [row["o0"] for row in second.to_pylist()] == [10_000] * 99
    assert sizes == [1 if keep else 3, 32, 32, 32, 3]


def test_the_model_is_loaded_once_for_each_digest():
    for digest in ("one", "one", "two", "one"):
        list(scoring_of(digest=digest).batches(iter([columns((1.0, 2, [3.0]))])))
    assert loads == [(b"model", None)] * 2


def test_few_models_stay_in_memory():
    for digest in ("one", "two", "three", "four", "one"):
        list(scoring_of(digest=digest).batches(iter([])))
    assert len(loads) == 5
    assert len(scoring._loaded) == scoring.MOST_MODELS


def test_the_gpu_is_that_of_the_task():
    list(scoring_of(on_gpu=True).batches(iter([])))
    assert loads == [(b"model", 0)]


def test_a_model_gets_few_rows_at_once():
    sizes = []

    def predict(inputs):
        sizes.append(len(inputs[0]))
        return [inputs[0]]

    inputs = np.arange(10.0)[:, None]
    (output,) = predicted(predict, [inputs], 4)
    np.testing.assert_equal(output, inputs)
    assert sizes == [4, 4, 2]
    sizes.clear()
    predicted(predict, [np.zeros((5000, 32), np.float32)])
    assert sizes == [2048, 2048, 904]
    sizes.clear()
    predicted(predict, [np.zeros((40, 1 << 18), np.float32)])
    assert sizes == [32, 8]


def test_a_model_that_loses_rows():
    with pytest.raises(ValueError, match=r"for 4 rows the model returned an output of shape \(1,\)"):
        predicted(lambda inputs: [inputs[0].sum(0)], [np.ones((10, 1))], 4)


def test_another_number_of_outputs():
    broken = scoring_of(load=lambda data, gpu: lambda inputs: [inputs[0]])
    with pytest.raises(ValueError, match="the model returned 1 outputs, but there are 2 label columns"):
        list(broken.batches(iter([columns((1.0, 2, [3.0]))])))
