"""The wheel: one package, which works beside other distributions with packages of the names of ours."""

import ast
import os
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.doc_blocks import ROOT
from tests.from_wheel import PARTS, build

SCRIPT = """
import numpy as np
import hvd_cluster
from hvd_cluster.core import basics
from hvd_cluster.ops.objects import allgather_object

def train():
    basics.init()
    return sum(allgather_object(basics.rank() + 1))

if __name__ == "__main__":
    assert hvd_cluster.run(train, num_proc=2) == [3, 3]
    print("trained with", hvd_cluster.__file__)
"""
LOG = """
import logging
from hvd_cluster.core import basics
basics.init()
logging.getLogger("hvd_cluster._collectives.engine").warning("once")
"""

# setuptools 77 knows licenses as SPDX expressions; pip would fetch it into an environment of its own.
pytestmark = pytest.mark.skipif(
    tuple(map(int, version("setuptools").split(".")[:1])) < (77,),
    reason="pip install 'setuptools>=77' builds the wheel",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The interpreter of an environment with the wheel, the libraries of this one, and hostile neighbours."""
    home = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    python = home / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(home), "platbase": str(home)}))
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    for name in ("collectives", "executors"):
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("raise RuntimeError('another distribution')")
    # A path in a .pth file is no place where further .pth files count, such as that of an editable installation.
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    return python


def run(python, *arguments, **variables):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, *arguments],
        capture_output=True,
        text=True,
        cwd=python.parent,
        env={**environment, **variables},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def test_the_wheel_has_one_package(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = [name for name in file.namelist() if ".dist-info/" not in name]
        assert file.read(next(name for name in file.namelist() if name.endswith("top_level.txt"))) == b"hvd_cluster\n"
    sources = [path for name in PARTS[:3] for path in (ROOT / name).rglob("*.py")]
    assert {name.split("/")[0] for name in names} == {"hvd_cluster"}
    assert len([name for name in names if name.endswith(".py")]) == len(sources)
    assert "hvd_cluster/_executors/dashboard/page.html" in names


def test_nothing_in_it_imports_the_packages_of_the_checkout(wheel):
    with zipfile.ZipFile(wheel) as file:
        for name in (name for name in file.namelist() if name.endswith(".py")):
            for node in ast.walk(ast.parse(file.read(name))):
                imported = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
                imported += [each.name for each in node.names] if isinstance(node, ast.Import) else []
                text = [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
                assert not {each.split(".")[0] for each in imported} & {"collectives", "executors"}, name
                assert not [each for each in text if each.startswith(("collectives.", "executors."))], name


def test_a_job_trains_beside_other_distributions(python, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = run(python, script)
    assert f"trained with {python.parents[1]}" in done.stdout
    done = run(
        python, "-m", "hvd_cluster", "-np", "2", python, "-c", "from hvd_cluster.core import basics; basics.init()"
    )
    assert "Traceback" not in done.stderr
    for module in ("hvd_cluster.cli.hvdrun", "hvd_cluster.top", "hvd_cluster.diagnose", "hvd_cluster.horovod"):
        run(python, "-c", f"import {module}")


def test_a_record_of_the_log_comes_once(python):
    done = run(python, "-c", LOG)
    assert done.stderr.count("once") == 1
