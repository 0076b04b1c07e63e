"""A real browser, headless, driven over a pipe by Chromium's own protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.launching import PATIENCE_SECONDS

CHROMIUM = "chromium|chromium-browser|google-chrome"
"""Names that it has in distributions."""
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]


def chromium() -> str:
    """The browser's program."""
    return next(name for name in CHROMIUM.split("|") if shutil.which(name))


class Browser:
    """One page of a browser whose profile is in ``profile``."""

    def __init__(self, profile: Path, width: int, height: int) -> None:
        hears, self._say = os.pipe()
        self._hear, says = os.pipe()
        flags = [*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}", "--remote-debugging-pipe"]
        shell = f'exec "$@" 3<&{hears} 4>&{says}'  # the protocol's descriptors
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", chromium(), *flags],
            pass_fds=[hears, says],
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(hears)
        os.close(says)
        self._number, self._session, self._heard = 0, "", b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._say)  # it ends when nobody is left to speak to it
        os.close(self._hear)
        self._process.terminate()
        self._process.wait(PATIENCE_SECONDS)

    def call(self, method: str, **params: Any) -> Any:
        """Return the answer to a command of the protocol."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": params}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._say, json.dumps(command).encode() + b"\0")
        while True:
            *messages, self._heard = self._heard.split(b"\0")
            answers = [json.loads(message) for message in messages]
            for answer in answers:
                if answer.get("id") == self._number:
                    assert "error" not in answer, answer
                    return answer["result"]
            chunk = os.read(self._hear, 1 << 20)
            assert chunk, "the browser has ended"
            self._heard += chunk

    def open(self, url: str) -> None:
        """Go to a page."""
        self.call("Page.navigate", url=url)

    def ask(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """Return the value of a JavaScript expression once it is true."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (value := self.ask(script)):
            assert time.monotonic() < deadline, f"{script}: {self.ask('document.body.innerText')}"
            time.sleep(0.2)
        return value

    def click(self, element: str) -> None:
        """Click the middle of the element that a JavaScript expression gives."""
        box = f"(({element}).scrollIntoView(), ({element}).getBoundingClientRect())"
        left, top = self.ask(f"[{box}.left + {box}.width / 2, {box}.top + {box}.height / 2]")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=left, y=top, button="left", clickCount=1)

    def press(self, key: str, code: int) -> None:
        """Press a key where the focus is."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path) -> Path:
        """Write what the page looks like."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
        return path
