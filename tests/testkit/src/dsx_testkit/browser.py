"""A headless Chromium, spoken to over a pipe in its DevTools protocol: JSON messages that end with a zero byte.

The idea: the tests ask for a few things only (open a page at a width, evaluate an expression, hear of errors and of
what is loaded, take a picture), so a browser driver is not needed. No name but this machine's own is resolved: what a
page wants from the network fails, and is an error. Left out: everything else.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_browser() -> str | None:
    """The path of a Chromium, if this machine has one."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page of a headless Chromium. `errors` collects what its console calls errors, and exceptions; `requests` the
    addresses that it asks for.
    """

    def __init__(self, program: str) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        read_by_browser, self._to = os.pipe()
        self._from, written_by_browser = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
        flags += [f"--user-data-dir={self._folder.name}", "--disable-dev-shm-usage", "--disable-background-networking"]
        flags += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]

        def pipes() -> None:  # the protocol's file descriptors are 3 and 4
            os.dup2(read_by_browser, 33)
            os.dup2(written_by_browser, 34)
            os.dup2(33, 3)
            os.dup2(34, 4)

        self._process = subprocess.Popen(
            [program, *flags, "about:blank"], preexec_fn=pipes, close_fds=False, stderr=subprocess.DEVNULL
        )
        os.close(read_by_browser)
        os.close(written_by_browser)
        self._numbers, self._buffer, self._session = itertools.count(1), b"", None
        self.errors: list[str] = []
        self.requests: list[str] = []
        targets = self._call("Target.getTargets")["targetInfos"]
        target = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, address: str, width: int = 1200, dark: bool = False) -> None:
        """Load a page and wait until it is complete."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=scheme)
        self._loaded = False
        self._call("Page.navigate", url=address)
        while not self._loaded:
            self._receive()

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        done = self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in done:
            raise RuntimeError(f"{expression}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def picture(self) -> bytes:
        """What the page shows, as PNG."""
        return base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._folder.cleanup()

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._from, 1 << 16)
            if not part:
                raise RuntimeError("the browser ended")
            self._buffer += part
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(raw)
        method, params = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(str(params["entry"]))
        return message
