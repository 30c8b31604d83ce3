"""MXNet beside NumPy 2. Most of this needs no MXNet."""

import ast
import subprocess
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from hvd_cluster import install_mxnet, numpy_for_mxnet
from hvd_cluster.horovod import STARTUP
from tests.doc_blocks import blocks
from tests.test_architecture import SURFACE

needs_mxnet = pytest.mark.skipif(find_spec("mxnet") is None, reason="there is no MXNet: make test-mxnet has it")
ROOT = Path(__file__).parents[3]


def run(*arguments, **variables):
    command = [sys.executable, "-W", "ignore", *arguments]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, env=environment)


def test_the_removed_names_are_there_for_the_import_only():
    before = dict(vars(np))
    try:
        with numpy_for_mxnet.removed_names():
            assert (np.NaN, np.PINF, np.alltrue, np.in1d) == (np.NaN, np.inf, np.all, np.isin)
            with pytest.raises(AttributeError, match=r"numpy\.pmt does not exist in NumPy 2"):
                np.pmt()
        assert set(vars(np)) - set(before) <= {"Inf", "compat"}
        assert (np.Inf, np.compat.basestring) == (np.inf, str)
    finally:
        for name in set(vars(np)) - set(before):
            delattr(np, name)


def test_a_name_that_numpy_has_is_left_alone():
    own = np.trapezoid
    assert numpy_for_mxnet._set(np, {"trapezoid": None}) == []
    assert np.trapezoid is own


def test_the_finder_finds_mxnet_only(monkeypatch, tmp_path):
    (tmp_path / "mxnet.py").write_text("import numpy\nseen = numpy.NINF\n")
    monkeypatch.syspath_prepend(tmp_path)
    finder = numpy_for_mxnet.MXNetFinder()
    assert finder.find_spec("numpy") is None
    assert isinstance(finder.find_spec("mxnet"), ModuleSpec)
    script = (
        "from hvd_cluster.numpy_for_mxnet import register; register(); register()\n"
        "import sys, mxnet, numpy; print(mxnet.seen, hasattr(numpy, 'NINF'), type(mxnet.__spec__.loader).__name__)\n"
        "print(sum(type(each).__name__ == 'MXNetFinder' for each in sys.meta_path))"
    )
    done = run("-c", script, PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert done.stdout == "-inf False SourceFileLoader\n1\n", done.stderr


SENT = """
import hvd_cluster

def told():
    import mxnet
    return mxnet.seen

if __name__ == "__main__":
    print(hvd_cluster.run(told, num_proc=1))
"""


def test_a_function_that_is_sent_imports_mxnet_first(tmp_path):
    """From a process that has not imported the binding."""
    (tmp_path / "mxnet.py").write_text("import numpy\nseen = numpy.NINF\n")
    (tmp_path / "script.py").write_text(SENT)
    done = run(tmp_path / "script.py")
    assert done.stdout == "[-inf]\n", done.stderr


def test_the_start_up_file_of_the_alias_lets_mxnet_come_first(tmp_path):
    (tmp_path / "mxnet.py").write_text("import numpy\nseen = numpy.NINF\n")
    done = run("-c", "import mxnet; print(mxnet.seen)", PYTHONPATH=f"{STARTUP}:{tmp_path}")
    assert done.stdout == "-inf\n", done.stderr
    assert run("-c", "import mxnet.nothing", PYTHONPATH=STARTUP).returncode == 1


@pytest.mark.parametrize(
    ("version", "has_pip", "expected"),
    [
        ((3, 11), True, ["py -m pip install --no-deps mxnet==1.9.1", "py -m pip install requests graphviz"]),
        ((3, 12), True, ["py -m pip install --no-deps mxnet==1.9.1", "py -m pip install requests graphviz setuptools"]),
        (
            (3, 10),
            False,
            [
                "uv pip install --python py --no-deps mxnet==1.9.1",
                "uv pip install --python py requests graphviz",
            ],
        ),
    ],
)
def test_the_commands_that_install_it(version, has_pip, expected):
    assert [" ".join(command) for command in install_mxnet.commands("py", version, has_pip)] == expected


def test_the_document_has_the_same_commands():
    text = (ROOT / "docs" / "mxnet.md").read_text()
    assert "python -m hvd_cluster.install_mxnet" in text
    for command in install_mxnet.commands("python", (3, 12), True):
        assert " ".join(command) in text


def test_what_a_missing_library_asks_for():
    error = "OSError: libquadmath.so.0: cannot open shared object file"
    assert "apt-get install libgomp1 libquadmath0" in install_mxnet.advice(error)
    assert "docs/mxnet.md" in install_mxnet.advice("ImportError: x")


def test_without_mxnet(tmp_path):
    (tmp_path / "mxnet.py").write_text("raise ModuleNotFoundError(\"No module named 'mxnet'\", name='mxnet')\n")
    done = run("-c", "import hvd_cluster.mxnet", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert "ImportError: hvd_cluster.mxnet needs MXNet, which cannot be imported (No module named" in done.stderr
    assert "python -m hvd_cluster.install_mxnet" in done.stderr


@needs_mxnet
def test_the_command_changes_nothing_where_it_is_installed():
    done = run("-m", "hvd_cluster.install_mxnet")
    assert (done.returncode, done.stdout) == (0, "MXNet 1.9.1 works: import hvd_cluster.mxnet as hvd\n"), done.stderr


ALIASED = """
import mxnet as mx
import horovod.mxnet as hvd
from horovod.mxnet.mpi_ops import allreduce_, Average, rank
from horovod.mxnet.functions import broadcast_parameters, broadcast_object, allgather_object
from horovod.mxnet.compression import Compression
import hvd_cluster.mxnet
assert hvd is hvd_cluster.mxnet
hvd.init()
print(hvd.allreduce(mx.nd.ones((2,)), op=hvd.Sum).asnumpy().tolist(), hvd.Compression is Compression, rank())
"""


@needs_mxnet
def test_horovods_modules(tmp_path):
    """With mxnet imported first, as scripts do."""
    done = run("-c", ALIASED, PYTHONPATH=STARTUP)
    assert done.stdout == "[1.0, 1.0] True 0\n", done.stderr


@needs_mxnet
def test_the_public_surface_is_a_decision():
    script = "import hvd_cluster.mxnet as hvd; print(*[name for name in hvd.__all__ if name in vars(hvd)])"
    assert sorted(run("-c", script).stdout.split()) == sorted(SURFACE["hvd_cluster.mxnet"])


@needs_mxnet
@pytest.mark.parametrize("block", blocks("mxnet"), ids=lambda block: block.name)
def test_a_block_of_the_documents_runs(block):
    done = run("-c", block.code)
    assert done.returncode == 0, done.stderr


MODULE = ROOT / "hvd_cluster" / "mxnet"
SIGNATURES = {
    "mpi_ops.allreduce": "tensor average name priority prescale_factor postscale_factor process_set op",
    "mpi_ops.allreduce_": "tensor average name priority prescale_factor postscale_factor process_set op",
    "mpi_ops.grouped_allreduce": "tensors average name priority prescale_factor postscale_factor process_set op",
    "mpi_ops.grouped_allreduce_": "tensors average name priority prescale_factor postscale_factor process_set op",
    "mpi_ops.allgather": "tensor name priority process_set",
    "mpi_ops.grouped_allgather": "tensors name priority process_set",
    "mpi_ops.broadcast": "tensor root_rank name priority process_set",
    "mpi_ops.broadcast_": "tensor root_rank name priority process_set",
    "mpi_ops.alltoall": "tensor splits name priority process_set",
    "mpi_ops.reducescatter": "tensor op name priority process_set prescale_factor postscale_factor",
    "mpi_ops.grouped_reducescatter": "tensors op name priority process_set prescale_factor postscale_factor",
    "functions.broadcast_parameters": "params root_rank prefix",
    "optimizer.DistributedOptimizer": "self optimizer gradient_predivide_factor num_groups process_set",
    "trainer.DistributedTrainer": "self params optimizer optimizer_params compression gradient_predivide_factor prefix "
    "num_groups process_set",
}
"""Horovod's, at its last commit."""


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_signature_is_that_of_horovod(name):
    module, _, function = name.partition(".")
    body = ast.parse((MODULE / f"{module}.py").read_text()).body
    found = next(node for node in body if getattr(node, "name", None) == function)
    if isinstance(found, ast.ClassDef):
        found = next(node for node in found.body if getattr(node, "name", None) == "__init__")
    assert [each.arg for each in found.args.args] == SIGNATURES[name].split()
