"""A Chromium without a window, driven by its DevTools protocol over one socket, which ends it when closed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
from itertools import count
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

__all__ = ["EXECUTABLE", "FLAGS", "Browser", "BrowserError"]

EXECUTABLE = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # a request of the page to another host fails at once
    "--js-flags=--liftoff-only",  # a large program in WebAssembly that runs once starts in half of the time
]
INHERIT = 'exec "$0" "$@" 3<&0 4>&0 </dev/null'
"""Chromium speaks the protocol on descriptors 3 and 4."""
END_SECONDS = 10.0
CHUNK = 1 << 20


class BrowserError(RuntimeError):
    """Chromium has ended, does not answer, or reports an error in the page."""


class Browser:
    """A browser with one empty page of ``size`` pixels, whose profile is in ``folder``; a context manager.

    Each answer takes ``seconds`` at most.
    """

    def __init__(self, folder: Path, size: tuple[int, int] = (1280, 800), seconds: float = 60.0) -> None:
        if EXECUTABLE is None:
            raise BrowserError("there is no Chromium; install it: apt-get install chromium")
        self._seconds = seconds
        self._numbers = count(1)
        self._socket, theirs = socket.socketpair()
        self._buffer = bytearray()
        shape = f"--window-size={size[0]},{size[1]}"
        flags = [*FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder}", shape]
        command = ["sh", "-c", INHERIT, EXECUTABLE, *flags, "about:blank"]
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
            )

    def __enter__(self) -> Browser:
        try:
            self._session = self._attach()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the browser."""
        self._socket.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def open(self, url: str) -> None:
        """Go to ``url``; its scripts may still run afterwards."""
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of ``expression`` in the page, which JSON can express; if it is a promise, its value.

        Raises BrowserError with the exception of the page.
        """
        made = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in made:
            raise BrowserError(f"the page raised {made['exceptionDetails']['exception'].get('description', made)}")
        return made["result"].get("value")

    def screenshot(self) -> bytes:
        """A picture of the page, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a method of the protocol in the page."""
        return self._call(method, parameters, {"sessionId": self._session})

    def _attach(self) -> str:
        targets = self._call("Target.getTargets", {}, {})["targetInfos"]
        (page,) = [target["targetId"] for target in targets if target["type"] == "page"]
        attached = self._call("Target.attachToTarget", {"targetId": page, "flatten": True}, {})
        return attached["sessionId"]

    def _call(self, method: str, parameters: dict[str, Any], about: dict[str, str]) -> dict[str, Any]:
        number, deadline = next(self._numbers), monotonic() + self._seconds
        message = {"id": number, "method": method, "params": parameters, **about}
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\0")
            while (answer := self._receive(deadline)).get("id") != number:
                pass  # an event
        except OSError as error:
            raise BrowserError(f"Chromium does not answer {method}: {error}") from error
        if "error" in answer:
            raise BrowserError(f"Chromium refuses {method}: {answer['error']['message']}")
        return answer["result"]

    def _receive(self, deadline: float) -> dict[str, Any]:
        """The next message."""
        while (end := self._buffer.find(b"\0")) < 0:
            self._socket.settimeout(max(0.001, deadline - monotonic()))
            chunk = self._socket.recv(CHUNK)
            if not chunk:
                raise ConnectionResetError("it has ended")
            self._buffer += chunk
        message, self._buffer = self._buffer[:end], self._buffer[end + 1 :]
        return json.loads(message)
