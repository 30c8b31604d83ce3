"""Models of Keras on their way, batches for them, and KerasModel, without a cluster, on the backend of this process."""

import io
import os
import sys
import threading
import warnings
import zipfile
from importlib.util import find_spec

import numpy as np
import pytest

if find_spec("keras") is None:
    pytest.skip("Keras is not installed", allow_module_level=True)

import keras

from hvd_cluster.spark.estimators.columns import FitColumns
from hvd_cluster.spark.estimators.scoring import LateLoader
from hvd_cluster.spark.keras import KerasModel
from hvd_cluster.spark.keras.devices import floats_of
from hvd_cluster.spark.keras.layout import KerasLayout
from hvd_cluster.spark.keras.model import load_predict
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
from hvd_cluster.spark.keras.training import EpochSteps

pytestmark = [
    pytest.mark.leaves("environment", "threads", "descriptors"),  # of TensorFlow
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # of Keras with NumPy 2
]


def inverted(inputs):
    return -inputs


def custom_model():
    """A custom layer that no module has, a function, lambdas with globals, one of them twice."""

    class Tripled(keras.layers.Layer):
        def call(self, inputs):
            return inputs * 3

    half = keras.layers.Lambda(lambda inputs: np.float32(0.5) * inputs)
    layers = [
        Tripled(),
        keras.layers.Activation(inverted),
        half,
        keras.layers.Activation(lambda x: keras.ops.abs(x * 2)),
    ]
    return keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(1)])


X = np.array([[1.0, -2.0], [3.0, 4.0]], "float32")


def predicted(model):
    return np.asarray(model.predict_on_batch(X))


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


def trained(rate=0.5, steps=1):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(rate), "mse")
    for _ in range(steps):
        model.train_on_batch(X, X[:, :1])
    return model


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
    with pytest.raises(ValueError, match="the checkpoint of the run was not written by a KerasEstimator"):
        checkpoint_of(b"rubbish")


def test_a_checkpoint_with_numbers_that_numpy_does_not_know():
    bfloats = np.asarray([1.5, 2.0]).astype(np.dtype("bfloat16"))
    read, _ = checkpoint_of(checkpoint_bytes({"model": [bfloats]}, {}))
    assert read["model"][0].dtype == bfloats.dtype
    assert read["model"][0].tolist() == [1.5, 2.0]


def test_a_compiled_model_with_layers_that_the_user_names():
    class Inner(keras.layers.Layer):
        def call(self, inputs):
            return 2 * inputs

    class Outer(keras.layers.Layer):
        def __init__(self, inner=None, **options):
            super().__init__(**options)
            self.inner = Inner() if inner is None else keras.saving.deserialize_keras_object(inner)

        def call(self, inputs):
            return self.inner(inputs)

        def get_config(self):
            return {**super().get_config(), "inner": hidden(Inner, self.inner)}

    def hidden(kind, layer):
        return {"class_name": "Named", "registered_name": "Named", "module": "none", "config": layer.get_config()}

    model = keras.Sequential([keras.Input((2,)), Outer()])
    model.compile("sgd", "mse")
    predict = load_predict(model_with(model, custom_objects={"Named": Inner})._payload(), None)
    np.testing.assert_allclose(predict([X])[0], 2 * X)


def test_a_model_without_its_optimizer():
    model = trained()
    found = without_optimizer(model)
    assert found is not model
    assert len(model_bytes(found)) < len(model_bytes(model))
    assert without_optimizer(found) is found
    assert int(model_of(model_bytes(model)).optimizer.iterations) == 1


# Batches.


def images():
    return keras.Sequential([keras.Input((2, 2, 1)), keras.layers.Flatten(), keras.layers.Dense(3)])


def batch_of(model, rows, columns=None, weighted=False, **options):
    return KerasLayout.of(model, columns or FitColumns(["x"], ["y"]), **options).batch(rows, weighted)


def test_shapes_and_dtypes_of_the_model():
    rows = [np.arange(8.0).reshape(2, 4)], [np.array([[2], [0]])]
    x, y, weights = batch_of(images(), rows, weighted=True)
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((2, 2, 2, 1), np.float32, (2, 1), np.int64)
    assert (weights.tolist(), weights.dtype) == ([1, 1], np.float32)
    _, y = batch_of(images(), [rows[0], [np.arange(6).reshape(2, 3)]])
    assert (y.shape, y.dtype) == ((2, 3), np.float32)
    _, y = batch_of(images(), [rows[0], [np.array([[True], [False]])]])
    assert y.dtype == np.int32
    _, y = batch_of(images(), [rows[0], [np.arange(12.0).reshape(2, 6)]], label_shapes=[[3, 2]])
    assert (y.shape, y.dtype) == ((2, 3, 2), np.float32)
    with pytest.raises(ValueError, match=r"for 'x' has the shape \[2, 2, 1\] in a row, but a row has 3 elements"):
        batch_of(images(), [[np.ones((2, 3))], rows[1]])


def test_a_transformation():
    rows = [np.ones((2, 4))], [np.ones((2, 1))], np.array([[1.0], [2.0]])
    columns = FitColumns(["x"], ["y"], "w")
    x, _, weights = batch_of(
        images(), rows, columns, weighted=True, transformation=lambda batch: {**batch, "x": batch["x"] * 2}
    )
    assert (x.max(), weights.tolist()) == (2, [1, 2])
    with pytest.raises(ValueError, match=r"transformation_fn returned no array of NumPy for 'y'"):
        batch_of(images(), rows, columns, transformation=lambda batch: {"x": batch["x"]})


def test_steps_of_an_epoch():
    steps = EpochSteps.of([0, 23, 8], 1, 4, None, 1)
    assert (steps.own, steps.all, steps.leader, steps.uneven) == (6, 6, 1, True)
    assert [steps.rows_after(count) for count in (0, 1, 5, 6, 7)] == [0, 4, 20, 23, 23]
    assert not EpochSteps.of([8, 7], 0, 4, None, 2).uneven
    assert EpochSteps.of([8, 20], 0, 4, 3, 2).all == 4
    with pytest.raises(ValueError, match="there are no rows to train with"):
        EpochSteps.of([0, 0], 0, 4, None, 1)


# KerasModel.


def model_with(net=None, **options):
    return KerasModel(
        **{
            "model": net or keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]),
            "feature_columns": [["a", "b"]],
            "label_columns": ["y"],
            **options,
        }
    )


def test_accessors():
    history = [{"epoch": 0, "train": {"loss": 1.0}}]
    model = model_with(history=history, run_id="r", custom_objects={"f": inverted})
    assert model.getHistory() == model.get_history() == history
    assert (model.getRunId(), model.getFeatureColumns(), model.getLabelColumns()) == ("r", [["a", "b"]], ["y"])
    assert model.setCustomObjects(None) is model
    assert model.getCustomObjects() == {}
    assert model.setOutputCols(["p"]).getOutputCols() == ["p"]
    copied = model.copy({model.model: None, model.output_cols: ["q"]})
    assert copied.getModel() is model.getModel()
    with pytest.raises(TypeError, match="unexpected keyword argument 'modle'"):
        KerasModel(modle=None)


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="the layer is one of TensorFlow")
def test_the_bytes_of_a_model_change_with_its_words_and_settings():
    words = keras.layers.TextVectorization(output_sequence_length=1)
    words.set_vocabulary(["one", "two"])
    dropout = keras.layers.Dropout(0.5)
    model = model_with(keras.Sequential([keras.Input((1,), dtype="string"), words, dropout]), feature_columns=["x"])
    first = model._payload()
    assert model._payload() is first
    words.set_vocabulary(["two", "one"])
    second = model._payload()
    assert second != first
    assert model._payload() is second
    dropout.rate = 0.25
    assert model._payload() is not second


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


def test_the_bytes_of_a_model_change_with_its_weights_only():
    model = model_with(trained())
    first = model._payload()
    assert model._payload() is first
    model.getModel().train_on_batch(X, X[:, :1])
    assert model._payload() != first


def test_scores():
    net = custom_model()
    predict = load_predict(model_with(net)._payload(), None)
    np.testing.assert_allclose(predict([X])[0], predicted(net), rtol=1e-6)
    np.testing.assert_allclose(predict([np.tile(X, (40, 1))])[0], np.tile(predicted(net), (40, 1)), rtol=1e-5)


class Own(keras.Model):
    """Makes its layer itself, with the dtype of floats of Keras."""

    def __init__(self, **options):
        super().__init__(**options)
        self.layer = keras.layers.Dense(1)

    def call(self, inputs):
        return self.layer(inputs)


def test_scores_with_the_dtype_of_floats_of_the_fit():
    with floats_of(("float64", "float64")):
        net = Own()
        net(X)
    predict = load_predict(model_with(net, _floatx="float64")._payload(), None)
    near, exact = (predict([np.array([[first, 0.0]])])[0] for first in (1 + 1e-12, 1.0))
    assert near != exact
    assert keras.config.floatx() == "float32"


def test_outputs_by_name():
    class Named(keras.Model):
        def call(self, inputs):
            return {"z": inputs * 2, "y": inputs + 1}

    predict = load_predict(model_with(Named(), label_columns=["y", "z"])._payload(), None)
    first, second = predict([X])
    np.testing.assert_allclose([first, second], [X + 1, X * 2])
    wrong = load_predict(model_with(Named(), label_columns=["y", "q"])._payload(), None)
    with pytest.raises(ValueError, match=r"the names \['y', 'z'\], but the label columns are \['y', 'q'\]"):
        wrong([X])


def test_columns_that_do_not_fit_the_model():
    with pytest.raises(ValueError, match="feature_cols has 2 entries"):
        model_with(feature_columns=["a", "b"])._payload()


def test_the_module_of_a_framework_is_imported_with_its_variables(tmp_path, monkeypatch):
    (tmp_path / "late_module.py").write_text("import os\nseen = os.environ['LATE']\nload = lambda *_: seen\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("LATE", "before")
    assert LateLoader("late_module.load", (("LATE", "then"),))(b"", None) == "then"
    assert LateLoader("late_module.load", (("LATE", "later"),))(b"", None) == "then"
    assert os.environ["LATE"] == "then"
    del sys.modules["late_module"]


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
