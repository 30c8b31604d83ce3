"""Ranks whose models differ, or that use their models in another order, hear of it; other names do no harm."""

import pytest
import tensorflow as tf

import hvd_cluster.tensorflow as hvd
from collectives.api import MismatchError
from hvd_cluster.tensorflow.errors import engine_error
from tests.checks import each_check


def variables(*pairs):
    """Of names and numbers of elements."""
    return [tf.Variable(tf.zeros(count), name=name) for name, count in pairs]


def gradients(sources, factor=1.0):
    with tf.GradientTape() as tape:
        total = tf.add_n([tf.reduce_sum(each) for each in sources]) * factor
    return hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(total, sources)


def modes():
    """The gradients of a list, eagerly and in a function of its own."""
    functions = {}

    def in_function(sources, factor=1.0):
        key = id(sources)
        if key not in functions:
            functions[key] = tf.function(lambda factor: gradients(sources, factor), autograph=False)
        return functions[key](tf.constant(factor))

    return gradients, in_function


def error_of(call):
    with pytest.raises((MismatchError, tf.errors.OpError)) as caught:
        call()
    error = caught.value if isinstance(caught.value, MismatchError) else engine_error(caught.value)
    assert isinstance(error, MismatchError)
    texts = hvd.allgather_object(str(error))
    assert len(set(texts)) == 1
    return texts[0]


def works():
    assert hvd.allreduce(tf.constant(1.0), op=hvd.Sum).numpy() == hvd.size()


def check_other_models():
    body, head = [("body", 3), ("out", 4)], [("head", 2)]
    cases = {
        "'head', float32 of shape (2,), is on rank 0 only": ([*body, *head], body),
        "the variable 'head', float32 of shape (2,), is on rank 0 only": ([*head, *body], body),
        "number 0 is 'out', float32 of shape (4,), on rank 0, 'body'": (body[::-1], body),
        "'out', number 1, is float32 of shape (5,) on rank 0, float32 of shape (4,) on rank": (
            [body[0], ("out", 5)],
            body,
        ),
    }
    for call in modes() if hvd.size() > 1 else ():
        for said, (first, others) in cases.items():
            sources = variables(*(first if hvd.rank() == 0 else others))
            for _ in range(2):
                assert said in error_of(lambda: call(sources))  # noqa: B023 - called at once
            works()


def check_other_names():
    for call in modes():
        prefix = "first/" if hvd.rank() == 0 else ""
        sources = [tf.Variable(tf.zeros(3), name=f"{prefix}{name}") for name in ("a", "b", "c")]
        for _ in range(2):
            assert [each.numpy().tolist() for each in call(sources)] == [[float(hvd.size())] * 3] * 3


def check_models_in_another_order():
    """They have equal names and shapes."""
    for count, call in enumerate(modes() if hvd.size() > 1 else ()):
        models = [variables(("equal", 6 + count)) for _ in range(2)]
        order = models if hvd.rank() == 0 else models[::-1]
        for sources in order:
            assert "different models at the same time" in error_of(lambda: call(sources))  # noqa: B023
        works()
        for factor, sources in enumerate(models, start=1):
            (found,) = call(sources, float(factor))
            assert found.numpy().tolist() == [float(factor * hvd.size())] * (6 + count)


def check_models_change_their_order_later():
    """Where gradients travel at once. A rank that has made more models than others is no error."""
    models = [variables(("later", 6)) for _ in range(2)]
    for sources in (*models, *models):
        gradients(sources)
    order = models if hvd.rank() == 0 else models[::-1]
    for sources in order if hvd.size() > 1 else ():
        assert "different models at the same time" in error_of(lambda: gradients(sources))  # noqa: B023
    if hvd.rank() == 0:
        models[1] = variables(("later", 6))
    for _ in range(2):
        for factor, sources in enumerate(models, start=1):
            (found,) = gradients(sources, float(factor))
            assert found.numpy().tolist() == [float(factor * hvd.size())] * 6


def check_two_lists_in_one_function():
    """A generator and its discriminator; a rank may trace again alone."""
    one, other = variables(("one", 2), ("one/bias", 1)), variables(("other", 3))

    @tf.function
    def step(factor):
        return gradients(one, factor), gradients(other, 2 * factor)

    for number in range(4):
        factor = tf.constant(float(number)) if hvd.rank() or number < 2 else float(number)
        first, second = step(factor)
        assert first[0].numpy().tolist() == [float(number * hvd.size())] * 2
        assert second[0].numpy().tolist() == [2.0 * number * hvd.size()] * 3


def check_broadcast_of_other_variables():
    if hvd.size() > 1:
        sources = variables(("a", 2), *([("b", 3)] if hvd.rank() == 0 else []))
        assert "'b', float32 of shape (3,), is on rank 0 only" in error_of(lambda: hvd.broadcast_variables(sources, 0))
        hvd.broadcast_variables(sources[:1], 0)


@each_check(globals())
@pytest.mark.parametrize("ranks", [1, 3], indirect=True)
def test_on_all_ranks(ranks, check):
    ranks.run(check)
