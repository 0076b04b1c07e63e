"""The page of a comparison: alone it holds everything, and in a real browser it works and complains of nothing."""

from __future__ import annotations

import base64
import html
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ddpm_ds.experiments.compare import comparison
from ddpm_ds.experiments.compare_pages import MOST_PICTURE_BYTES, PNG, fewer, page
from ddpm_ds.tracking.runs import Point
from tests.browser import CHROMIUM, FLAGS, chromium
from tests.experiments.planted_runs import HeldRun, held, losses

BROWSER_SECONDS = 120
HOSTILE = "\"'></script></style><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
DOT = PNG + bytes.fromhex(
    "0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360606060000000050001a5f645400000000049454e44ae426082"
)
DRIVER = """
const said = {};
const change = (id, value) => {
  byId(id).value = value;
  byId(id).dispatchEvent(new Event("change"));
};
const names = (selector) => [...document.querySelectorAll(selector)].map((part) => part.textContent);
const courses = () => document.querySelectorAll(".course").length;
const columns = () => names("thead th:not([hidden]) .name");
said.courses = courses();
document.querySelectorAll("#legend input")[1].click();
said.without_second = [courses(), columns(), byId("shown").textContent];
byId("none").click();
said.none = [courses(), columns()];
byId("all").click();
change("order", "perf/images_per_second");
said.fastest_first = [columns(), names("#legend .name")];
plot.dispatchEvent(new KeyboardEvent("keydown", { key: "End" }));
said.read_out = [byId("readout").firstChild.textContent, ...names("#readout td:nth-child(n + 2)")];
change("axis", "time");
plot.dispatchEvent(new KeyboardEvent("keydown", { key: "End" }));
said.time = [courses(), byId("readout").firstChild.textContent];
byId("logarithmic").click();
said.logarithmic = courses();
const box = plot.getBoundingClientRect();
plot.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + box.width / 2, clientY: box.top + 50 }));
said.pointed = document.querySelectorAll("#readout tr").length;
const told = document.createElement("pre");
told.id = "said";
told.textContent = JSON.stringify(said);
document.body.append(told);
"""


def three() -> list[HeldRun]:
    """A baseline, one twice as fast that says hostile things, and one that failed early."""
    speeds = {"perf/images_per_second": [50.0, 100.0, 100.0]}
    tags = {"mlflow.note.content": HOSTILE, "verdict.top": HOSTILE, "verdict.try": HOSTILE}
    twice = {"train/loss": losses(60, floor=0.02), "perf/images_per_second": [100.0, 200.0, 200.0]}
    return [
        held("plain", {"train/loss": losses(60), **speeds}, params={"derived.precision": "fp32"}),
        held(HOSTILE, twice, params={"derived.precision": HOSTILE}, tags=tags, pictures={"trace/step_20.png": DOT}),
        held("dead", {"train/loss": [0.9, float("nan")]}, status="FAILED"),
    ]


def opened(path: Path, profile: Path) -> tuple[str, list[str]]:
    """A page's elements after its scripts have run, and what the browser's console says."""
    flags = [*FLAGS, f"--user-data-dir={profile}"]
    flags += ["--enable-logging=stderr", "--v=0", "--virtual-time-budget=2000", "--window-size=1200,900"]
    done = subprocess.run(
        [chromium(), *flags, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=BROWSER_SECONDS
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_the_page_asks_for_nothing_from_elsewhere() -> None:
    text = page(comparison(three()))
    assert re.findall(r"https?://[^\"'\s]+", text) == ["http://www.w3.org/2000/svg"]
    assert {source[:15] for source in re.findall(r'\ssrc="([^"]*)"', text)} == {"data:image/png;"}
    assert not re.search(r"<(link|iframe|object|embed|base)\b|@import|url\(", text)
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-" in text


def test_what_users_wrote_is_text_wherever_it_stands() -> None:
    text = page(comparison(three()))
    assert HOSTILE not in text and text.count("<script") == 2 and text.count("<img") == 1
    assert html.unescape(text).count(HOSTILE) >= 6  # legend, header, parameter, note, verdict, change
    data = json.loads(re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[0])
    assert [run["label"] for run in data["runs"]] == ["plain", HOSTILE, "dead"]
    assert data["metrics"][0]["name"] == "train/loss" and data["metrics"][0]["curves"][2]["values"] == [0.9, None]


def test_fifty_runs_have_fifty_kinds_of_line() -> None:
    runs = [held(f"cell-{number}", {"train/loss": losses(2000)}) for number in range(50)]
    text = page(comparison(runs))
    data = json.loads(re.findall(r'id="data">(.*?)</script>', text, re.DOTALL)[0])
    assert len({(run["colour"], run["dash"]) for run in data["runs"]}) == 50
    assert len(text) < 3_000_000


def test_thinned_curves_keep_every_peak() -> None:
    points = [Point(step, step, 1.0) for step in range(1, 10_001)]
    points[4321] = Point(4322, 4322, 99.0)
    points[7000] = Point(7001, 7001, -5.0)
    kept = fewer(points, 100)
    assert len(kept) <= 100 and {points[0], points[4321], points[7000]} <= set(kept)
    assert kept == sorted(kept)


def test_the_latest_samples_of_each_run_stand_side_by_side() -> None:
    def named(step: int, at: int, suffix: str = "png") -> str:
        return f"images/eval#samples_ema%step%{step}%timestamp%{at}%1234.{suffix}"  # as MLflow names them

    drawn = [PNG + name for name in (b"early", b"before the rollback", b"latest", b"other")]
    pictures = dict(zip((named(900, 3), named(1000, 1), named(1000, 2), "images/else.png"), drawn, strict=True))
    runs = [held("one", {"train/loss": losses(3)}, pictures=pictures | {named(1000, 4, "webp"): b"small"})]
    runs += [
        held("two", {"train/loss": losses(3)}, pictures={named(20, 1): drawn[0]}),
        held("none", {"train/loss": losses(3)}),
    ]
    text = page(comparison(runs))
    found = re.findall(
        r'<div data-run="(\d)">\n<figure><figcaption>(\w+)</figcaption><img src="data:image/png;base64,(.*?)"', text
    )
    assert found == [
        (str(run), name, base64.b64encode(drawn[place]).decode()) for run, name, place in ((0, "one", 2), (1, "two", 0))
    ]
    assert text.index('class="cards"') < text.index("<figure"), "side by side"
    assert "Latest samples" not in page(comparison(runs[2:]))


def test_only_pictures_of_bounded_size_become_timelines() -> None:
    pictures = {"trace/a.png": DOT, "trace/b.png": b"<svg>", "trace/c.png": DOT + bytes(MOST_PICTURE_BYTES)}
    run = held("traced", {"train/loss": losses(3)}, pictures=pictures | {"trace/trace.json": b"{}"})
    text = page(comparison([run]))
    assert text.count("data:image/png;base64,") == 1 and "a.png" in text


@pytest.mark.needs_programs(CHROMIUM)
def test_a_browser_opens_the_page_without_a_complaint_and_what_users_wrote_does_nothing(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page(comparison(three())))
    elements, complaints = opened(path, tmp_path / "profile")
    assert complaints == []
    assert "<title>3 runs of digits</title>" in elements
    assert elements.count('class="course') == 3


@pytest.mark.needs_programs(CHROMIUM)
def test_a_page_of_many_runs_does_not_scroll_sideways_on_a_phone(tmp_path: Path) -> None:
    runs = [held(f"run-{number}", {"train/loss": losses(3, number)}) for number in range(12)]
    path = tmp_path / "page.html"
    driven = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page(comparison(runs)))
    frame = '<iframe width="400" height="900" srcdoc="' + html.escape(driven) + '"></iframe>'  # windows are wider
    said = """<script>onload = () => {
        const { scrollWidth, clientWidth } = document.querySelector("iframe").contentDocument.documentElement;
        document.title = `${scrollWidth - clientWidth} beyond ${Math.ceil(clientWidth / 100)}00`;
    }</script>"""
    path.write_text(f"<!doctype html><title></title>{frame}{said}")
    assert "<title>0 beyond 400</title>" in opened(path, tmp_path / "profile")[0]


@pytest.mark.needs_programs(CHROMIUM)
def test_runs_can_be_hidden_ordered_and_read_out(tmp_path: Path) -> None:
    runs = three()
    text = page(comparison([runs[0], held("fast", runs[1].points), runs[2]]))
    path = tmp_path / "page.html"
    driven = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)  # it would refuse the driver
    path.write_text(driven.replace("</body>", f"<script>{{{DRIVER}}}</script></body>"))
    elements, complaints = opened(path, tmp_path / "profile")
    assert complaints == []
    found = re.search(r'<pre id="said">(.*?)</pre>', elements, re.DOTALL)
    assert found is not None
    said: dict[str, Any] = json.loads(html.unescape(found[1]))
    assert said["courses"] == 3
    assert said["without_second"] == [2, ["plain", "dead"], "2 of 3 shown"]
    assert said["none"] == [0, []]
    assert said["fastest_first"] == [["fast", "plain", "dead"]] * 2
    plain, fast = (run.metrics["train/loss"] for run in runs[:2])
    assert said["read_out"] == ["38,400 images", "plain", f"{plain:.4g}", "fast", f"{fast:.4g}"]
    assert said["time"] == [3, "60 s"]
    assert said["logarithmic"] == 3 and said["pointed"] == 2
