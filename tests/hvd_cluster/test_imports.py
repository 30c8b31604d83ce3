"""Imports: files of the user that are called like our packages, and the framework of a binding."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_cluster.imports import binding_of
from tests import startup

ROOT = Path(__file__).parents[2]


def import_beside(folder):
    (folder / "script.py").write_text("import hvd_cluster\n")
    return subprocess.run(
        [sys.executable, folder / "script.py"],
        env={**os.environ, "PYTHONPATH": startup.PATH},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("path", "kind"), [("executors.py", "file"), ("collectives.py", "file"), ("collectives/__init__.py", "folder")]
)
def test_what_hides_a_package_of_ours_is_named(tmp_path, path, kind):
    hiding = tmp_path / path
    hiding.parent.mkdir(exist_ok=True)
    hiding.write_text("raise RuntimeError('never imported')\n")
    finished = import_beside(tmp_path)
    assert finished.returncode == 1
    name = path.removesuffix("/__init__.py").removesuffix(".py")
    said = finished.stderr.splitlines()[-1]
    assert said.startswith(f"ImportError: {hiding} hides the package '{name}' of hvd-cluster, which is in {ROOT}: ")
    assert f"Rename that {kind}" in said


def test_a_folder_without_init_hides_nothing(tmp_path):
    (tmp_path / "executors").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    assert import_beside(tmp_path / "link").stderr == ""


@pytest.fixture
def collector():
    was_enabled = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.usefixtures("collector")
def test_no_garbage_is_collected_during_the_imports():
    with binding_of("torch", "it needs PyTorch", "torch"):
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.usefixtures("collector")
def test_a_collector_that_was_off_stays_off():
    gc.disable()
    with binding_of("torch", "it needs PyTorch", "torch"):
        pass
    assert not gc.isenabled()


@pytest.mark.usefixtures("collector")
def test_another_error_stays_as_it_is():
    with (
        pytest.raises(ModuleNotFoundError, match="no module of the framework"),
        binding_of("torch", "it needs PyTorch", "torch"),
    ):
        raise ModuleNotFoundError("no module of the framework", name="numpy")
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("framework", "message"),
    [
        ("torch", 'hvd_cluster.torch needs PyTorch: pip install "hvd-cluster[torch]"'),
        ("tensorflow", 'hvd_cluster.tensorflow needs TensorFlow: pip install "hvd-cluster[tensorflow]"'),
        ("keras", 'hvd_cluster.keras needs Keras 3: pip install "hvd-cluster[tensorflow]"'),
    ],
)
def test_a_missing_framework_has_a_remedy(framework, message):
    script = f"import sys; sys.modules[{framework!r}] = None\nimport hvd_cluster.{framework}"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False)
    assert result.stderr.splitlines()[-1] == f"ImportError: {message}"
    assert result.returncode == 1
