"""The rows of a rank in TensorFlow: as tensors, and as a dataset for graphs and Keras."""

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
)
from row_feeds import batch, rows_of, shard_of

from tests.doc_blocks import blocks, execute

SCHEMA = {"x": FloatType(), "y": DoubleType(), "id": LongType()}
TYPES = {
    "bool": BooleanType(),
    "int8": ByteType(),
    "int16": ShortType(),
    "int32": IntegerType(),
    "int64": LongType(),
    "float32": FloatType(),
    "float64": DoubleType(),
}
STRINGS = {"text": StringType(), "image": BinaryType(), "id": LongType()}
BATCH_SIZES = [1, 4, 32, 64]


@pytest.fixture(scope="module", autouse=True)
def tf():
    """Before the first look for leftovers, because its import sets variables and starts threads."""
    return pytest.importorskip("tensorflow")


def numbered(rows):
    ids = np.arange(rows)
    return [batch(x=ids.astype(np.float32), y=ids * 2.0, id=ids)]


def values(batches):
    return [[np.asarray(array).tolist() for array in arrays] for arrays in batches]


def in_numpy(folder, epochs, rows, *columns, **options):
    """The values that each of the epochs of an equal shard has in NumPy."""
    with shard_of(rows_of(SCHEMA, *columns, **options), folder, numbered(rows)) as shard:
        return [values(shard) for _ in range(epochs)]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_tensors_are_the_arrays(tf, tmp_path, shuffle, batch_size):
    options = {"batch_size": batch_size, "shuffle": shuffle}
    with shard_of(rows_of(SCHEMA, "id", **options), tmp_path, numbered(100)) as shard:
        epochs = [list(shard.tensorflow()) for _ in range(2)]
    assert all(isinstance(tensor, tf.Tensor) for epoch in epochs for pair in epoch for tensor in pair)
    assert [values(epoch) for epoch in epochs] == in_numpy(tmp_path, 2, 100, "id", **options)


@pytest.mark.parametrize("name", TYPES)
def test_tensors_of_all_types(tf, tmp_path, name):
    column = np.arange(40).astype(name)
    rows = rows_of({"x": TYPES[name], "id": LongType()}, "id", batch_size=16)
    with shard_of(rows, tmp_path, [batch(x=column, id=np.arange(40))]) as shard:
        for epoch in (list(shard.tensorflow()), list(shard.tf_data())):
            assert {features.dtype for features, _ in epoch} == {tf.as_dtype(name)}
            assert np.concatenate([features.numpy() for features, _ in epoch])[:, 0].tolist() == column.tolist()


def test_tensors_share_the_memory_of_a_window(tf, tmp_path):
    """Neighbours of a window are neighbours in memory; a copy of each would be anywhere."""
    with shard_of(rows_of(SCHEMA, "id", batch_size=64, shuffle=True), tmp_path, numbered(192)) as shard:
        addresses = [labels._numpy().ctypes.data for _, labels in shard.tensorflow()]
    assert np.diff(addresses).tolist() == [64 * 8] * 2


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_an_iteration_of_a_dataset_is_an_epoch(tf, tmp_path, shuffle, batch_size):
    options = {"batch_size": batch_size, "shuffle": shuffle}
    with shard_of(rows_of(SCHEMA, "id", **options), tmp_path, numbered(100)) as shard:
        dataset = shard.tf_data()
        assert len(dataset) == len(shard)
        epochs = [values(dataset) for _ in range(3)]
    assert epochs == in_numpy(tmp_path, 3, 100, "id", **options)
    assert (epochs[1] == epochs[2]) is not shuffle


def test_shapes_are_known(tf, tmp_path):
    schema = {"a": FloatType(), "b": ArrayType(FloatType()), "c": LongType(), "id": LongType(), "w": DoubleType()}
    rows = rows_of(schema, "id", [["a", "b"], "c"], sample_weight_col="w")
    ids = np.arange(6)
    wide = pa.array([[i, i] for i in ids], pa.list_(pa.float32()))
    with shard_of(rows, tmp_path, [batch(a=np.float32(ids), b=wide, c=ids, id=ids, w=ids * 1.0)]) as shard:
        dataset = shard.tf_data()
        assert dataset.element_spec == (
            (tf.TensorSpec([None, 3], tf.float32), tf.TensorSpec([None], tf.int64)),
            tf.TensorSpec([None], tf.int64),
            tf.TensorSpec([None], tf.float64),
        )
        (features, single), labels, weights = next(iter(dataset))
    assert features.numpy().tolist() == [[i, i, i] for i in range(4)]
    assert single.numpy().tolist() == labels.numpy().tolist() == weights.numpy().tolist() == [0, 1, 2, 3]


def test_a_dataset_without_rows(tf, tmp_path):
    with shard_of(rows_of(SCHEMA, "id"), tmp_path, []) as shard:
        dataset = shard.tf_data()
        assert list(dataset) == []
        assert dataset.element_spec == (tf.TensorSpec([None, None], tf.float64), tf.TensorSpec([None], tf.int64))


def test_a_dataset_of_validation_rows(tf, tmp_path):
    with shard_of(rows_of(SCHEMA, "id", validation=0.25), tmp_path, numbered(100)) as shard:
        parts = [
            [number for _, labels in each.tf_data() for number in labels.numpy().tolist()]
            for each in (shard, shard.validation)
        ]
    assert sorted(parts[0] + parts[1]) == list(range(100))
    assert 0 < len(parts[1]) < 50


def test_the_end_of_an_epoch_does_not_wait_for_the_thread_that_tunes(tf, tmp_path):
    with shard_of(rows_of(SCHEMA, "id"), tmp_path, numbered(10)) as shard:
        assert not shard.tf_data().options().autotune.enabled


def test_a_dataset_in_a_graph(tf, tmp_path):
    with shard_of(rows_of(SCHEMA, "id", shuffle=True), tmp_path, numbered(50)) as shard:
        dataset = shard.tf_data()

        @tf.function
        def total():
            result = tf.constant(0, tf.int64)
            for _, labels in dataset:
                result += tf.reduce_sum(labels)
            return result

        assert [int(total()) for _ in range(2)] == [sum(range(50))] * 2


@pytest.mark.parametrize("shuffle", [False, True])
def test_strings(tf, tmp_path, shuffle):
    rows = rows_of(STRINGS, "id", [["text"], "image"], batch_size=4, shuffle=shuffle)
    texts, images = [f"z\u00fcrich {row}" * row for row in range(9)], [bytes([0, row, 0]) for row in range(9)]
    with shard_of(rows, tmp_path, [batch(text=texts, image=images, id=np.arange(9))]) as shard:
        dataset = shard.tf_data()
        specs = tf.TensorSpec([None, 1], tf.string), tf.TensorSpec([None], tf.string)
        assert dataset.element_spec == (specs, tf.TensorSpec([None], tf.int64))
        for source in (dataset, shard.tensorflow()):
            found = [(*features, labels) for features, labels in source]
            columns = [np.concatenate([each.numpy() for each in column]) for column in zip(*found, strict=True)]
            ids = columns[2].tolist()
            assert sorted(ids) == list(range(9))
            assert columns[0].tolist() == [[texts[row].encode()] for row in ids]
            assert columns[1].tolist() == [images[row] for row in ids]
    with shard_of(rows, tmp_path, []) as shard:
        assert list(shard.tf_data()) == []
        assert shard.tf_data().element_spec[0][1] == tf.TensorSpec([None], tf.string)


@pytest.mark.leaves("threads")  # of Keras
def test_keras_trains_on_strings(tf, tmp_path):
    """A layer inside of the model makes words of them."""
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "tensorflow":
        pytest.skip("other backends have no strings")
    texts = ["good word", "bad word"] * 50
    rows = rows_of({"text": StringType(), "y": FloatType()}, "y", ["text"], batch_size=16, shuffle=True)
    with shard_of(rows, tmp_path, [batch(text=texts, y=np.float32([1, 0] * 50))]) as shard:
        words = keras.layers.TextVectorization(output_sequence_length=2, vocabulary=["good", "bad", "word"])
        layers = [words, keras.layers.Embedding(5, 2), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((1,), dtype="string"), *layers])
        model.compile(keras.optimizers.Adam(0.1), "mse")
        history = model.fit(shard.tf_data(), epochs=10, shuffle=False, verbose=0).history
    assert history["loss"][-1] < 0.1 * history["loss"][0]


@pytest.mark.leaves("threads")  # of Keras
def test_keras_trains_on_a_dataset(tf, tmp_path):
    keras = pytest.importorskip("keras")
    rows = rows_of({"x": FloatType(), "y": FloatType()}, "y", batch_size=16, shuffle=True, validation=0.2)
    x = np.linspace(-1, 1, 200, dtype=np.float32)
    with shard_of(rows, tmp_path, [batch(x=x, y=3 * x + 1)]) as shard:
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.3), "mse")
        validation = shard.validation.tf_data()
        fit = model.fit(shard.tf_data(), validation_data=validation, epochs=15, shuffle=False, verbose=0)
    history = fit.history
    assert history["loss"][-1] < 0.01 * history["loss"][0]
    assert history["val_loss"][-1] < 0.01


@pytest.mark.leaves("threads")  # of Keras
@pytest.mark.parametrize("block", blocks("keras"), ids=lambda block: block.name)
def test_a_block_of_the_docs(tf, tmp_path, block):
    pytest.importorskip("keras")
    with shard_of(rows_of(SCHEMA, "id"), tmp_path, numbered(20)) as shard:
        assert execute(block, shard=shard)["model"].built
