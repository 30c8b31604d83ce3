"""The command horovodrun, as pip installs it from its own distribution."""

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from hvd_cluster import __version__
from tests import startup

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "hvd_cluster" / "horovod" / "command"
SECONDS = 60
OPTIONS = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where it is installed, from a copy, because pip builds beside the source."""
    pytest.importorskip("setuptools", "77")
    copy, target = tmp_path_factory.mktemp("source") / "command", tmp_path_factory.mktemp("target")
    shutil.copytree(SOURCE, copy)
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *OPTIONS, "--target", target, copy], check=True, timeout=SECONDS
    )
    return target


def horovodrun(folder, *arguments):
    """Its standard output."""
    environment = {**os.environ, "PYTHONPATH": startup.PATH, "OMP_NUM_THREADS": "1"}
    command = [folder / "bin" / "horovodrun", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_a_command(folder):
    assert horovodrun(folder, "--version") == f"{__version__}\n"


def test_its_ranks_have_the_alias(folder):
    script = "import horovod; assert horovod.__version__.endswith('+hvd.cluster'); print('here')"
    out = horovodrun(folder, "-np", "2", sys.executable, "-c", script)
    assert sorted(out.splitlines()) == ["[0]<stdout>:here", "[1]<stdout>:here"]


def test_only_the_extra_brings_it(folder):
    (found,) = metadata.distributions(path=[str(folder)])
    assert (found.name, found.version) == ("hvd-cluster-horovodrun", __version__)
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^horovodrun = \["hvd-cluster-horovodrun"\]$', project, re.MULTILINE)
    assert "horovodrun" not in project.partition("[project.scripts]")[2]
