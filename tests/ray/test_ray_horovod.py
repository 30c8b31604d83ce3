"""Scripts for Horovod on Ray: the alias of the driver reaches the workers, and what they start."""

import importlib
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
    executor = executor_class(executor_class.create_settings(), num_workers=1)
    executor.start(executable_cls=Trainer)
    with executor:
        assert executor.execute(modules) == [("hvd_cluster.torch", "hvd_cluster.torch")]


@pytest.mark.usefixtures("horovod_alias")
def test_a_module_that_we_do_not_have():
    with pytest.raises(ModuleNotFoundError, match=r"does not have horovod\.ray\.runner"):
        importlib.import_module("horovod.ray.runner")
