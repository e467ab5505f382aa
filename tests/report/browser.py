"""A real browser for tests: chromium without a window, spoken to over a pipe in its DevTools protocol."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE = 60.0


class Browser:
    """One browser with one page; used as a context, so that it always ends.

    `trouble` has what went wrong on the page (errors, warnings of the console, refused requests), `requests`
    every address that the page asked for.
    """

    def __init__(self, folder: Path) -> None:
        assert PROGRAM is not None
        self.trouble: list[str] = []
        self.requests: list[str] = []
        self._number = 0
        self._session: str | None = None
        self._rest = b""
        down_read, self._down = os.pipe()
        self._up, up_write = os.pipe()
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder / 'profile'}",
        ]

        # The browser reads commands from descriptor 3 and writes answers to 4, whatever these are here.
        commands, answers = (fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in (down_read, up_write))
        script = f'exec 3<&{commands} 4>&{answers} {commands}<&- {answers}>&-; exec "$0" "$@"'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", script, PROGRAM, *flags, "about:blank"],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for each in (down_read, up_write, commands, answers):
            os.close(each)

    def __enter__(self) -> Browser:
        pages = [each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        answer = self.call("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)
        self._session = answer["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._session = None
            self.call("Browser.close")
            self._process.wait(10)
        except (OSError, subprocess.TimeoutExpired, EOFError):
            self._process.kill()
            self._process.wait()
        finally:
            os.close(self._down)
            os.close(self._up)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its answer; events that come in between are noted."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._down, json.dumps(message).encode() + b"\0")
        while True:
            found = self._receive()
            if found.get("id") == self._number:
                if "error" in found:
                    raise AssertionError(f"{method}: {found['error']}")
                return found["result"]
            self._note(found)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._up, 1 << 20)
            if not more:
                raise EOFError("the browser is gone")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        content = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                details = content["exceptionDetails"]
                self.trouble.append(str(details.get("exception", {}).get("description", details["text"])))
            case "Runtime.consoleAPICalled" if content["type"] in ("error", "warning", "assert"):
                self.trouble.append(" ".join(str(each.get("value", each)) for each in content["args"]))
            case "Log.entryAdded" if content["entry"]["level"] in ("error", "warning"):
                self.trouble.append(content["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(content["request"]["url"])
            case _:
                pass

    def open(self, path: Path, width: int = 1280, height: int = 900, *, phone: bool = False) -> None:
        """Load a file and wait until all its plots are there."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        self.call("Page.navigate", url=path.as_uri())
        self.wait("document.readyState === 'complete' && !!document.querySelector('main')")
        self.wait("[...document.querySelectorAll('.chart')].every(p => p.querySelector('.main-svg .trace'))")

    def run(self, script: str) -> Any:
        """The value of an expression in the page; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        self.until(lambda: self.run(condition), condition)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"waited {PATIENCE:.0f} s for {what}; trouble: {self.trouble}")
            time.sleep(0.02)

    def mouse(self, x: float, y: float, kind: str = "mouseMoved") -> None:
        pressed = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **pressed)

    def click(self, selector: str) -> None:
        """With a real press of the mouse in the middle of an element."""
        box = self.run(
            "(e => { e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        self.mouse(*box)
        self.mouse(*box, "mousePressed")
        self.mouse(*box, "mouseReleased")

    def screenshot(self, path: Path) -> None:
        """The whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self, path: Path) -> None:
        """As it is printed on A4."""
        printed = self.call("Page.printToPDF", preferCSSPageSize=True, printBackground=False)
        path.write_bytes(base64.b64decode(printed["data"]))
