"""``ddpm-ds plan``: output, files and refusals."""

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from ddpm_ds.cli.main import make_parser
from ddpm_ds.config.ds_config import read_ds_config
from ddpm_ds.ground.errors import UserError
from tests.ds_json import laid_out
from tests.launching import tiny_spec, write_json
from tests.planning.small import ADAMW

SPEC = tiny_spec()


def plan(folder: Path, *options: str) -> None:
    """Run the verb on the tiny spec."""
    spec = folder / "spec.yaml"
    spec.write_text(yaml.safe_dump(json.loads(SPEC.model_dump_json(exclude_defaults=True))))
    path = write_json(folder / "ds.json", {"optimizer": ADAMW, "zero_optimization": {"stage": 2}})
    given = make_parser().parse_args(["plan", "--spec", str(spec), "--deepspeed_config", str(path), *options])
    given.verb.start(given)


def test_prints_the_best_and_writes_json_and_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    rates = ["--tflops", "1", "--bandwidth", "1MB/s", "--inter-node", "8Mbit/s", "--device-memory", "4GiB"]
    files = ["--out", str(out), "--timeline", str(picture)]
    plan(tmp_path, "--processes", "2", "--nodes", "2", "--device-kind", "l4", *rates, *files, "--top", "3")
    printed = capsys.readouterr().out
    assert "2 x l4 in 2 nodes: 1 TFLOP/s reached, 4 GiB each, 0.001 GB/s between devices, 0.001" in printed
    assert "across nodes" in printed and "across nodes: " in printed and "\n3 " in printed and "\n4 " not in printed
    assert "1 is the fastest of" in printed
    read = laid_out(read_ds_config(out), SPEC, world_size=2, stages=None, path=out)
    best = next(line.split() for line in printed.splitlines() if line.startswith("1 "))
    assert best[1:3] == [str(read.layout.stages), str(read.layout.replicas)]
    with Image.open(picture) as image:
        assert image.format == "PNG" and image.width > 800
        colours = image.convert("RGB").getcolors(2**20)
    assert colours is not None and {(59, 125, 216), (224, 123, 57)} <= {colour for _, colour in colours}


def test_no_path_of_the_data_is_needed_and_a_line_comes_before_torch() -> None:
    files = [
        "--spec",
        "folder",
        "--deepspeed_config",
        "zero2_bf16.json",
        "--processes",
        "2",
        "--device-kind",
        "rtx5090",
    ]
    program = f"""
import sys, time
import ddpm_ds.planning.run_plan as run_plan
from ddpm_ds.cli.main import main

def plan(spec, *given, **asked):
    sys.exit(f"torch: {{'torch' in sys.modules}}, path: {{spec.data.path}}")

run_plan.plan = plan
main({["plan", *files]})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd="/")
    first, second = done.stderr.splitlines()
    assert first == "planning folder64 for 2 processes on rtx5090" and second == "torch: False, path: FOLDER"


def test_one_stage_has_no_timeline_and_one_node_no_hostfile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, out = tmp_path / "plan.png", tmp_path / "plan.json"
    plan(tmp_path, "--processes", "1", "--device-kind", "l4", "--timeline", str(picture), "--out", str(out))
    printed = capsys.readouterr().out
    assert f"{picture}: not drawn, since layout 1 has one stage" in printed and not picture.exists()
    assert f"\ntrain with 1: ddpm-ds train --processes 1 --deepspeed_config {out} --spec " in printed


def test_timed_layers_are_planned_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("ddpm_ds.observe.device_speed.ENOUGH_SECONDS", 0.0)
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True, raising=False)
    with contextlib.redirect_stderr(screen):
        plan(tmp_path, "--processes", "2", "--device-kind", "cpu", "--measure", "--top", "1")
    assert "layers   timed on this machine" in capsys.readouterr().out
    assert "\rtiming layers: 0 layers" in screen.getvalue() and screen.getvalue().endswith("\r")  # and it is gone
    assert (tmp_path / "ddpm_ds" / "layer_times.json").exists()


def test_memory_that_ends_while_layers_are_timed_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def time_layer(*told: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("ddpm_ds.observe.device_speed.time_layer", time_layer)
    with pytest.raises(
        UserError, match=r"^--measure ran out of memory with a layer and \d+ images?; free the device's"
    ):
        plan(tmp_path, "--processes", "2", "--device-kind", "cpu", "--measure")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--processes 0", "argument --processes: '0' is not a whole number from 1 to 65,536"),
        ("--processes 8 --device-memory 80gb", "has unknown unit 'gb'; write 80GB"),
        ("--processes 8 --bandwidth 10GB", "argument --bandwidth: '10GB' has unknown unit 'GB'; give a speed such as"),
        ("--processes 8 --nodes 3 --device-kind l4", "--processes 8 can't be shared evenly by --nodes 3"),
        ("--processes 8 --device-kind z80", "argument --device-kind: invalid choice: 'z80'"),
        ("--processes 2 --device-kind l4 --device-memory 200KiB", "nothing fits 2 devices of 0.2 MiB"),
        ("--processes 4096 --device-kind l4", "--processes 4096 can't share train.batch_images = 16"),
        ("--processes 2 --set ds.zero_optimization.stage=3", "zero_optimization.stage = 3 should be 0 or 1 or 2"),
        ("--processes 2 --measure --tflops 3", "--tflops has no effect on layers that --measure times"),
        ("--processes 2 --out nowhere/plan.json", "--out nowhere/plan.json can't be written"),
        ("--processes 2 --timeline .", "--timeline . can't be written"),
        ("--processes 1 --device-kind l4 --out /dev/full", "/dev/full can't be written (No space left on device)"),
        ("--processes 2 --device-kind l4 --bandwidth 1MB/s --timeline /dev/full", "/dev/full can't be written"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, options: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        plan(tmp_path, *options.split())
    assert message in str(raised.value) and "\n" not in str(raised.value)
