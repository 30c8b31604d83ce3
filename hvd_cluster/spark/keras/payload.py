"""Models, optimizers, losses and functions on their way to the workers and back, in the forms that Keras has for them.

A model is a ``.keras`` file, which has its custom classes and functions in a file of its own beside those of Keras.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import tempfile
import threading
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from inspect import ismethod
from types import FunctionType
from typing import Any

import cloudpickle
import keras
import numpy as np
import numpy.typing as npt

from collectives import override
from hvd_cluster.keras.variables import copied, put, settle
from hvd_cluster.spark.estimators.run import unreadable

Array = npt.NDArray[Any]
Custom = Mapping[str, Any]

FILE_NAME = "model.keras"
OWN_FILE = "hvd_cluster/custom_objects.pickle"
LAMBDA = "<lambda>"
ABOUT = "about"
KERAS_OBJECTS = (
    keras.Loss,
    keras.Metric,
    keras.optimizers.Optimizer,
    keras.optimizers.schedules.LearningRateSchedule,
)
MOST_CHARACTERS = 400
REMEDY = (
    "give functions a name instead of a lambda, name custom classes and functions in custom_objects, and let them have "
    "no locks, files, sockets or sessions in them"
)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Takes models as files of Keras, and other objects of Keras by their configurations."""

    def __init__(self, file: io.BytesIO, custom: Custom) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._custom = custom

    @override
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, keras.Model):
            return model_of, (model_bytes(obj, self._custom), obj.compiled)
        if isinstance(obj, KERAS_OBJECTS):
            config = keras.saving.serialize_keras_object(obj)
            return _object_of, (config, {**custom_in(obj, 2), **self._custom})
        return super().reducer_override(obj)


def packed(value: Any, custom: Custom | None = None) -> bytes:
    """``value``, with classes and functions of the main script; ``custom`` has those that Keras finds by name only.

    Raises ValueError where something in it cannot be saved.
    """
    buffer = io.BytesIO()
    try:
        with _quietly():
            _Pickler(buffer, custom or {}).dump(value)
    except Exception as error:
        raise ValueError(
            f"the model, the optimizer or a function of the estimator cannot travel to the workers: {_reason(error)}; "
            f"{REMEDY}"
        ) from error
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    """The argument of :func:`packed`. It runs code, so ``data`` must come from a trusted place. Raises ValueError."""
    try:
        with _quietly():
            return pickle.loads(data)
    except Exception as error:
        raise ValueError(
            f"Keras cannot make the model, or what belongs to it, again: {_reason(error)}; {REMEDY}"
        ) from error


def model_bytes(model: keras.Model, custom: Custom | None = None) -> bytes:
    """A file of Keras, which ``keras.models.load_model`` opens, with the custom classes and functions of ``model``."""
    given, found = dict(custom or {}), _custom_of(model)
    with tempfile.TemporaryDirectory(prefix="hvd-keras-") as folder:
        path = os.path.join(folder, FILE_NAME)
        with _quietly(), _named_lambdas(found), _present_words(model):
            model.save(path)
        if found or given:
            with zipfile.ZipFile(path, "a") as archive:
                archive.writestr(OWN_FILE, cloudpickle.dumps(({**found, **given}, list(given))))
        with open(path, "rb") as file:
            return file.read()


def model_of(data: bytes, compiled: bool = True) -> keras.Model:
    """The model in ``data``, ready for training if it was ``compiled`` and shall be. It runs code in the file."""
    custom, _ = _own_objects(data)
    with tempfile.TemporaryDirectory(prefix="hvd-keras-") as folder:
        path = os.path.join(folder, FILE_NAME)
        with open(path, "wb") as file:
            file.write(data)
        with _quietly():
            return keras.models.load_model(path, custom_objects=custom, compile=compiled, safe_mode=False)


def _own_objects(data: bytes) -> tuple[dict[str, Any], list[str]]:
    """The classes and functions in the file, and which of them the user gave. It runs code in the file."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if OWN_FILE not in archive.namelist():
            return {}, []
        found: tuple[dict[str, Any], list[str]] = pickle.loads(archive.read(OWN_FILE))
        return found


# Held by a thread while Keras writes or reads a file: lambdas have other names then, and warnings are filtered in the
# whole process. Reentrant, because a pickle has files in it. The wait is as long as that.
_saving = threading.RLock()


@contextmanager
def _named_lambdas(custom: Custom) -> Iterator[None]:
    """Inside, the lambdas in ``custom`` have their names there, by which Keras saves them: else without globals."""
    lambdas = {name: value for name, value in custom.items() if getattr(value, "__name__", "") == LAMBDA}
    try:
        for name, value in lambdas.items():
            value.__name__ = name
        yield
    finally:
        for value in lambdas.values():
            value.__name__ = LAMBDA


@contextmanager
def _present_words(model: keras.Model) -> Iterator[None]:
    """Inside, layers that were made with a vocabulary have their present one in the configuration.

    Keras writes the first one, or the path of a file, although ``set_vocabulary`` has replaced it.
    """
    names = ("input_vocabulary", "input_idf_weights")
    layers = [each for each in model._flatten_layers() if getattr(each, names[0], None) is not None]
    earlier = [[getattr(each, name) for name in names] for each in layers]
    try:
        for layer in layers:
            words = layer.get_vocabulary(include_special_tokens=False)
            layer.input_vocabulary = np.asarray(words).tolist()
            if layer.input_idf_weights is not None:
                first = layer._token_start_index()
                layer.input_idf_weights = layer.idf_weights_const.numpy()[first : first + len(words)].tolist()
        yield
    finally:
        for layer, values in zip(layers, earlier, strict=True):
            for name, value in zip(names, values, strict=True):
                setattr(layer, name, value)


def saved_model(group: Mapping[str, Any]) -> bytes:
    """The parameters ``model`` and ``custom_objects`` as a file of Keras; a pickle where there is no model."""
    return model_bytes(group["model"], group.get("custom_objects")) if "model" in group else packed(group)


def loaded_model(data: bytes) -> dict[str, Any]:
    """The parameters in what :func:`saved_model` made. It runs code in the file."""
    if not zipfile.is_zipfile(io.BytesIO(data)):
        found: dict[str, Any] = unpacked(data)
        return found
    custom, given = _own_objects(data)
    found = {name: custom[name] for name in given}
    return {"model": model_of(data), **({"custom_objects": found} if found else {})}


def without_optimizer(model: keras.Model, custom: Custom | None = None) -> keras.Model:
    """``model``, or a copy that is not compiled, whose file is smaller; ``custom`` is as for :func:`model_bytes`."""
    if getattr(model, "optimizer", None) is None and not model.compiled:
        return model
    return model_of(model_bytes(model, custom), compiled=False)


def content_of(model: keras.Model) -> str:
    """The configurations and the words of the layers of ``model``; weights are not in it."""
    found = []
    with _quietly():
        for layer in model._flatten_layers():
            with suppress(Exception):  # then it cannot be saved, and that error says why
                found.append(repr(layer.get_config()))
            if hasattr(layer, "get_vocabulary"):
                found.append(repr(layer.get_vocabulary()))
    return "\n".join(found)


def _object_of(config: Mapping[str, Any], custom: Custom) -> Any:
    return keras.saving.deserialize_keras_object(config, custom_objects=dict(custom), safe_mode=False)


def _custom_of(model: keras.Model) -> dict[str, Any]:
    """The classes and functions in ``model``, its layers and what belongs to its training that are none of Keras."""
    config = getattr(getattr(model, "_compile_config", None), "config", {})
    layers = model._flatten_layers(include_self=False)
    return custom_in([config, model, *layers], 4)


def custom_in(value: Any, depth: int) -> dict[str, Any]:
    """The classes and functions in ``value``, down to ``depth``, that are none of Keras; lambdas get a name.

    Raises ValueError where two have the same name.
    """
    found: dict[str, Any] = {}
    lambdas: dict[int, Any] = {}
    for each in _inside(value, depth):
        if getattr(each, "__name__", "") == LAMBDA:
            lambdas[id(each)] = each
        elif str(each.__module__).partition(".")[0] != "keras":
            name = keras.saving.get_registered_name(each)
            if not _is_same(found.setdefault(name, each), each):
                raise ValueError(
                    f"two functions or classes have the name {name!r}, by which Keras finds only one of them again; "
                    "give them distinct names"
                )
    return found | {f"lambda_{number}": each for number, each in enumerate(lambdas.values())}


def _is_same(one: Any, other: Any) -> bool:
    """Whether a file may have one of the two for both. A function that has travelled twice is two objects."""
    if one is other or not (isinstance(one, FunctionType) and isinstance(other, FunctionType)):
        return one is other
    if (one.__module__, one.__code__) != (other.__module__, other.__code__):
        return False
    pairs = zip(_bound_in(one), _bound_in(other), strict=True)
    return all(_is_same(*pair) or _is_equal(*pair) for pair in pairs)


def _bound_in(function: FunctionType) -> list[Any]:
    """The values in the closure of ``function``, and its defaults."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return [*cells, function.__defaults__, function.__kwdefaults__]


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, FunctionType):
        return False
    return type(one) is type(other) and bool(cloudpickle.dumps(one) == cloudpickle.dumps(other))


def _inside(value: Any, depth: int) -> Iterator[Any]:
    """All functions, and the classes of all objects with a configuration."""
    inside: Iterable[Any] = ()
    if isinstance(value, FunctionType):
        if not ismethod(getattr(value, "__wrapped__", None)):  # of a layer, which Keras wraps
            yield value
    elif isinstance(value, list | tuple | Mapping):
        inside = value.values() if isinstance(value, Mapping) else value
    elif hasattr(value, "get_config") and not isinstance(value, type):
        yield value.__class__
        inside = getattr(value, "__dict__", {}).values()
    for each in inside if depth else ():
        yield from _inside(each, depth - 1)


def _reason(error: BaseException) -> str:
    """The first cause of ``error``: what Keras says of the later ones has whole configurations in it."""
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__ or error
    text = str(error)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."


def named(function: Any, name: str) -> Any:
    """``function``, or a copy of a lambda under a ``name``, by which Keras can save and show it."""
    if getattr(function, "__name__", "") != LAMBDA:
        return function

    def call(*arguments: Any) -> Any:
        return function(*arguments)

    call.__name__ = call.__qualname__ = name
    return call


@contextmanager
def _quietly() -> Iterator[None]:
    """Inside, Keras does not warn of lambdas and optimizers, which travel in another way."""
    with _saving, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def arrays_of(model: keras.Model) -> dict[str, list[Array]]:
    """Copies of the weights and of the variables of the optimizer."""
    settle(model)
    return {"model": [copied(each) for each in model.weights], "optimizer": [copied(each) for each in _state(model)]}


def put_arrays(model: keras.Model, arrays: Mapping[str, Sequence[Array]]) -> None:
    """Give weights and optimizer of ``model`` the values of ``arrays``. Raises ValueError where they do not fit."""
    for variables, name in ((model.weights, "model"), (_state(model), "optimizer")):
        values = arrays[name]
        if [tuple(each.shape) for each in variables] != [tuple(each.shape) for each in values]:
            raise ValueError(
                f"there are {len(values)} arrays for the {name}, which do not fit its {len(variables)} variables"
            )
        for variable, value in zip(variables, values, strict=True):
            put(variable, value)


def _state(model: keras.Model) -> list[Any]:
    return list(getattr(model.optimizer, "variables", ()))


def checkpoint_bytes(arrays: Mapping[str, Sequence[Array]], about: Mapping[str, Any]) -> bytes:
    """A checkpoint, which ``numpy.load`` opens: arrays, and ``about`` as JSON."""
    forms = {name: [[str(each.dtype), list(each.shape)] for each in group] for name, group in arrays.items()}
    raw: dict[str, Any] = {
        f"{name}.{number}": np.frombuffer(each.tobytes(), np.uint8)
        for name, group in arrays.items()
        for number, each in enumerate(group)
    }
    text = json.dumps({"forms": forms, **about}).encode()
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **{ABOUT: np.frombuffer(text, np.uint8)}, **raw)
    return buffer.getvalue()


def checkpoint_of(data: bytes) -> tuple[dict[str, list[Array]], dict[str, Any]]:
    """The checkpoint in ``data``; runs no code. Raises ValueError where a KerasEstimator did not write it."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as found:
            about = json.loads(found[ABOUT].tobytes())
            arrays = {
                name: [
                    np.frombuffer(found[f"{name}.{number}"].tobytes(), np.dtype(dtype)).reshape(shape)
                    for number, (dtype, shape) in enumerate(forms)
                ]
                for name, forms in about.pop("forms").items()
            }
    except Exception as error:
        raise unreadable("KerasEstimator", error) from error
    return arrays, about
