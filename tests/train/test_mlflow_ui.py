"""MLflow's own pages of a run, in a real browser: what people see first, and the digits that it drew."""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from ddpm_ds.processes.ranks import free_port
from tests.browser import CHROMIUM, PATIENCE_SECONDS, Browser
from tests.launching import wait_for
from tests.train.test_runs import TINY, train

CHARTS = r"[...document.body.innerText.matchAll(/\((\w+\/\w+)\)/g)].map((found) => found[1])"
TAB = """[...document.querySelectorAll("[role=tab], a")].find((part) => part.textContent === "Model metrics")"""
DRAWN = """(() => {
  const picture = document.querySelector("%s");
  if (!picture || !picture.complete || !picture.naturalWidth) return null;
  const box = picture.getBoundingClientRect();
  return [picture.src, box.left, box.top, box.right, box.bottom];
})()"""
IN_CARD, ENLARGED = DRAWN % ".rc-image img", DRAWN % ".rc-image-preview-img"


@contextmanager
def served(command: str, port: int) -> Iterator[None]:
    """MLflow's UI, by the command that a run prints."""
    process = subprocess.Popen([*shlex.split(command), "--port", str(port), "--workers", "1"], start_new_session=True)

    def answers() -> bool:
        try:
            urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
        except OSError:
            return False
        return True

    try:
        wait_for(answers, running=lambda: process.poll() is None, pause=0.5)
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)


def seen(browser: Browser, script: str, path: Path) -> npt.NDArray[np.float64]:
    """The pixels of a picture on the screen, once it is there and does not move, in shades of grey."""
    before = None
    while (place := browser.wait_for(script)) != before:
        before = place
        time.sleep(1.0)
    with Image.open(browser.screenshot(path)) as screen:
        left, top, right, bottom = (round(edge) for edge in place[1:])
        return np.asarray(screen.convert("L").crop((left, top, right, bottom)), np.float64)


def likeness(shown: npt.NDArray[np.float64], picture: Path) -> float:
    """The correlation of what is shown with a picture scaled to its size."""
    with Image.open(picture) as image:
        expected = np.asarray(image.convert("L").resize((shown.shape[1], shown.shape[0])), np.float64)
    return float(np.corrcoef(shown.ravel(), expected.ravel())[0, 1])


@pytest.mark.launch
@pytest.mark.needs_programs(CHROMIUM)
def test_the_printed_address_shows_the_losses_first_and_the_digits_that_were_drawn(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    done = train(1, folder, overrides=[*TINY, "train.images=3200", "samples.every_images=3200"])
    assert done.returncode == 0, done.stderr[-4000:]
    rows = dict(re.findall(r"^(serve it with|open it at) +(.*)$", done.stdout, re.MULTILINE))
    port = free_port()
    with served(rows["serve it with"], port), Browser(tmp_path / "profile", 1600, 1600) as browser:
        browser.open(rows["open it at"].replace(":5000/", f":{port}/"))
        browser.wait_for(f"Boolean({TAB})")
        browser.wait_for("document.body.innerText.includes('digits-8px')")
        browser.click(TAB)
        browser.wait_for(f"{CHARTS}.length > 3")
        charts = browser.ask(CHARTS)
        assert charts[:3] == ["eval/loss", "perf/images_per_second", "train/loss"]
        assert "perf/run_seconds" not in charts, "a single number is no chart"
        first, last = (folder / "samples" / f"images-{images:09}.png" for images in (0, 3200))
        at_first = browser.wait_for(IN_CARD)[0]
        browser.ask("document.querySelector('[role=slider]').focus()")
        browser.press("ArrowRight", 39)  # to the next picture, which is the last
        browser.wait_for(f"({IN_CARD} ?? ['{at_first}'])[0] !== '{at_first}'")
        browser.click("document.querySelector('.rc-image')")
        shown = seen(browser, ENLARGED, tmp_path / "screen.png")
        assert likeness(shown, last) > 0.9 > likeness(shown, first)
