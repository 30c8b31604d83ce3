"""The framework below Keras in a worker: which one it is, and the device that it uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import keras

BACKENDS = ("tensorflow", "torch", "jax")
VARIABLE = "KERAS_BACKEND"
CPU = "cpu"  # with a number, Keras on torch copies each variable that it reads


def chosen_backend() -> str:
    """The backend of this process, which workers use, too. Raises ValueError for one that is not supported."""
    name: str = keras.backend.backend()
    if name not in BACKENDS:
        raise ValueError(
            f"Keras runs on {name!r} in the driver, but must run on one of {', '.join(BACKENDS)}; set {VARIABLE} "
            "before keras is imported"
        )
    return name


def require_backend(name: str) -> None:
    """Raise RuntimeError unless Keras runs on ``name`` in this process."""
    found = keras.backend.backend()
    if found != name:
        raise RuntimeError(
            f"Keras runs on {found!r} in this worker, but on {name!r} in the driver, because it was imported before "
            f"hvd-cluster could choose; set spark.executorEnv.{VARIABLE}={name}"
        )


Floats = tuple[str, str]
"""The dtype of floats of Keras, and the name of the policy by which its layers choose dtypes."""


def chosen_floats(floatx: str | None = None) -> Floats:
    """Those of this process. A ``floatx`` that is another one says both."""
    own = keras.config.floatx()
    return (own, str(keras.config.dtype_policy().name)) if floatx in (None, own) else (floatx, floatx)


@contextmanager
def floats_of(floats: Floats) -> Iterator[None]:
    """Inside, Keras has these ``floats``."""
    earlier = keras.config.floatx(), keras.config.dtype_policy()
    try:
        keras.config.set_floatx(floats[0])
        keras.config.set_dtype_policy(floats[1])
        yield
    finally:
        keras.config.set_floatx(earlier[0])
        keras.config.set_dtype_policy(earlier[1])


def gpu_count() -> int:
    """The number of GPUs that the backend finds."""
    backend = keras.backend.backend()
    if backend == "torch":
        import torch

        return torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == "tensorflow":
        import tensorflow

        return len(tensorflow.config.list_physical_devices("GPU"))
    return _jax_gpus()


def _jax_gpus() -> int:
    import jax

    with suppress(RuntimeError):  # there are none
        return len(jax.devices("gpu"))
    return 0


def prepare_device(gpu: int | None, one_thread: bool = False) -> str:
    """The name of the GPU of this number for ``keras.device``; None means the CPU, perhaps with ``one_thread``.

    For processes that do nothing else: TensorFlow, which takes the memory of all GPUs that it sees, sees no other one.
    """
    backend = keras.backend.backend()
    if backend == "tensorflow":
        gpu = _only_for_tensorflow(gpu, one_thread)
    elif backend == "torch" and one_thread:
        import torch

        torch.set_num_threads(1)
    return CPU if gpu is None else f"gpu:{gpu}"


def _only_for_tensorflow(gpu: int | None, one_thread: bool) -> int | None:
    """The number that ``gpu`` has then."""
    import tensorflow

    devices: list[Any] = tensorflow.config.list_physical_devices("GPU")
    try:
        if one_thread:
            tensorflow.config.threading.set_intra_op_parallelism_threads(1)
            tensorflow.config.threading.set_inter_op_parallelism_threads(1)
        if devices:
            tensorflow.config.set_visible_devices([] if gpu is None else [devices[gpu]], "GPU")
    except RuntimeError:  # TensorFlow has begun to compute already
        return gpu
    return None if gpu is None else 0
