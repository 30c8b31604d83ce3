"""Pages that show a script, commands and their output: all is typed as it stands there, and the output is like it."""

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

SCRIPT = re.compile(
    r"[Ss]ave this as `(\w+\.\w+)`(?:(?!\n\n).)*:\n\n(?:<!-- [a-z: ]+ -->\n)?^```\w+\n(.*?)^```$", re.M | re.S
)
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)+)", re.MULTILINE)
"""A command with output; those without were not typed."""
SHOWN = [page for page in PAGES if "<!-- run: typed -->" in page.read_text()]
SECONDS = 250


def like(text):
    """The lines, without their numbers and the name of the host."""
    text = re.sub(r" on \S+:", " on HOST:", re.sub(r"-?\d+(\.\d+)?(e-?\d+)?", "N", text))
    return Counter(line.strip() for line in re.split(r"[\r\n]+", text) if line not in ("", "..."))


@pytest.fixture
def environment():
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": startup.PATH, "RAY_AUTH_MODE": "disabled"}


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("page", SHOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_shows_is_what_it_gets(page, tmp_path, environment):
    text = page.read_text()
    scripts = SCRIPT.findall(text)
    commands = [each for block in CONSOLE.findall(text) for each in COMMAND.findall(block)]
    assert len(scripts) == text.count("<!-- run: typed -->")
    assert commands
    for name, code in scripts:
        skip_without(code)
        (tmp_path / name).write_text(code)
    for command, output in commands:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=SECONDS,
        )
        assert not like(output) - like(done.stdout), done.stdout


def skip_without(code):
    """Skip where a module that the script imports is not installed."""
    for module in re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE):
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    if "pyspark" in code and not shutil.which("java"):
        pytest.skip("Spark needs Java")
