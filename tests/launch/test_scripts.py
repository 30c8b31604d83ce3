"""The scripts of docs/launch: shellcheck has nothing against them, and the programs know their options."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hvd_cluster.cli.flags import all_flags
from tests.launch.launch_files import FILES, java, shellcheck

SCRIPTS = sorted([*FILES.rglob("*.sbatch"), *FILES.rglob("*.sh")])
SPARK_SUBMIT = Path(sys.executable).with_name("spark-submit")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_has_no_objection(path: Path) -> None:
    assert path.read_text().startswith("#!/bin/bash\n")
    assert shellcheck(path.read_text(), "bash") == []


def test_shellcheck_would_object() -> None:
    assert shellcheck("#!/bin/bash\nrm -r $1\n", "bash") == [
        "line 2: Double quote to prevent globbing and word splitting."
    ]


@pytest.mark.parametrize("path", [path for path in SCRIPTS if path.suffix == ".sbatch"], ids=lambda path: path.name)
def test_options_of_sbatch_stand_before_the_first_command(path: Path) -> None:
    """sbatch ignores those that come later."""
    head, _, rest = path.read_text().partition("set -euo pipefail\n")
    assert len(re.findall(r"^#SBATCH --[a-z-]+", head, re.MULTILINE)) >= 6
    assert rest
    assert "#SBATCH" not in rest


def test_hvdrun_has_the_options_of_the_elastic_job() -> None:
    text = (FILES / "slurm" / "elastic.sbatch").read_text()
    call = re.search(r"^hvdrun .*?[^\\]$", text, re.MULTILINE | re.DOTALL)[0]
    given = set(re.findall(r"(?<= )--?[A-Za-z][a-z-]*", call.partition(" python ")[0]))
    assert given == {"-np", "--min-np", "--blacklist-cooldown-range"}
    assert given <= {option for flag in all_flags() for option in flag.options}


@pytest.mark.skipif(not (SPARK_SUBMIT.exists() and java()), reason="needs PySpark and Java")
def test_spark_submit_has_the_options_of_the_script() -> None:
    given = re.findall(r"^ +(--[a-z-]+) ", (FILES / "yarn" / "submit.sh").read_text(), re.MULTILINE)
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    run = subprocess.run(
        [SPARK_SUBMIT, "--help"], capture_output=True, text=True, check=False, timeout=100, env=environment
    )
    assert len(given) > 6
    assert set(given) <= set(re.findall(r"--[a-z-]+", run.stdout + run.stderr))


def test_no_key_is_in_a_mapping_twice() -> None:
    """Which yaml.safe_load does not notice."""
    for path in FILES.rglob("*.yaml"):
        for document in yaml.compose_all(path.read_text()):
            _no_key_twice(document, path)


def _no_key_twice(node: yaml.Node, path: Path) -> None:
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), (path, keys)
        for _, value in node.value:
            _no_key_twice(value, path)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _no_key_twice(value, path)
