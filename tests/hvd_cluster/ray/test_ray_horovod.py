"""Scripts for Horovod on Ray: the alias of the driver reaches the workers, and what they start."""

import importlib
import re
import subprocess
import sys

import pytest

# Ray keeps its connections, starts worker processes before they are needed, and sets a variable when it is imported.
pytestmark = pytest.mark.leaves("descriptors", "environment", "processes")


class Trainer:
    """Made before any function runs, and needs the alias already."""

    def __init__(self):
        self.module = importlib.import_module("horovod.torch").__name__


def modules(trainer):
    child = "import horovod.torch; print(horovod.torch.__name__)"
    return trainer.module, subprocess.check_output([sys.executable, "-c", child], text=True).strip()


@pytest.mark.usefixtures("cluster", "nothing_left", "horovod_alias")
def test_workers_have_the_alias_of_the_driver():
    pytest.importorskip("torch")
    executor_class = importlib.import_module("horovod.ray").RayExecutor
    assert executor_class is importlib.import_module("hvd_cluster.ray").RayExecutor
    executor = executor_class(executor_class.create_settings(timeout_s=100), num_workers=1)
    executor.start(executable_cls=Trainer)
    with executor:
        assert executor.execute(modules) == [("hvd_cluster.torch", "hvd_cluster.torch")]


NAMES = [
    ("horovod.ray.runner", "RayExecutor", "hvd_cluster.ray"),
    ("horovod.ray.runner", "MiniSettings", "hvd_cluster.ray"),
    ("horovod.ray.elastic", "ElasticRayExecutor", "hvd_cluster.ray"),
    ("horovod.ray.elastic_v2", "RayHostDiscovery", "hvd_cluster.ray"),
    ("horovod.ray.ray_logger", "log", "hvd_cluster.ray"),
]


@pytest.mark.usefixtures("horovod_alias")
@pytest.mark.parametrize(("module", "name", "home"), NAMES)
def test_names_are_where_horovod_has_them(module, name, home):
    assert getattr(importlib.import_module(module), name) is getattr(importlib.import_module(home), name)


@pytest.mark.usefixtures("horovod_alias")
def test_the_older_names_of_the_discovery():
    older = importlib.import_module("horovod.ray.elastic").RayHostDiscovery
    older(use_gpu=True, cpus_per_slot=1, gpus_per_slot=2)
    for name in ("cpus", "gpus"):
        with pytest.raises(ValueError, match=f"{name}_per_worker is 0, but must be a positive"):
            older(True, **{f"{name}_per_slot": 0})


@pytest.mark.usefixtures("horovod_alias")
@pytest.mark.parametrize("name", ["horovod.ray.strategy", "horovod.ray.utils", "horovod.ray.driver_service"])
def test_a_module_that_we_do_not_have(name):
    with pytest.raises(ModuleNotFoundError, match=rf"does not have {re.escape(name)}$"):
        importlib.import_module(name)


@pytest.mark.usefixtures("horovod_alias")
def test_a_name_that_we_do_not_have():
    module = importlib.import_module("horovod.ray")
    assert module.HvdTrainer.__module__.startswith("hvd_cluster.ray.")
    with pytest.raises(AttributeError, match=r"does not have horovod\.ray\.nothing$"):
        module.nothing  # noqa: B018  the access is what is tested
    with pytest.raises(ImportError, match=r"does not have horovod\.ray\.runner\.StaticAdapter$"):
        exec("from horovod.ray.runner import StaticAdapter")
