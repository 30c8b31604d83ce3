"""The process that searches, as seen by the tuner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

LIBRARY = "bayes_opt"
PROGRAM = "collectives.observe.autotune.searcher"
ROOT = str(Path(__file__).parents[__name__.count(".")])
NICENESS = "19"
"""Training has the cores first."""
END_SECONDS = 2.0


def is_available() -> bool:
    """Whether the library of the search is installed."""
    return find_spec(LIBRARY) is not None


class SearchError(Exception):
    """The search cannot go on; says why and what to do."""


class ProcessSearch:
    """Runs :mod:`collectives.observe.autotune.searcher`. Raises SearchError. For one thread, except :meth:`kill`.

    A call waits for the process, which takes a second or two. The owner aborts it by :meth:`kill`.
    """

    def __init__(self, knobs: int, noise: float) -> None:
        self._first = {"knobs": knobs, "noise": noise}
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._is_killed = False

    def suggest(self) -> list[float]:
        return [float(position) for position in self._ask({})]

    def register(self, positions: Sequence[float], score: float) -> None:
        self._ask({"positions": list(positions), "score": score})

    def _ask(self, request: dict[str, Any]) -> Any:
        if self._process is None:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the pipes
            self._process = _start(self._errors)
            self._exchange(self._first)
        return self._exchange(request)

    def _exchange(self, request: dict[str, Any]) -> Any:
        if self._is_killed:
            raise SearchError("the search for parameters was ended")
        requests, answers = self._pipes()
        try:
            requests.write(json.dumps(request).encode() + b"\n")
            answer = json.loads(answers.readline())
        except (OSError, ValueError) as error:
            raise SearchError(f"the process that searches for parameters has ended: {self._last_line()}") from error
        if "error" in answer:
            raise SearchError(f"the search for parameters failed: {answer['error']}")
        return answer["answer"]

    def _last_line(self) -> str:
        assert self._errors is not None
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        return process.stdin, process.stdout

    def kill(self) -> None:
        """End the process at once; from any thread. A call that waits for it raises."""
        self._is_killed = True
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
            self.disown()

    def disown(self) -> None:
        """In a forked child: close its copies of the pipes, of which an open one would keep the process alive."""
        if self._process is not None:
            for file in (*self._pipes(), self._errors):
                if file is not None:
                    file.close()


def _start(errors: IO[bytes]) -> subprocess.Popen[bytes]:
    paths = [ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    try:
        return subprocess.Popen(
            ["nice", "-n", NICENESS, sys.executable, "-m", PROGRAM],
            bufsize=0,  # a buffer has a lock, which a forked child must not take
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **threads},
            start_new_session=True,
        )
    except OSError as error:
        raise SearchError(f"the process that searches for parameters cannot be started: {error}") from error
