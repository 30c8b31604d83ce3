"""DistributedTrainer, DistributedOptimizer and broadcast_parameters, on real processes."""

import contextlib
import hashlib
import pickle
from unittest import mock

import numpy as np
import pytest

from collectives.backends.shm.backend import ShmAllreduce
from hvd_cluster.core import basics
from tests.hvd_cluster.mxnet.pool import load

mx, hvd = load()
from hvd_cluster.mxnet.nodes import NodeCall  # noqa: E402 - load() skips these tests where there is no MXNet

GRADIENTS = "hvd_cluster.mxnet.gradients"
PENDING = f"{GRADIENTS}.NodeCall"
IN_PLACE = "collectives.backends.shm.backend.ShmAllreduce._combine_in_place"
COMBINE = ShmAllreduce._combine_in_place


def net_of(kind="dense"):
    net = mx.gluon.nn.HybridSequential()
    if kind == "conv":
        net.add(mx.gluon.nn.Conv2D(4, 3, activation="relu"), mx.gluon.nn.BatchNorm(), mx.gluon.nn.Flatten())
    net.add(mx.gluon.nn.Dense(8, activation="relu"), mx.gluon.nn.Dense(3))
    return net


def trained_parameters(net):
    return [each for _, each in sorted(net.collect_params().items()) if each.grad_req != "null"]


def digest(arrays):
    return hashlib.sha256(b"".join(each.asnumpy().tobytes() for each in arrays)).hexdigest()


def require_same(arrays):
    """On all ranks, to the last bit."""
    assert len(set(hvd.allgather_object(digest(arrays)))) == 1


def steps(net, trainer, images, labels, count=4):
    loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    for _ in range(count):
        with mx.autograd.record():
            loss = loss_of(net(images), labels)
        loss.backward()
        trainer.step(len(labels))


def data(seed, rows=6, shape=(1, 5, 5)):
    random = np.random.RandomState(seed)
    images = random.randn(rows, *shape).astype(np.float32)
    return mx.nd.array(images), mx.nd.array(random.randint(0, 3, rows))


def check_training(kind, hybridize, **options):
    """Ranks that begin differently and have other data are equal after each step."""
    mx.random.seed(hvd.rank())
    net = net_of(kind)
    net.initialize(mx.init.Xavier())
    if hybridize:
        net.hybridize(static_alloc=True)
    images, labels = data(hvd.rank())
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)  # the shapes are not known yet
    net(images)
    require_same([each.data() for each in trained_parameters(net)])
    optimizer = {"learning_rate": 0.1}
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {**optimizer, "momentum": 0.9}, **options)
    for _ in range(3):
        steps(net, trainer, images, labels, 1)
        require_same([each.data() for each in trained_parameters(net)])


@pytest.mark.parametrize(
    ("kind", "hybridize", "options"),
    [
        ("conv", True, {}),
        ("conv", False, {"num_groups": 2}),
        ("dense", True, {"num_groups": 1, "prefix": "p."}),
        ("dense", False, {"gradient_predivide_factor": 2.0}),
        ("conv", True, {"compression": hvd.Compression.fp16, "num_groups": 3}),
    ],
)
def test_training(ranks, kind, hybridize, options):
    ranks.run(lambda: check_training(kind, hybridize, **options))


def check_against_one_process():
    """The mean over the ranks of a batch in parts is the gradient of the whole batch."""
    size, rank = hvd.size(), hvd.rank()
    images, labels = data(7, 4 * size)
    alone, together = net_of(), net_of()
    for net in (alone, together):
        net.initialize(mx.init.Xavier())
        net(images)
    hvd.broadcast_parameters(together.collect_params())
    for one, other in zip(trained_parameters(alone), trained_parameters(together), strict=True):
        one.set_data(other.data())
    rate = {"learning_rate": 0.2}
    steps(alone, mx.gluon.Trainer(alone.collect_params(), "sgd", rate, kvstore=None), images, labels)
    own = slice(rank * 4, rank * 4 + 4)
    trainer = hvd.DistributedTrainer(together.collect_params(), "sgd", rate)
    assert trainer.learning_rate == 0.2
    steps(together, trainer, images[own], labels[own])
    for one, other in zip(trained_parameters(alone), trained_parameters(together), strict=True):
        assert np.allclose(one.data().asnumpy(), other.data().asnumpy(), atol=1e-5)


def test_the_same_as_one_process_with_all_data(ranks):
    ranks.run(check_against_one_process)


def check_gradients_between():
    """Between allreduce_grads and update the gradients are averages."""
    parameter = mx.gluon.Parameter("w", shape=(2,))
    parameter.initialize(mx.init.Zero())
    frozen = mx.gluon.Parameter("frozen", shape=(2,), grad_req="null")
    frozen.initialize(mx.init.One())
    trainer = hvd.DistributedTrainer([parameter, frozen], "sgd", {"learning_rate": 1.0})
    with mx.autograd.record():
        loss = (parameter.data() * (hvd.rank() + 1)).sum()
    loss.backward()
    trainer.allreduce_grads()
    assert (parameter.grad().asnumpy() == 1.5).all()
    trainer.update(1)
    assert (parameter.data().asnumpy() == -1.5).all()
    assert (frozen.data().asnumpy() == 1).all()


def check_sparse_gradients():
    embedding = mx.gluon.nn.Embedding(10, 3, sparse_grad=True)
    embedding.initialize(mx.init.One())
    trainer = hvd.DistributedTrainer(embedding.collect_params(), "sgd", {"learning_rate": 1.0})
    with mx.autograd.record():
        loss = embedding(mx.nd.array([0, 0, hvd.rank() + 1])).sum()
    loss.backward()
    trainer.step(1)
    rows = embedding.weight.data().asnumpy()[:, 0]
    assert rows.tolist() == [-1, 0.5, 0.5, *[1] * 7]
    assert embedding.weight.grad().stype == "row_sparse"


def check_two_trainers():
    """In another order of calls on each rank, which prefixes tell apart."""
    parameters = [mx.gluon.Parameter(name, shape=(2,)) for name in "ab"]
    trainers = {}
    for number, parameter in enumerate(parameters):
        parameter.initialize(mx.init.Zero())
        trainers[number] = hvd.DistributedTrainer([parameter], "sgd", {"learning_rate": 1.0}, prefix=f"{number}.")
    with mx.autograd.record():
        loss = (parameters[0].data() + parameters[1].data() * 10 * hvd.rank()).sum()
    loss.backward()
    for number in [0, 1] if hvd.rank() else [1, 0]:
        trainers[number].step(1)
    assert [each.data().asnumpy().tolist() for each in parameters] == [[-1, -1], [-5, -5]]


def check_mixed_precision():
    parameter = mx.gluon.Parameter("w", shape=(2,), dtype="float16")
    parameter.initialize(mx.init.One())
    options = {"learning_rate": 0.5, "multi_precision": True}
    trainer = hvd.DistributedTrainer([parameter], mx.optimizer.create("sgd", **options))
    with mx.autograd.record():
        loss = (parameter.data() * (hvd.rank() + 1)).sum()
    loss.backward()
    trainer.step(1)
    assert parameter.data().asnumpy().tolist() == [0.25, 0.25]


def batches(seed):
    images, labels = data(seed, 24)
    return mx.io.NDArrayIter(images, labels, 6)


def check_module():
    """``fit`` with a wrapped optimizer, which learns the names of the parameters, and saves its state."""
    scores = mx.sym.FullyConnected(mx.sym.flatten(mx.sym.var("data")), num_hidden=3, name="fc")
    module = mx.mod.Module(mx.sym.SoftmaxOutput(scores, name="softmax"))
    training = batches(hvd.rank())
    module.bind(training.provide_data, training.provide_label)
    module.init_params(mx.init.Xavier())
    arg_params, aux_params = module.get_params()
    hvd.broadcast_parameters(arg_params)
    hvd.broadcast_parameters(aux_params)
    module.set_params(arg_params, aux_params)
    sgd = mx.optimizer.create("sgd", learning_rate=0.1, momentum=0.9, rescale_grad=1 / 6)
    optimizer = hvd.DistributedOptimizer(sgd)
    module.fit(training, optimizer=optimizer, kvstore=None, num_epoch=3)
    require_same([each for _, each in sorted(module.get_params()[0].items())])
    assert sgd.idx2name == {0: "fc_weight", 1: "fc_bias"}
    assert sgd.num_update == 12
    optimizer.set_learning_rate(0.5)
    optimizer.set_lr_mult({"fc_bias": 2.0})
    assert (sgd.lr, optimizer.learning_rate, sgd.lr_mult["fc_bias"]) == (0.5, 0.5, 2.0)
    optimizer.rescale_grad = 0.25
    assert sgd.rescale_grad == 0.25
    again = pickle.loads(pickle.dumps(optimizer))
    assert isinstance(again, hvd.DistributedOptimizer)
    assert again.lr == 0.5


def check_default_kvstore():
    """``fit`` with the kvstore that it has by default."""
    scores = mx.sym.FullyConnected(mx.sym.flatten(mx.sym.var("data")), num_hidden=3, name="fc")
    module = mx.mod.Module(mx.sym.SoftmaxOutput(scores, name="softmax"))
    optimizer = hvd.DistributedOptimizer(mx.optimizer.create("adam", learning_rate=0.1), num_groups=1)
    module.fit(batches(hvd.rank()), optimizer=optimizer, num_epoch=1, initializer=mx.init.One())
    require_same([each for _, each in sorted(module.get_params()[0].items())])


def check_optimizer_lists():
    """Aggregated updates give lists."""
    sgd = hvd.DistributedOptimizer(mx.optimizer.create("sgd", learning_rate=1.0), 2.0, num_groups=1)
    weights, gradients = [mx.nd.zeros((2,)) for _ in range(3)], [mx.nd.full((2,), hvd.rank() * n) for n in range(3)]
    states = [sgd.create_state(n, weight) for n, weight in enumerate(weights)]
    sgd.update([0, 1, 2], weights, gradients, states)
    assert [each.asnumpy()[0] for each in weights] == [0, -0.5, -1]


def check_one_index_twice():
    """Two gradients of one name travel one after the other, also where the others set out together."""
    sgd = hvd.DistributedOptimizer(mx.optimizer.create("sgd", learning_rate=1.0))
    weights, gradients = [mx.nd.zeros((2,)) for _ in range(3)], [mx.nd.full((2,), hvd.rank() * n) for n in range(3)]
    with mock.patch.object(type(basics.engine()), "patient", True):
        sgd.update([0, 0, 1], weights, gradients, [None] * 3)
    assert [each.asnumpy()[0] for each in weights] == [0, -0.5, -1]


def check_process_set_of_optimizer():
    """A rank outside of the set updates by its own gradients."""
    members = hvd.add_process_set([0, 1])
    sgd = hvd.DistributedOptimizer(mx.optimizer.create("sgd", learning_rate=1.0), process_set=members)
    parameter = mx.gluon.Parameter("w", shape=(2,))
    parameter.initialize(mx.init.Zero())
    trainer = hvd.DistributedTrainer([parameter], "sgd", {"learning_rate": 1.0}, process_set=members, prefix="t")
    with mx.autograd.record():
        loss = (parameter.data() * hvd.rank()).sum()
    loss.backward()
    trainer.step(1)
    weight = mx.nd.zeros((2,))
    sgd.update(0, weight, mx.nd.full((2,), hvd.rank()), None)
    expected = -2 if hvd.rank() == 2 else -0.5
    assert (weight.asnumpy() == expected).all()
    assert (parameter.data().asnumpy() == expected).all()
    hvd.remove_process_set(members)


def check_broadcast_parameters():
    rank = hvd.rank()
    arrays = {
        "b": mx.nd.full((2, 2), rank),
        "a": mx.nd.full((1, 2, 3, 3), rank),
        "c": mx.nd.full((3,), rank, dtype="int64"),
    }
    hvd.broadcast_parameters(arrays, root_rank=1, prefix="x.")
    assert all((each.asnumpy() == 1).all() for each in arrays.values())
    hvd.broadcast_parameters({})
    with pytest.raises(hvd.HorovodInternalError, match=r"differ: .*'w'"):
        hvd.broadcast_parameters({"w": mx.nd.ones((2 + rank,))})
    names = {f"dense{rank}_weight": mx.nd.full((2,), rank)}  # as Gluon counts layers
    hvd.broadcast_parameters(names)
    assert all((each.asnumpy() == 0).all() for each in names.values())


def check_weights_of_inference():
    """oneDNN moves the weights of a convolution into a layout of its own when no gradient is wanted."""
    net = mx.gluon.nn.Conv2D(16, 3, in_channels=8)
    net.initialize(mx.init.Constant(hvd.rank()))
    net.hybridize()
    net(mx.nd.ones((2, 8, 16, 16))).wait_to_read()
    hvd.broadcast_parameters(net.collect_params(), root_rank=1)
    assert (net.weight.data().asnumpy() == 1).all()


def check_refused_gradient(patient):
    """A step with it ends with our text on all ranks; so do later ones, until the parameters have been set again."""
    shapes = {"a": (2,), "b": (2 + hvd.rank(),), "c": (3,)}
    parameters = [mx.gluon.Parameter(name, shape=shape) for name, shape in shapes.items()]
    for parameter in parameters:
        parameter.initialize(mx.init.Zero())
    trainer = hvd.DistributedTrainer(parameters, "sgd", {"learning_rate": 1.0}, prefix="refused.")

    def step(chosen):
        with mx.autograd.record():
            loss = sum((each.data() * (hvd.rank() + 1)).sum() for each in chosen)
        loss.backward()
        trainer.step(1, ignore_stale_grad=True)

    with mock.patch.object(type(basics.engine()), "patient", patient):
        for _ in range(2):
            step(parameters)
        with pytest.raises(mx.MXNetError, match=r"refused\.1': the ranks disagree about the shape: \(2,\) on rank 0"):
            mx.nd.waitall()
        mx.nd.waitall()
        trainer._params[1].grad_req = "null"
        for parameter in parameters:
            parameter.set_data(mx.nd.zeros(parameter.shape))
        step([parameters[0], parameters[2]])
        assert [each.data().asnumpy()[0] for each in parameters] == [-1.5, 0, -1.5]


def check_other_models():
    """The first step compares them, and fails on all ranks where they differ. Only names may differ."""
    rank = hvd.rank()

    def step(*shapes):
        parameters = [mx.gluon.Parameter(f"{rank}.{place}", shape=shape) for place, shape in enumerate(shapes)]
        for parameter in parameters:
            parameter.initialize(mx.init.Zero())
        trainer = hvd.DistributedTrainer(parameters, "sgd", {"learning_rate": 1.0})
        with mx.autograd.record():
            loss = sum((each.data() * (rank + 1)).sum() for each in parameters)
        loss.backward()
        trainer.step(1)
        return parameters[0].data().asnumpy().tolist()

    differ = "the models of the ranks differ: the parameter"
    with pytest.raises(hvd.HorovodInternalError, match=rf"{differ} .*float32 of shape"):
        step((1,), (2 + rank,))
    with pytest.raises(mx.MXNetError, match=differ):
        step(*[(2,)] * (2 + rank))
    assert step((1,), (3,)) == [-1.5]


def check_what_travels_together(cores_to_spare, expected):
    """Gradients overlap with backward if some rank has a core for that; all ranks do the same."""
    parameters = [mx.gluon.Parameter(name, shape=(2,)) for name in "abc"]
    for parameter in parameters:
        parameter.initialize(mx.init.Zero())
    trainer = hvd.DistributedTrainer(parameters, "sgd", {"learning_rate": 1.0})
    patient = not cores_to_spare[hvd.rank()]
    with mock.patch.object(type(basics.engine()), "patient", patient), mock.patch(PENDING, wraps=NodeCall) as calls:
        for _ in range(2):
            with mx.autograd.record():
                loss = sum((each.data() * (hvd.rank() + 1)).sum() for each in parameters)
            loss.backward()
            trainer.step(1)
        mx.nd.waitall()
    assert [call.args[2] for call in calls.call_args_list] == expected * 2
    assert [each.data().asnumpy()[0] for each in parameters] == [-3.0] * 3


@pytest.mark.parametrize(
    ("cores_to_spare", "expected"),
    [
        ((False, False), ["gradient.0:2"]),
        ((True, False), ["gradient.0", "gradient.1", "gradient.2"]),
    ],
)
def test_what_travels_together(two, cores_to_spare, expected):
    two.run(check_what_travels_together, cores_to_spare, expected)


@pytest.mark.parametrize("patient", [True, False])
def test_a_gradient_that_is_refused(two, patient):
    two.run(check_refused_gradient, patient)


def trained_in_turn(hybridize, is_shared):
    """The parameters after a training that changes its trainer and its dtype, and the number of reductions in place."""
    mx.random.seed(5)
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.Conv2D(4, 3, in_channels=1), mx.gluon.nn.Flatten(), mx.gluon.nn.Dense(400, in_units=36))
    net.add(mx.gluon.nn.Dense(60))  # its shape is not known yet
    net.initialize(mx.init.Xavier())
    if hybridize:
        net.hybridize(static_alloc=True, static_shape=True)
    images, labels = data(hvd.rank())
    held = net[2].weight.grad()
    none = contextlib.nullcontext() if is_shared else mock.patch(f"{GRADIENTS}.can_share", return_value=False)
    with none, mock.patch(IN_PLACE, autospec=True, side_effect=COMBINE) as combine:
        for precision, momentum in (("float32", 0.0), ("float32", 0.9), ("float64", 0.9)):
            if precision == "float64":
                assert np.array_equal(held.asnumpy(), net[2].weight.grad().asnumpy())
                net.cast(precision)
            optimizer = {"learning_rate": 0.1, "momentum": momentum}
            trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", optimizer)
            steps(net, trainer, images.astype(precision), labels, 3)
        mx.nd.waitall()
    return [each.data().asnumpy().tobytes() for each in trained_parameters(net)], combine.call_count


def check_gradients_in_shared_memory(hybridize):
    """Those of more than 32 KB together are combined in place, until cast() makes others; nothing else changes."""
    (shared, combined), (plain, copied) = (trained_in_turn(hybridize, is_shared) for is_shared in (True, False))
    assert shared == plain
    assert copied == 0
    assert combined == 6


@pytest.mark.parametrize("hybridize", [True, False])
def test_gradients_in_shared_memory(two, hybridize):
    two.run(check_gradients_in_shared_memory, hybridize)


def check_other_reductions_of_gradients():
    """A part of a gradient, one that was there before the trainer, and one that comes and goes."""
    weight = mx.gluon.Parameter("weight", shape=(400, 50))
    weight.initialize()
    weight.grad()[:] = 7
    trainer = hvd.DistributedTrainer([weight], "sgd", {"learning_rate": 0.0})
    assert (weight.grad().asnumpy() == 7).all()
    memory = None
    with mock.patch(IN_PLACE, autospec=True, side_effect=COMBINE) as combine:
        for _ in range(3):
            with mx.autograd.record():
                loss = (weight.data() * (hvd.rank() + 1)).sum()
            loss.backward()
            trainer.step(1)
            gradient = weight.grad()
            assert set(gradient.asnumpy().ravel().tolist()) == {1.5}
            gradient[:] = hvd.rank() + 1
            for rows in (300, 100, 400):
                hvd.allreduce_(gradient[:rows], average=False, name=f"{rows} rows")
                gradient.wait_to_read()
            assert [gradient[row].asnumpy()[0] for row in (0, 150, 350)] == [12, 6, 3]
            memory = memory or trainer._exchange._arena.row().nbytes
            assert trainer._exchange._arena.row().nbytes == memory
            weight.grad_req = "null"
            weight.grad_req = "write"
            assert not weight.grad().asnumpy().any()
        mx.nd.waitall()
    assert combine.call_count == 3 * 3  # the steps, and all rows but 100, which are small


def check_gradients_of_other_devices():
    """They stay where they are."""
    weight = mx.gluon.Parameter("weight", shape=(400, 50))
    weight.initialize(ctx=mx.cpu(1))
    hvd.DistributedTrainer([weight], "sgd")
    assert weight.grad(mx.cpu(1)).ctx == mx.cpu(1)


def check_a_rank_that_joins_before_the_first_step():
    weight = mx.gluon.Parameter("weight", shape=(400, 50))
    weight.initialize()
    trainer = hvd.DistributedTrainer([weight], "sgd", {"learning_rate": 0.0})
    if hvd.rank():
        for _ in range(2):
            with mx.autograd.record():
                loss = (weight.data() * 4).sum()
            loss.backward()
            trainer.step(1)
            assert set(weight.grad().asnumpy().ravel().tolist()) == {2.0}
    basics.engine().join()


def check_gradients_of_an_executor():
    """A net that has trained without hvd-cluster knows where its gradients are, so they stay there."""
    mx.random.seed(5)
    net = mx.gluon.nn.Dense(400, in_units=50)
    net.initialize()
    net.hybridize(static_alloc=True, static_shape=True)
    images, labels = mx.nd.ones((4, 50)) * (1 + hvd.rank()), mx.nd.zeros(4)
    steps(net, mx.gluon.Trainer(net.collect_params(), "sgd", kvstore=None), images, labels, 1)
    hvd.broadcast_parameters(net.collect_params())
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd")
    for _ in range(3):
        steps(net, trainer, images, labels, 1)
        require_same([each.data() for each in trained_parameters(net)])
    assert len({net.weight.grad().asnumpy().tobytes()} | {net.weight.data().asnumpy().tobytes()}) == 2


BAD_CALLS = {
    "has no argument kvstore.*not through a KVStore": lambda net: hvd.DistributedTrainer(net, "sgd", kvstore="device"),
    "no argument update_on_kvstore": lambda net: hvd.DistributedTrainer(net, "sgd", update_on_kvstore=True),
    "optimizer is a Trainer; give an Optimizer or its name": lambda net: hvd.DistributedTrainer(
        net, mx.gluon.Trainer(net, "sgd")
    ),
    "params is a HybridSequential; give net.collect_params": lambda net: hvd.DistributedTrainer(net_of(), "sgd"),
    "gradient_predivide_factor=0.0 must be": lambda net: hvd.DistributedTrainer(
        net, "sgd", gradient_predivide_factor=0
    ),
    "compression='fp16' has no compress": lambda net: hvd.DistributedTrainer(net, "sgd", compression="fp16"),
    "groups=-1 must be a positive integer": lambda net: hvd.DistributedTrainer(net, "sgd", num_groups=-1),
    "is not a ProcessSet": lambda net: hvd.DistributedTrainer(net, "sgd", process_set=[0]),
    "optimizer is a str; give one of mx.optimizer": lambda net: hvd.DistributedOptimizer("sgd"),
    "for a gluon.Trainer use DistributedTrainer": lambda net: hvd.DistributedOptimizer(mx.gluon.Trainer(net, "sgd")),
    r"params\['a'\] is a list; give net.collect_params": lambda net: hvd.broadcast_parameters({"a": [1]}),
    "params is a list; give": lambda net: hvd.broadcast_parameters([mx.nd.ones((2,))]),
    "has not been initialized": lambda net: hvd.DistributedTrainer(net, "sgd"),
}


def check_bad_calls():
    for text, call in BAD_CALLS.items():
        parameter = mx.gluon.Parameter("w", shape=(2,))
        if "initialized" not in text:
            parameter.initialize()
        with pytest.raises((ValueError, TypeError, RuntimeError), match=text):
            call([parameter])
    sgd = hvd.DistributedOptimizer(mx.optimizer.create("sgd", learning_rate=0.5))
    parameter.initialize()
    with pytest.warns(UserWarning, match="give the plain optimizer"):
        trainer = hvd.DistributedTrainer([parameter], sgd)
    assert trainer.optimizer is sgd._optimizer


@pytest.mark.parametrize(
    "check",
    [
        check_gradients_between,
        check_sparse_gradients,
        check_two_trainers,
        check_mixed_precision,
        check_other_models,
        check_gradients_of_an_executor,
        check_other_reductions_of_gradients,
        check_gradients_of_other_devices,
        check_a_rank_that_joins_before_the_first_step,
        check_module,
        check_default_kvstore,
        check_optimizer_lists,
        check_one_index_twice,
        check_broadcast_parameters,
        check_weights_of_inference,
        check_bad_calls,
    ],
)
def test_two_ranks(two, check):
    two.run(check)


def test_a_process_set(pools):
    pools(3).run(check_process_set_of_optimizer)
