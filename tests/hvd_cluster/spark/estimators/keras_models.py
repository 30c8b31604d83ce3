"""Models of Keras for tests in one process."""

import keras
import numpy as np

X = np.array([[1.0, -2.0], [3.0, 4.0]], "float32")


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


def predicted(model):
    return np.asarray(model.predict_on_batch(X))


def trained(rate=0.5, steps=1):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(rate), "mse")
    for _ in range(steps):
        model.train_on_batch(X, X[:, :1])
    return model
