"""Pages that show a script, commands and their output: all is typed as it stands there, and the output is like it.

Each part of the tests has a module for the pages of its framework; see ``pages``.
"""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec

import pytest

from tests import startup
from tests.doc_blocks import PAGES, ROOT

NAME = re.compile(r"(?:[Ss]ave this|the other one) as `(\w+\.py)`")
SCRIPT = re.compile(r"^<!-- run: typed -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)+)", re.MULTILINE)
"""A command with output; those without were not typed."""
MARK = "<!-- run: typed -->"
CLUSTERS = ("ray", "pyspark")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
SECONDS = 250
PROGRAMS = os.path.dirname(sys.executable)


def like(text):
    """The lines, without their numbers and the name of the host."""
    text = COLOURS.sub("", text)
    text = re.sub(r" on \S+:", " on HOST:", re.sub(r"-?\d+(\.\d+)?(e-?\d+)?", "N", text))
    return Counter(line.strip() for line in re.split(r"[\r\n]+", text) if line not in ("", "..."))


def pages(cluster=None):
    """The pages whose scripts use ``cluster``, one of CLUSTERS, or none of them."""
    shown = [page for page in PAGES if MARK in page.read_text()]
    return [page for page in shown if cluster == next(iter(_imports(page.read_text()) & set(CLUSTERS)), None)]


def _imports(text):
    return set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE))


def name_of(page):
    """For the names of tests."""
    return str(page.relative_to(ROOT))


def check(page, folder, programs=PROGRAMS, python_path=startup.PATH):
    """Save the scripts of ``page`` in ``folder``, and run the commands of the page there.

    ``programs`` is the folder of an environment with its commands, and ``python_path`` the PYTHONPATH.
    """
    text = page.read_text()
    scripts = list(zip(NAME.findall(text), SCRIPT.findall(text), strict=True))
    assert len(scripts) == text.count(MARK)
    for name, code in scripts:
        (folder / name).write_text(code)
    commands = [each for block in CONSOLE.findall(text) for each in COMMAND.findall(block)]
    assert commands
    for command, output in commands:
        printed = _run(command, folder, programs, python_path)
        assert not like(output) - like(printed), printed


def _run(command, folder, programs, python_path):
    path = os.pathsep.join([programs, os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": python_path, "RAY_AUTH_MODE": "disabled"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    bash = ["bash", "-c", command]
    return subprocess.run(bash, cwd=folder, env=environment, check=False, timeout=SECONDS, **streams).stdout


def skip_without(page):
    """Skip where a module that a script of ``page`` imports is not installed."""
    modules = _imports("".join(SCRIPT.findall(page.read_text())))
    for module in modules:
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    if "pyspark" in modules and not shutil.which("java"):
        pytest.skip("Spark needs Java")
