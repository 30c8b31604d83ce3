"""Which ranks a Trainer has, on which devices, and what is refused."""

import pytest
import torch

from collectives import InvalidRequestError, ReduceOp
from tests.hvd_cluster.lightning.training import PACKAGES, fit, flat, loader, regression, trainer, weights

CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


def refusal(function):
    """The text of the error that ``function`` raises, in a rank."""
    try:
        function()
    except (InvalidRequestError, ValueError, RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize(
    ("devices", "local_rank", "visible", "expected"),
    [
        ([CPU], 3, 0, CPU),
        ([FIRST], 0, 1, FIRST),
        ([FIRST], 1, 2, SECOND),
        ([FIRST], 1, 1, FIRST),
        ([SECOND], 0, 2, SECOND),
        ([FIRST, SECOND], 1, 2, SECOND),
    ],
)
def test_the_device_of_a_rank(pair, devices, local_rank, visible, expected):
    def choose():
        from hvd_cluster.lightning.ranks_strategy import device_of

        return device_of(devices, local_rank, visible)

    assert pair.run(choose) == [expected] * 2


def test_a_rank_without_a_device(pair):
    def choose(devices):
        from hvd_cluster.lightning.ranks_strategy import device_of

        return refusal(lambda: device_of(devices, 2, 2))

    assert "local rank 2 has no GPU, because devices=2" in pair.run(choose, [FIRST, SECOND])[0]
    assert "leave devices out, and start the script by hvdrun -np 3" in pair.run(choose, [CPU] * 3)[0]


def test_names_of_reductions(pair):
    def choose():
        from hvd_cluster.lightning.ranks_strategy import operation

        op = torch.distributed.ReduceOp
        found = [operation(each) for each in (None, "mean", "AVG", op.SUM, op.MAX, op.AVG, "product")]
        return found, refusal(lambda: operation("median"))

    found, text = pair.run(choose)[0]
    sum_, average = ReduceOp.SUM, ReduceOp.AVERAGE
    assert found == [sum_, average, average, sum_, ReduceOp.MAX, average, ReduceOp.PRODUCT]
    assert "reduce_op='median' must be one of mean, avg, sum, min, max, product" in text


def test_a_world_of_one(alone):
    def train():
        module = regression()
        made = fit(module, loader(8), strategy="horovod", accumulate_grad_batches=2, gradient_clip_val=0.5)
        other = regression()
        fit(other, loader(8), strategy="auto", accumulate_grad_batches=2, gradient_clip_val=0.5)
        return weights(module) == weights(other), made.world_size, made.is_global_zero

    assert alone.run(train) == [(True, 1, True)]


def test_a_script_without_a_launcher_needs_no_init(fresh_pool):
    def train():
        import hvd_cluster.torch as hvd

        before = hvd.is_initialized()
        made = trainer()
        return before, hvd.is_initialized(), made.world_size, made.global_rank

    assert fresh_pool(2).run(train) == [(False, True, 2, 0), (False, True, 2, 1)]


def test_lightning_hears_of_the_rank(pair):
    def ask():
        from lightning.pytorch.utilities import rank_zero_only

        made = trainer()
        environment = made.strategy.cluster_environment
        return (
            rank_zero_only.rank,
            made.global_rank,
            made.local_rank,
            made.node_rank,
            made.num_nodes,
            made.num_devices,
            environment.detect(),
            environment.creates_processes_externally,
        )

    assert pair.run(ask) == [(rank, rank, rank, 0, 1, 1, True, True) for rank in range(2)]


def test_devices_and_arguments_are_refused_when_the_trainer_is_made(pair):
    def ask():
        import hvd_cluster.torch as hvd
        from hvd_cluster.lightning import HorovodStrategy

        return (
            refusal(lambda: trainer(devices=2)),
            refusal(lambda: trainer(strategy=HorovodStrategy(op=hvd.Max))),
            refusal(lambda: trainer(strategy=HorovodStrategy(compression="fp16"))),
            refusal(lambda: trainer(strategy=HorovodStrategy(process_set=[0, 1]))),
            refusal(lambda: trainer(strategy=HorovodStrategy(process_set=hvd.ProcessSet([0, 1])))),
            refusal(lambda: trainer().strategy.reduce(torch.ones(1), group="a group")),
            refusal(lambda: HorovodStrategy(bucket_cap_mb=25)),
        )

    devices, op, compression, kind, unregistered, group, argument = pair.run(ask)[0]
    assert "devices=2, but with the strategy horovod each process has one device" in devices
    assert "op Max cannot combine gradients" in op
    assert "compression" in compression
    assert "process_set=[0, 1] must be a ProcessSet, such as ProcessSet([0, 1])" in kind
    assert "is not registered; call hvd.init(process_sets=[...])" in unregistered
    assert "group='a group': the collectives of the strategy work on its process set only" in group
    assert "bucket_cap_mb" in argument


def test_a_strategy_shows_its_arguments_and_can_be_pickled(pair):
    def copy():
        import inspect
        import pickle

        import hvd_cluster.lightning
        import hvd_cluster.lightning.pytorch_lightning as other

        made = [home.HorovodStrategy(gradient_predivide_factor=2.0) for home in (hvd_cluster.lightning, other)]
        twins = pickle.loads(pickle.dumps(made))
        assert [type(each) for each in twins] == [type(each) for each in made]
        assert [trainer(package, strategy=each).world_size for package, each in zip(PACKAGES, twins, strict=True)]
        return list(inspect.signature(type(made[0])).parameters)[:3]

    assert pair.run(copy)[0] == ["compression", "op", "gradient_predivide_factor"]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_strategy_of_the_other_package_is_named(pair, package):
    def ask():
        import hvd_cluster.lightning
        import hvd_cluster.lightning.pytorch_lightning as other

        homes = {"lightning.pytorch": other, "pytorch_lightning": hvd_cluster.lightning}
        return refusal(lambda: trainer(package, strategy=homes[package].HorovodStrategy()))

    wrong = next(each for each in PACKAGES if each != package)
    assert f"<HorovodStrategy for {wrong}; see hvd_cluster.lightning for those of other" in pair.run(ask)[0]


def test_a_process_set(pair):
    """Rank 1 trains alone, and rank 0 is refused."""

    def train():
        import hvd_cluster.torch as hvd
        from hvd_cluster.lightning import HorovodStrategy

        members = hvd.add_process_set([1])
        try:
            module = regression(seed=3)
            text = refusal(lambda: fit(module, loader(8), strategy=HorovodStrategy(process_set=members)))
            other = regression(seed=3)
            fit(other, loader(8), strategy="auto")
            return text, flat(weights(module)) == flat(weights(other))
        finally:
            hvd.barrier()
            hvd.remove_process_set(members)

    one, two = pair.run(train)
    assert "rank 0 is not in the process set [1] of the strategy" in one[0]
    assert two == (None, True)


@pytest.mark.parametrize("package", ["lightning.fabric", "lightning_fabric"])
def test_an_mpi4py_without_a_library(pair, package):
    """As it is where mpi4py is installed, and no MPI."""

    def ask():
        import importlib
        import sys
        import types

        def broken(name):
            raise RuntimeError("cannot load MPI library")

        mpi = importlib.import_module(f"{package}.plugins.environments.mpi")
        module = types.ModuleType("mpi4py")
        module.__getattr__ = broken
        kept, mpi._MPI4PY_AVAILABLE = mpi._MPI4PY_AVAILABLE, True
        earlier = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "mpi4py"}
        sys.modules["mpi4py"] = module
        try:
            trainers = {"lightning.fabric": "lightning.pytorch", "lightning_fabric": "pytorch_lightning"}
            return trainer(trainers[package]).world_size, refusal(mpi.MPIEnvironment)
        finally:
            del sys.modules["mpi4py"]
            sys.modules.update(earlier)
            mpi._MPI4PY_AVAILABLE = kept

    assert pair.run(ask) == [(2, "RuntimeError: cannot load MPI library")] * 2


def test_ddp_of_lightning_in_our_environment(fresh_pool):
    def train():
        import hvd_cluster.torch as hvd
        from hvd_cluster.lightning import HorovodEnvironment

        hvd.init()
        module = regression(seed=hvd.rank())
        made = fit(module, loader(4), strategy="ddp", devices=2, plugins=[HorovodEnvironment()])
        size = torch.distributed.get_world_size()
        torch.distributed.destroy_process_group()
        return flat(weights(module)), made.world_size, size

    one, two = fresh_pool(2).run(train)
    assert one == two
    assert one[1:] == (2, 2)


def test_a_package_that_cannot_be_used_does_not_stop_the_other(alone):
    def check():
        from hvd_cluster.lightning import packages

        known = packages.PACKAGES
        broken = packages.Package("json", "json.pytorch", "json.fabric", "nowhere")
        try:
            packages.PACKAGES = (broken, known[0])
            found = list(packages.installed_classes())
            packages.PACKAGES = (broken,)
            with pytest.raises(ImportError, match=r"pip install .* json: No module named 'json.pytorch'"):
                packages.installed_classes()
        finally:
            packages.PACKAGES = known
        return found

    assert alone.run(check) == [["lightning"]]
