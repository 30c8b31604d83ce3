"""Batches for models of Keras, and KerasModel, without a cluster, on the backend of this process."""

import os
import sys
from importlib.util import find_spec

import numpy as np
import pytest

if find_spec("keras") is None:
    pytest.skip("Keras is not installed", allow_module_level=True)

import keras
from keras_models import X, custom_model, inverted, predicted, trained

from hvd_cluster.spark.estimators.columns import FitColumns
from hvd_cluster.spark.estimators.scoring import LateLoader
from hvd_cluster.spark.keras import KerasModel
from hvd_cluster.spark.keras.devices import floats_of
from hvd_cluster.spark.keras.layout import KerasLayout
from hvd_cluster.spark.keras.model import load_predict
from hvd_cluster.spark.keras.training import EpochSteps

pytestmark = [
    pytest.mark.leaves("environment", "threads", "descriptors"),  # of TensorFlow
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # of Keras with NumPy 2
]


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
    assert model.setOutputCols(["p"]).getOutputCols() == model.setOutputCols("p").getOutputCols() == ["p"]
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
