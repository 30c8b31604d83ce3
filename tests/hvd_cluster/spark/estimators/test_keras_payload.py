"""Models, optimizers, functions and states of Keras on their way, without a cluster, on the backend of this process."""

import io
import threading
import warnings
import zipfile
from importlib.util import find_spec

import numpy as np
import pytest

if find_spec("keras") is None:
    pytest.skip("Keras is not installed", allow_module_level=True)

import keras
from keras_models import X, custom_model, inverted, predicted, trained

from hvd_cluster.spark.keras.payload import (
    arrays_of,
    checkpoint_bytes,
    checkpoint_of,
    loaded_model,
    model_bytes,
    model_of,
    named,
    packed,
    put_arrays,
    saved_model,
    unpacked,
    without_optimizer,
)

pytestmark = [
    pytest.mark.leaves("environment", "threads", "descriptors"),  # of TensorFlow
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # of Keras with NumPy 2
]


def test_a_model_travels_with_what_is_its_own():
    model = custom_model()
    found = unpacked(packed({"model": model, "again": model}))
    np.testing.assert_allclose(predicted(found["model"]), predicted(model), rtol=1e-6)
    assert model.layers[2].function.__name__ == "<lambda>"
    again = unpacked(packed(found["model"]))
    np.testing.assert_allclose(predicted(again), predicted(model), rtol=1e-6)


def scaling(factor):
    def act(inputs):
        return factor * inputs

    return act


def with_activations(*functions):
    return keras.Sequential([keras.Input((2,)), *map(keras.layers.Activation, functions)])


def test_two_functions_or_classes_with_one_name():
    with pytest.raises(ValueError, match=r"two functions or classes have the name '(Custom>)?act'.*distinct names"):
        packed(with_activations(scaling(2), scaling(3)))
    model = with_activations(scaling(2))
    model.compile("sgd", loss=scaling(3))
    with pytest.raises(ValueError, match="have the name"):
        model_bytes(model)
    one = scaling(np.arange(2.0))
    both = with_activations(one, one)
    both.layers[1].activation = unpacked(packed(one))  # another object, which does the same
    np.testing.assert_allclose(predicted(unpacked(packed(both))), X * [0, 1])


def custom_layer(factor):
    class Layer(keras.layers.Layer):
        def build(self, shape):
            self.weight = self.add_weight(shape=(), initializer="ones")

        def call(self, inputs):
            return factor * inputs

    return Layer()


def test_two_classes_with_one_name():
    class Other(type(custom_layer(4))):
        pass

    fine = keras.Sequential([keras.Input((2,)), custom_layer(2), Other()])
    np.testing.assert_allclose(predicted(unpacked(packed(fine))), 8 * X)
    with pytest.raises(ValueError, match=r"have the name '(Custom>)?Layer'"):
        packed(keras.Sequential([keras.Input((2,)), custom_layer(2), custom_layer(3)]))


def test_what_belongs_to_a_training_travels_by_its_configuration():
    class Twice(keras.Loss):
        def call(self, y_true, y_pred):
            return keras.ops.mean(2 * (y_true - y_pred) ** 2, axis=-1)

    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.5)
    value = Twice(), {"a": [keras.metrics.AUC(num_thresholds=7), inverted]}, keras.optimizers.SGD(schedule, 0.9)
    loss, metrics, optimizer = unpacked(packed(value))
    assert float(loss(np.ones((2, 1)), np.zeros((2, 1)))) == 2
    assert metrics["a"][0].num_thresholds == 7
    assert metrics["a"][1](3) == -3
    assert float(optimizer.learning_rate) == 0.5
    assert optimizer.momentum == 0.9


def test_the_file_is_one_of_keras(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    data = model_bytes(model)
    assert zipfile.ZipFile(io.BytesIO(data)).namelist().count("config.json") == 1
    (tmp_path / "model.keras").write_bytes(data)
    np.testing.assert_allclose(predicted(keras.models.load_model(tmp_path / "model.keras")), predicted(model))


def test_custom_objects_of_the_user():
    class Rare(keras.layers.Layer):
        def __init__(self, kind, **options):
            super().__init__(**options)
            self.kind = kind

        def get_config(self):
            return {**super().get_config(), "kind": "of " + type(self.kind).__name__}

        @classmethod
        def from_config(cls, config):
            kind = keras.saving.get_registered_object(config.pop("kind"), None) or dict
            return cls(kind(), **config)

    model = keras.Sequential([keras.Input((2,)), Rare({})])
    found = loaded_model(saved_model({"model": model, "custom_objects": {"of dict": dict, "other": inverted}}))
    assert set(found["custom_objects"]) == {"of dict", "other"}
    assert found["custom_objects"]["other"](2) == -2
    assert found["model"].layers[0].kind == {}
    assert loaded_model(saved_model({"custom_objects": {"a": 1}})) == {"custom_objects": {"a": 1}}


def test_something_that_cannot_travel():
    with pytest.raises(ValueError, match=r"cannot travel to the workers: .*lock.*; give functions a name"):
        packed({"loss": threading.Lock()})


def test_a_lambda_gets_a_name():
    function = named(lambda y_true, y_pred: y_true - y_pred, "loss")
    assert (function.__name__, function(3, 1)) == ("loss", 2)
    assert named(inverted, "loss") is inverted
    assert named("mse", "loss") == "mse"


def test_states_of_a_training():
    model, other = trained(), trained(rate=0.1, steps=2)
    arrays = arrays_of(model)
    read, about = checkpoint_of(checkpoint_bytes(arrays, {"history": [{"epoch": 0}]}))
    assert about == {"history": [{"epoch": 0}]}
    put_arrays(other, read)
    assert float(other.optimizer.learning_rate) == 0.5
    assert int(other.optimizer.iterations) == 1
    np.testing.assert_array_equal(predicted(other), predicted(model))
    with pytest.raises(ValueError, match="there are 1 arrays for the model, which do not fit its 2 variables"):
        put_arrays(other, {**read, "model": read["model"][:1]})
    with pytest.raises(
        ValueError, match=r"is damaged, or was not written by a KerasEstimator: .*; remove it, or give another run_id"
    ):
        checkpoint_of(b"rubbish")


def test_a_checkpoint_with_numbers_that_numpy_does_not_know():
    bfloats = np.asarray([1.5, 2.0]).astype(np.dtype("bfloat16"))
    read, _ = checkpoint_of(checkpoint_bytes({"model": [bfloats]}, {}))
    assert read["model"][0].dtype == bfloats.dtype
    assert read["model"][0].tolist() == [1.5, 2.0]


def test_a_model_without_its_optimizer():
    model = trained()
    found = without_optimizer(model)
    assert found is not model
    assert len(model_bytes(found)) < len(model_bytes(model))
    assert without_optimizer(found) is found
    assert int(model_of(model_bytes(model)).optimizer.iterations) == 1


# Batches.


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="the layers are of TensorFlow")
def test_a_model_travels_with_its_present_words(tmp_path):
    """Not with those that its layers were made with, or with the path of a file, which only the driver has."""
    (tmp_path / "words.txt").write_text("one\ntwo")
    kinds = keras.layers
    given = [
        (kinds.TextVectorization(vocabulary=["one", "two"], output_sequence_length=1), "string", ["a", "b", "c"]),
        (kinds.StringLookup(vocabulary=str(tmp_path / "words.txt")), "string", ["a"]),
        (kinds.IntegerLookup(vocabulary=[1, 2]), "int64", [5, 6, 7]),
        (kinds.StringLookup(vocabulary=["1", "2"], idf_weights=[1, 2], output_mode="tf_idf"), "string", ["a", "b"]),
    ]
    for layer, dtype, words in given:
        weights = {"idf_weights": [2.0, 3.0]} if getattr(layer, "output_mode", "") == "tf_idf" else {}
        layer.set_vocabulary(words, **weights)
        before = layer.get_config()
        net = keras.Sequential([keras.Input((1,), dtype=dtype), layer])
        found = model_of(model_bytes(net)).layers[-1]
        assert found.get_vocabulary(include_special_tokens=False) == words
        assert layer.get_config() == before
        if weights:
            tensor = keras.ops.convert_to_tensor([["a"], ["b"], ["c"]], dtype="string")
            np.testing.assert_allclose(found(tensor), layer(tensor))


def test_two_threads_leave_the_filters_of_warnings_as_they_were():
    """As two fits do that a search starts."""
    from hvd_cluster.spark.keras.payload import _quietly

    before, inside, left = list(warnings.filters), threading.Event(), threading.Event()

    def other():
        with _quietly():
            inside.set()
            left.wait(10)

    with _quietly():
        thread = threading.Thread(target=other)
        thread.start()
        inside.wait(0.5)  # it comes in only where nothing keeps it out
    left.set()
    thread.join()
    assert list(warnings.filters) == before
