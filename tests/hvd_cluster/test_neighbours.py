"""Files of the user that are called like our packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
