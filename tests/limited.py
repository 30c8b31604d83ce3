"""A Python process that may open few descriptors."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 60.0

_PREAMBLE = """
import logging, resource, sys
logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
def limit_descriptors(number):
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, number))
"""


@contextmanager
def python(source: str) -> Iterator[subprocess.Popen[str]]:
    """Run ``source``, which may call ``limit_descriptors``, with pipes to its three streams; end it at the end."""
    command = [sys.executable, "-c", _PREAMBLE + textwrap.dedent(source)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def ending(process: subprocess.Popen[str]) -> tuple[str, list[str]]:
    """Close the input of ``process`` and wait for it: the rest of its output, and the lines of its log."""
    output, log = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, log
    return output, log.splitlines()
