"""ddpm_ds.train: a run is started from Python, followed, interrupted and refused as by the command."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

import ddpm_ds
import ddpm_ds.training.start  # what a script may import before
from ddpm_ds import UserError, load_spec, open_run
from ddpm_ds.checkpoint.folder import images_of
from tests.launching import REPOSITORY, place_digits, place_empty_store, wait_for

SPEC, CONFIG = REPOSITORY / "launch" / "specs" / "digits.yaml", REPOSITORY / "ds_configs" / "zero0_fp32.json"
SMALL = [
    *("unet.channels=8", "unet.norm_groups=4", "sampler.steps=2", "samples.count=4"),
    *("train.images=96", "train.batch_images=32", "optimizer.warmup_images=0", "logging.log_every_images=32"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the digits, where no run reaches another's store."""
    place_empty_store(tmp_path / "runs")
    place_digits(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def fake(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Let a program take the place of the command."""
    monkeypatch.setattr("ddpm_ds.training.from_python.TRAIN", ("-c", textwrap.dedent(program)))


@pytest.mark.launch
def test_values_train_on_two_processes_and_the_run_is_returned(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second call with the same folder goes on, here with nothing left to do."""
    spec, config = load_spec(SPEC, SMALL), json.loads(CONFIG.read_text())
    config["pipeline"]["partition"] = "flops"
    run = ddpm_ds.train(spec, config, run_dir="runs/mine", processes=2, stages=2, device="cpu")
    assert run.folder == Path("runs/mine") and run.status == "FINISHED"
    assert run.last_metrics["train/seen_images"] == 96 and run.last_metrics["step"] == 3
    assert run.last_metrics["train/loss"] == run.metrics["train/loss"][-1] and "eval/loss" in run.last_metrics
    assert [images_of(path.stem) for path in run.all_samples()] == [0, 96] and run.all_samples()[-1].is_file()
    assert run.spec == spec and run.ds_config["pipeline"]["stages"] == 2
    assert "ddpm-ds train: done" in capsys.readouterr().out
    again = ddpm_ds.train(spec, config, run_dir=run.folder, processes=2, stages=2, device="cpu")
    assert again.last_metrics["train/seen_images"] == 96 and len(again.metrics["step"]) == 3


@pytest.mark.launch
def test_an_interrupt_is_raised_after_the_ranks_have_saved(folder: Path) -> None:
    """The script has no ``if __name__``, and only its own process gets the signal, as in a notebook."""
    script = f"""
        import ddpm_ds
        try:
            ddpm_ds.train({str(SPEC)!r}, "zero0_fp32", {[*SMALL, "train.images=10000000"]}, device="cpu")
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    """
    (folder / "script.py").write_text(textwrap.dedent(script))
    with open(folder / "log", "w") as log:
        process = subprocess.Popen([sys.executable, "script.py"], stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(lambda: "images/s" in (folder / "log").read_text() or process.poll() is not None)
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0, (folder / "log").read_text()
    finally:
        process.kill()
    said = (folder / "log").read_text()
    assert said.endswith("interrupted\n") and "saved after" in said, said
    assert not [one for one in started if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    (run_dir,) = (folder / "runs").glob("*-digits")
    assert open_run(run_dir).checkpoints


@pytest.mark.parametrize(
    ("spec", "config", "overrides", "message"),
    [
        ("digits", "zero0_fp32", ["unet.chanels=8"], "--set unet.chanels=8: unet.chanels is unknown; did you mean"),
        ({"unet": {"channels": Path("a")}}, "zero0_fp32", [], r'unet.channels = "a" should be a whole number'),
        ("digits", {"fp16": {"enable": True}}, [], "asked_ds_config.json: fp16.enable is unknown; did you mean"),
        ("digitz", "zero0_fp32", [], "digitz: no such run spec"),
    ],
)
@pytest.mark.parametrize("run_dir", [None, "mine"])
def test_what_the_command_refuses_is_one_error_that_leaves_nothing_behind(
    spec: Any, config: Any, overrides: Sequence[str], message: str, run_dir: str | None, folder: Path
) -> None:
    before = sorted(folder.rglob("*"))
    with pytest.raises(UserError) as raised:
        ddpm_ds.train(spec, config, overrides, run_dir=run_dir, device="cpu")
    assert message in str(raised.value) and "ddpm-ds" not in str(raised.value) and raised.value.exit_code == 2
    assert [path for path in sorted(folder.rglob("*")) if path not in (*before, folder / "mine")] == []


def test_a_failure_has_its_exit_code_and_the_last_lines(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(monkeypatch, "print(*range(20), sep='\\n'); print('ddpm-ds train: nothing was saved'); raise SystemExit(76)")
    with pytest.raises(UserError) as raised:
        ddpm_ds.train("digits", "zero0_fp32")
    first, *lines = str(raised.value).splitlines()
    assert raised.value.exit_code == 76 and "exit code 76" in first
    assert lines[-2:] == ["19", "ddpm-ds train: nothing was saved"] and capsys.readouterr().out.startswith("0\n1\n")
    fake(monkeypatch, "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(UserError, match="exit code 137"):
        ddpm_ds.train("digits", "zero0_fp32")


def test_every_option_reaches_the_command_and_values_their_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(
        monkeypatch,
        """
        import json, pathlib, sys
        folder = pathlib.Path(sys.argv[1].removeprefix("--run-dir="))
        (folder / "spec.yaml").write_text(json.dumps(sys.argv[1:]))
        """,
    )
    values: dict[str, Any] = {"data": {"path": Path("äöü")}, "unet": {"multipliers": (1, 2)}, "ema": 1e-5}
    changes = {"processes": 4, "stages": 2, "device": "cpu", "resume": "never"}
    run = ddpm_ds.train(values, CONFIG, ["ds.a=b c"], run_dir="mine", **changes)  # type: ignore[arg-type]
    words = yaml.safe_load((run.folder / "spec.yaml").read_text())
    asked = run.folder / "asked_spec.yaml"
    assert words == [
        *("--run-dir=mine", f"--spec={asked}", f"--deepspeed_config={CONFIG}", "--processes=4"),
        *("--pipeline-stages=2", "--device=cpu", "--resume=never", "--set=ds.a=b c"),
    ]
    read = yaml.safe_load(asked.read_text())
    assert read["data"]["path"] == "äöü" and read["unet"]["multipliers"] == [1, 2] and float(read["ema"]) == 1e-5


def test_lines_that_cannot_be_printed_end_the_run_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(
        monkeypatch,
        """
        import pathlib, signal, sys, time
        def stop(number, frame):
            pathlib.Path("asked").touch()
            sys.exit(75)
        signal.signal(signal.SIGTERM, stop)
        print("a line", flush=True)
        time.sleep(3600)
        """,
    )
    with open(os.devnull) as unwritable, monkeypatch.context() as closed:
        closed.setattr("sys.stdout", unwritable)
        with pytest.raises(OSError):
            ddpm_ds.train("digits", "zero0_fp32")
    assert (folder / "asked").exists()
