"""A headless Chromium, driven by the DevTools protocol over a pipe: the browser is all that is needed for it."""

import base64
import json
import os
import select
import shutil
import signal
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
)
TIMEOUT = 30  # seconds that an answer may take
KEYS = {"ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Enter": 13, "Escape": 27, " ": 32, "Tab": 9}
SHIFT = 8


def executable() -> str | None:
    """The browser on the path, if there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One page of a browser of its own. ``problems``: errors that it or its scripts ran into; ``requests``: what it
    asked for."""

    def __init__(self, browser: str, profile: Path):
        ours, theirs = os.pipe(), os.pipe()  # what the browser reads from, and writes to
        ends = [
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_DUP2, ours[0], 3),
            (os.POSIX_SPAWN_DUP2, theirs[1], 4),
        ]
        command = [browser, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._pid = os.posix_spawn(browser, command, os.environ, file_actions=ends)
        os.close(ours[0])
        os.close(theirs[1])
        self._in, self._out = theirs[0], ours[1]
        self._read, self._sent, self._session = b"", 0, None
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.loaded = False
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def close(self) -> None:
        """End the browser."""
        os.kill(self._pid, signal.SIGTERM)
        os.waitpid(self._pid, 0)
        os.close(self._in)
        os.close(self._out)

    def open(self, path: Path) -> None:
        """Show a file, and wait until it is loaded."""
        self.loaded, self.problems, self.requests = False, [], []
        self._call("Page.navigate", url=path.as_uri())
        while not self.loaded:
            self._next()
        self.settle()

    def evaluate(self, expression: str):
        """The value of a JavaScript expression."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise AssertionError(found["exceptionDetails"]["exception"].get("description"))
        return found["result"].get("value")

    def settle(self) -> None:
        """Wait until what was changed is drawn."""
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def texts(self, selector: str) -> list[str]:
        """What the elements say that can be seen."""
        return self.evaluate(
            f"[...document.querySelectorAll({json.dumps(selector)})]"
            ".filter((e) => e.checkVisibility()).map((e) => e.innerText.trim())"
        )

    def point(self, selector: str, number: int = 0) -> None:
        """Move the mouse onto an element."""
        at = self._middle(selector, number)
        self._call("Input.dispatchMouseEvent", type="mouseMoved", **at)
        self.settle()

    def click(self, selector: str, number: int = 0) -> None:
        """Click on the middle of an element, as a mouse does."""
        at = self._middle(selector, number)
        self._call("Input.dispatchMouseEvent", type="mouseMoved", **at)
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)
        self.settle()

    def focus(self, selector: str) -> None:
        """Give an element the focus."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")

    def write(self, text: str) -> None:
        """Type into what has the focus."""
        self._call("Input.insertText", text=text)
        self.settle()

    def press(self, key: str, shift: bool = False) -> None:
        """Press a key."""
        code = {"key": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": SHIFT if shift else 0}
        typed = {"text": "\r"} if key == "Enter" else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", **code, **typed)
        self._call("Input.dispatchKeyEvent", type="keyUp", **code)
        self.settle()

    def resize(self, width: int, height: int) -> None:
        """Show the page in a window of this size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        self.settle()

    def prefer(self, scheme: str) -> None:
        """Be a reader who prefers a ``light`` or a ``dark`` page."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", features=features)
        self.settle()

    def keep_downloads(self, folder: Path) -> None:
        """Where to save what is downloaded."""
        session, self._session = self._session, None
        self._call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
        self._session = session

    def picture(self, path: Path, whole: bool = True) -> None:
        """Save what is seen, or the whole page, as PNG."""
        found = self._call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def _middle(self, selector: str, number: int) -> dict[str, float]:
        return self.evaluate(
            f"(() => {{ const e = document.querySelectorAll({json.dumps(selector)})[{number}];"
            "e.scrollIntoView({block: 'center', behavior: 'instant'}); const b = e.getBoundingClientRect();"
            "return {x: b.x + b.width / 2, y: b.y + b.height / 2}; })()"
        )

    def _call(self, method: str, **parameters):
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._sent:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _next(self):
        """The next message of the browser; events are noted."""
        end = time.monotonic() + TIMEOUT
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            part = os.read(self._in, 1 << 20) if ready else b""
            assert part, "the browser does not answer"
            self._read += part
        raw, _, self._read = self._read.partition(b"\0")
        message = json.loads(raw)
        said, about = message.get("params", {}), message.get("method")
        if about == "Page.loadEventFired":
            self.loaded = True
        elif about == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])
        elif about == "Runtime.exceptionThrown":
            self.problems.append(str(said["exceptionDetails"]))
        elif about == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.problems.append(str(said["args"]))
        elif about == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.problems.append(said["entry"]["text"])
        return message
