"""Elastic states of Keras and their callbacks, on two ranks and every backend."""

from contextlib import contextmanager

import keras
import numpy as np
import pytest

import hvd_cluster.keras as hvd
from hvd_cluster.keras.variables import copied
from hvd_cluster.ops.objects import allgather_object
from tests.checks import each_check

STEPS = 4


def model_of(seed=0, **options):
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Input((3,)), keras.layers.Dense(2), keras.layers.BatchNormalization()]
    model = keras.Sequential([*layers, keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), **options), loss="mse")
    return model


def data():
    random = np.random.RandomState(hvd.rank())
    return random.randn(8 * STEPS, 3).astype("float32"), random.randn(8 * STEPS, 1).astype("float32")


def fit(model, callbacks=(), **options):
    model.fit(*data(), batch_size=8, shuffle=False, verbose=0, callbacks=list(callbacks), **options)


def seeds(model):
    others = {id(each) for each in (*model.weights, *model.metrics_variables)}
    return [copied(each).tolist() for each in model.variables if id(each) not in others]


def shared(state):
    """The values that are the same on all ranks."""
    return [copied(each).astype("f").tolist() for each in (*state.model.weights, *state.optimizer.variables)]


def values(state):
    return [copied(each).tolist() for each in (*state.model.variables, *state.optimizer.variables)]


def check_all_ranks_get_the_state_of_rank_0():
    model = model_of(seed=hvd.rank())
    state = hvd.elastic.KerasState(model, batch=hvd.rank())
    state.optimizer.learning_rate = 0.5 / (1 + hvd.rank())
    before = seeds(model)
    state.sync()
    found = allgather_object(shared(state))
    assert all(each == found[0] for each in found)
    assert seeds(model) == before
    found = allgather_object(before)
    assert len(found[0]) == 1
    assert found[0] != found[1]
    assert (state.batch, float(copied(state.optimizer.learning_rate))) == (0, 0.5)


def check_a_commit_copies_parameters_only_where_a_loss_may_find_them_changed():
    state = hvd.elastic.KerasState(model_of(), batch=0)
    state.sync()
    snapshots, seen = state._snapshots, []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(snapshots.is_unsafe))
    fit(state.model, [hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.CommitStateCallback(state), note])
    assert snapshots.commit == STEPS + 1
    assert seen == [False] * STEPS
    images, labels = data()
    state.model.train_on_batch(images, labels)
    state.commit()
    assert not snapshots.is_unsafe
    state.model.train_on_batch(images, labels)
    hvd.allreduce(1.0)
    state.commit()
    assert snapshots.is_unsafe
    assert snapshots.copied == snapshots.commit


@contextmanager
def failing():
    """The collectives of compiled steps of JAX fail, and the block with them."""
    import jax

    from hvd_cluster.exceptions import HorovodInternalError
    from hvd_cluster.jax import calls

    def fail(call, pairs):
        raise HorovodInternalError("the cable is cut")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "_run", fail)
        with pytest.raises(jax.errors.JaxRuntimeError, match="cable is cut"):
            yield


def check_a_change_by_hand_before_a_compiled_step_that_fails_is_kept():
    """The step saves the values that it was given."""
    if keras.backend.backend() != "jax":
        return
    for run in (lambda model: model.train_on_batch(*(part[:8] for part in data())), fit):
        state = hvd.elastic.KerasState(model_of(), batch=0)
        state.sync()
        fit(state.model, [hvd.elastic.CommitStateCallback(state)])
        state._snapshots._copy = None
        kernel = state.model.trainable_variables[0]
        kernel.assign(kernel + 1)
        before = shared(state)
        with failing():
            run(state.model)
            kernel.value.block_until_ready()  # JAX raises no earlier
        state.restore()
        assert shared(state) == before


def check_a_compiled_step_that_fails_leaves_the_variables_of_the_last_commit():
    """JAX has given their memory to the step; so it saves them."""
    if keras.backend.backend() != "jax":
        return
    for steps in (0, 3):  # of two rounds: in the second one, the values are those that were put back
        state = hvd.elastic.KerasState(model_of(), batch=0)
        state.sync()
        for _ in range(2):
            fit(state.model, [hvd.elastic.CommitStateCallback(state)])
            state._snapshots._copy = None
            before = shared(state), seeds(state.model)
            with failing():
                fit(state.model, [hvd.elastic.CommitStateCallback(state, 1 + steps)])
            assert state._snapshots.is_exact
            state.restore()
            assert (shared(state), seeds(state.model)) == before


def check_a_collective_beside_the_gradients_makes_a_commit_copy():
    """On JAX, a step is lost with its variables if another collective in it than that of its gradients fails."""
    if keras.backend.backend() != "jax":
        return
    layers = [keras.layers.Input((3,)), hvd.SyncBatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    state = hvd.elastic.KerasState(model)
    state.sync()
    model.train_on_batch(*(part[:8] for part in data()))
    state.commit()
    assert state._snapshots.is_unsafe
    fit(model, [hvd.elastic.CommitStateCallback(state)])  # which commits twice at the end
    assert state._snapshots.copied == state._snapshots.commit == 1 + STEPS + 1


def check_a_compiled_step_that_does_not_save_its_variables_makes_a_commit_copy():
    """As one that was compiled before the first state was made."""
    if keras.backend.backend() != "jax":
        return
    from hvd_cluster.jax import arrays

    state = hvd.elastic.KerasState(model_of())
    state.sync()
    for saves in (True, False):
        if not saves:
            arrays._covered.clear()
        state.model.train_on_batch(*(part[:8] for part in data()))
        state.commit()
        assert state._snapshots.is_unsafe is not saves
    assert state._snapshots.copied == 2


def check_a_step_that_xla_compiles_makes_a_commit_copy():
    """XLA changes variables in place, so a step that fails may have changed a part of them."""
    if keras.backend.backend() != "tensorflow":
        return
    model = model_of()
    images, labels = (part[:8] for part in data())
    for compiled in (False, True):
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse", jit_compile=compiled)
        state = hvd.elastic.KerasState(model)
        state.sync()
        for _ in range(2):
            model.train_on_batch(images, labels)
            state.commit()
            assert state._snapshots.is_unsafe is compiled
            assert state._snapshots.copied == state._snapshots.commit or not compiled


def check_a_step_that_xla_compiles_and_that_fails_goes_back_to_the_commit():
    if keras.backend.backend() != "tensorflow":
        return
    import tensorflow as tf

    state = hvd.elastic.KerasState(model_of())
    state.sync()
    before = values(state)
    kernel = state.model.trainable_variables[0].value

    @tf.function(jit_compile=True)
    def step(tensor):
        kernel.assign_add(tf.ones_like(kernel))
        return hvd.allreduce(tensor, name="fails")

    with pytest.raises(tf.errors.InternalError, match="the ranks disagree about the shape"):
        step(tf.ones([2 + hvd.rank()]))
    assert not state._snapshots.is_exact
    state.restore()
    assert values(state) == before


def check_a_loss_scale_optimizer():
    """Around the distributed one, as ``compile()`` puts it, and inside of it."""
    plain = keras.optimizers.SGD(0.1, momentum=0.9)
    around = keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(plain), initial_scale=2.0**4)
    inside = hvd.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), initial_scale=2.0**4)
    )
    for optimizer in (around, inside):
        model = model_of(seed=hvd.rank())
        model.compile(optimizer, loss="mse")
        state = hvd.elastic.KerasState(model, batch=0)
        state.sync()
        fit(model, [hvd.elastic.CommitStateCallback(state)])
        assert state._snapshots.commit == STEPS + 1
        before = shared(state)
        model.train_on_batch(*(each[:8] for each in data()))
        assert shared(state) != before
        state.restore()
        if state._snapshots.copied == STEPS + 1:
            assert shared(state) == before
        state.sync()
        trained = (*model.trainable_variables, *state.optimizer.variables)  # moving averages are those of each rank
        found = allgather_object([copied(each).tolist() for each in trained])
        assert found[0] == found[1]


def check_variables_of_bfloat16():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("bfloat16")
    try:
        model = model_of(seed=hvd.rank())
    finally:
        keras.config.set_dtype_policy(before)
    state = hvd.elastic.KerasState(model)
    state.sync()
    state.save()
    kept = values(state)
    fit(model)
    assert values(state) != kept
    state.restore()
    assert values(state) == kept
    found = allgather_object([copied(each).astype("f").tolist() for each in model.trainable_variables])
    assert found[0] == found[1]
    state.sync()


def check_the_state_goes_back_to_a_commit():
    state = hvd.elastic.KerasState(model_of(), batch=0, names=["a"])
    state.sync()
    fit(state.model)
    state.save()
    before = values(state)
    state.names.append("b")
    fit(state.model)
    assert values(state) != before
    state.restore()
    assert (values(state), state.names) == (before, ["a"])
    state.sync()
    fit(state.model)


def check_numbers_of_batches_and_epochs():
    state = hvd.elastic.KerasState(model_of(), batch=1, epoch=2)
    seen = []

    class Notes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append((state.epoch, state.batch, state._snapshots.commit))

    commit = hvd.elastic.CommitStateCallback(state, batches_per_commit=3)
    callbacks = [
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        commit,
        Notes(),
    ]
    fit(state.model, callbacks, epochs=2)  # counts its epochs from 0
    first = [(2, 2, 0), (2, 3, 0), (2, 4, 1), (2, 5, 1)]
    assert seen == [*first, (3, 1, 2), (3, 2, 3), (3, 3, 3), (3, 4, 3)]
    assert (state.epoch, state.batch, state._snapshots.commit) == (4, 0, 4)
    fit(state.model, callbacks, initial_epoch=4, epochs=5)
    assert state.epoch == 5
    for wrong in (0, 1.5, True):
        with pytest.raises(ValueError, match=f"batches_per_commit={wrong} must be"):
            hvd.elastic.CommitStateCallback(state, batches_per_commit=wrong)


def check_executions_of_several_steps():
    """The last one of an epoch has fewer."""
    if keras.backend.backend() == "torch":
        return  # which has one step in each
    x = np.zeros((40, 3), "float32")
    batches = hvd.elastic.GlobalBatches(x, 8)
    state = hvd.elastic.KerasState(model_of(), batches=batches, batch=0)
    state.model.compile(state.model.optimizer, loss="mse", steps_per_execution=2)
    seen = []

    class Notes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append((batches.epoch, batches.step, state.batch, state._snapshots.commit))

    commit = hvd.elastic.CommitStateCallback(state, batches_per_commit=4)
    rows = np.zeros((40 // hvd.size(), 3), "float32")
    fed = {"batch_size": 8 // hvd.size(), "shuffle": False, "verbose": 0}
    state.model.fit(rows, rows[:, :1], **fed, callbacks=[hvd.elastic.UpdateBatchStateCallback(state), commit, Notes()])
    assert seen == [(0, 2, 2, 0), (0, 4, 4, 1), (1, 0, 5, 1)]


def check_the_rest_of_an_epoch():
    x = np.arange(20.0)[:, None]
    batches = hvd.elastic.GlobalBatches(x, 8, shuffle=False)
    batches.advance()
    found = list(hvd.elastic.rest_of_epoch(batches, x, x * 2))
    assert len(found) == len(batches) == 2
    for step, (rows, doubled, weights) in enumerate(found, start=1):
        own = range(20)[step * 8 : step * 8 + 8][hvd.rank() :: hvd.size()]
        assert rows[:, 0].tolist() == list(own)
        assert (doubled == rows * 2).all()
        assert weights.tolist() == [np.float32(len(own) * hvd.size() / (8 if step == 1 else 4))] * len(own)


def check_passes_that_only_add_up_gradients_leave_the_state_as_it_was():
    """Also where a LossScaleOptimizer is around the optimizer, as ``compile()`` puts it for mixed_float16."""
    if keras.backend.backend() == "jax":
        return  # which has no such passes
    for is_scaled in (False, True):
        model = model_of(backward_passes_per_step=2)
        inner = model.optimizer
        if is_scaled:
            model.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale=1.0), loss="mse")
        images, labels = (part[:8] for part in data())
        state = hvd.elastic.KerasState(model)
        state.sync()
        exact = []
        for _ in range(5):
            model.train_on_batch(images, labels)
            exact.append(state._snapshots.is_exact)
            state.commit()
        assert exact == [True, False, True, False, True]
        state.restore()
        assert state._snapshots.is_exact
        assert int(inner._exchange.passes._done.value) == 0


def check_all_ranks_get_what_a_callback_makes_of_the_state_of_rank_0():
    state = hvd.elastic.KerasState(model_of(), calls=0)
    state.sync()
    before, seen = shared(state), []

    def on_state_reset():
        seen.append(1)
        state.calls += 1 + hvd.rank()
        state.optimizer.learning_rate = 0.25 / (1 + hvd.rank())
        if len(seen) > 1:
            fit(state.model, epochs=1)

    state.register_reset_callbacks([on_state_reset])
    for calls in (1, 2):
        state._reset_together()
        found = allgather_object(shared(state))
        assert all(each == found[0] for each in found)
        assert (state.calls, float(copied(state.optimizer.learning_rate))) == (calls, 0.25)
        assert found[0] != before
        assert state._snapshots.is_exact
    commits = allgather_object((state._snapshots.commit, state.lost_commits))
    assert len(set(commits)) == 1
    state.calls = 5
    state.restore()
    assert (state.calls, int(copied(state.optimizer.iterations))) == (2, STEPS)


def check_weights_that_a_callback_sets_on_rank_0_alone_reach_all_ranks():
    state = hvd.elastic.KerasState(model_of())
    state.sync()
    kernel = state.model.trainable_variables[0]
    state.register_reset_callbacks([lambda: kernel.assign(np.full(kernel.shape, 1.0 + hvd.rank()))])
    state._reset_together()
    assert (copied(kernel) == 1).all()


def check_a_change_of_the_learning_rate_sends_no_weights_where_changes_are_known():
    state = hvd.elastic.KerasState(model_of())
    state.sync()
    state.register_reset_callbacks([lambda: setattr(state.optimizer, "learning_rate", 0.5)])
    handlers, calls = type(state._handlers["model"]), []
    share = handlers.share
    handlers.share = lambda self, root: calls.append(root) or share(self, root)
    try:
        state._reset_together()
    finally:
        handlers.share = share
    assert calls == ([0] if keras.backend.backend() == "tensorflow" else [])


def check_wrong_models():
    class Marked(keras.Model):
        """Keras takes it as built, without its layer."""

        def __init__(self):
            super().__init__()
            self.layer = keras.layers.Dense(1)

        def call(self, inputs):
            return self.layer(inputs)

    marked = Marked()
    with pytest.warns(UserWarning, match="unbuilt state"):
        marked.build((None, 3))
    for model in (keras.Sequential([keras.layers.Dense(1)]), marked):
        with pytest.raises(ValueError, match=r"has no variables yet, or not all.* call it on a batch"):
            hvd.elastic.KerasState(model)
    marked(np.ones((1, 3), "float32"))
    hvd.elastic.KerasState(marked)
    with pytest.raises(ValueError, match=r"model is a str; give a keras\.Model"):
        hvd.elastic.KerasState("model")


@each_check(globals())
def test_on_two_ranks(ranks, check):
    ranks.run(check)
