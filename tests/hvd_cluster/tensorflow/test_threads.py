"""The threads of TensorFlow in a rank that shares the cores of its host."""

import pytest
import tensorflow as tf


def options():
    from tensorflow.python.eager import context

    config = context.context().config
    return config.intra_op_parallelism_threads, config.experimental.disable_thread_spinning


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_idle_threads_sleep(ranks):
    assert ranks.run(options) == [(1, True)] * 3


def test_a_process_of_its_own_keeps_the_threads_that_tensorflow_has(monkeypatch):
    from hvd_cluster.tensorflow import threads

    chosen = []
    monkeypatch.setattr(threads, "_let_idle_threads_sleep", lambda: chosen.append("sleep"))
    monkeypatch.setattr(tf.config.threading, "set_intra_op_parallelism_threads", chosen.append)
    threads.limit_threads({})
    assert not chosen
