"""A real headless browser, spoken to in the DevTools protocol over a pipe."""

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

# The protocol's pipe is where a process has its files 3 and 4.
_AT_3_AND_4 = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for place, end in enumerate(ends, 3):
    os.dup2(end, place)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find() -> str | None:
    """The first browser of the Chromium family on the path."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a running browser.

    Attributes:
      events: what the page has reported, such as requests and console messages.
    """

    def __init__(self, commands: IO[bytes], answers: IO[bytes]):
        self._commands = commands
        self._answers = answers
        self._number = 0
        self._rest = b""
        self.events: list[dict[str, Any]] = []
        created = self._call("Target.createTarget", None, url="about:blank")
        attached = self._call(
            "Target.attachToTarget", None, targetId=created["targetId"], flatten=True
        )
        self._session: str = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._call(method, self._session, **parameters)

    def open(self, page: Path, width: int, scheme: str) -> None:
        """Loads a file in a window of this width, for "light" or "dark"."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._read()

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives, as JSON has it."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self, path: Path) -> None:
        """The whole page as a PNG file."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        """Ends the browser and all of its processes."""
        self._call("Browser.close", None)

    def _call(self, method: str, session: str | None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._answers.fileno(), 1 << 16)
            assert more, "the browser has gone"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        found = json.loads(message)
        if "method" in found:
            self.events.append(found)
        return found


@contextmanager
def running(program: str, folder: Path) -> Iterator[Browser]:
    """A browser with a profile of its own below `folder`."""
    from_us, commands = os.pipe()
    answers, to_us = os.pipe()

    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
    quiet = ("--no-first-run", "--disable-background-networking", "--disable-sync")
    command = [program, *options, *quiet, f"--user-data-dir={folder}", "--remote-debugging-pipe"]
    process = subprocess.Popen(
        [sys.executable, "-c", _AT_3_AND_4, str(from_us), str(to_us), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(from_us, to_us),
    )
    os.close(from_us)
    os.close(to_us)
    with os.fdopen(commands, "wb") as out, os.fdopen(answers, "rb") as back:
        try:
            browser = Browser(out, back)
            yield browser
            browser.close()
            process.wait(timeout=20)
        finally:
            process.kill()
            process.wait()
