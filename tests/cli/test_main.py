"""The command ``ddpm-ds``: verbs, one-line errors, exit codes, and no heavy import before it is needed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ddpm_ds.cli import train
from ddpm_ds.cli.main import main
from ddpm_ds.config.ds_model import DS_CONFIG
from ddpm_ds.config.spec_file import SPEC
from tests.launching import PATIENCE_SECONDS, wait_for

DIGITS = Path(__file__).resolve().parents[2] / "launch" / "specs" / "digits.yaml"


def test_schema_prints_the_json_schema_and_the_references(capsys: pytest.CaptureFixture[str]) -> None:
    for words, file in (([], SPEC), (["spec"], SPEC), (["ds_config"], DS_CONFIG)):
        assert main(["schema", *words]) == 0
        assert json.loads(capsys.readouterr().out) == file.file_schema()
        assert main(["schema", "--markdown", *words]) == 0
        assert capsys.readouterr().out == file.markdown()


def test_prepare_writes_a_store_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["prepare", "--spec", str(DIGITS), "--set", f"data.store_root={tmp_path}"]
    assert main(arguments) == main(arguments) == 0
    (store,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert capsys.readouterr().out == f"{store}: 1,797 images\n" * 2


def test_prepare_writes_two_stores_if_held_out_images_have_a_source_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "train.npy", np.zeros((12, 8, 8), np.uint8))
    changes = ["data.source=arrays", f"data.path={tmp_path}/train.npy", f"data.held_out_path={tmp_path}/val.npy"]
    changes += ["data.held_out_images=0", f"data.store_root={tmp_path}/stores"]
    arguments = ["prepare", "--spec", str(DIGITS), *(part for change in changes for part in ("--set", change))]
    assert main(arguments) == 2
    said = capsys.readouterr().err.splitlines()
    wrong = f"ddpm-ds: error: data.held_out_path = {tmp_path}/val.npy does not exist; "
    assert len(said) == 1 and said[0].startswith(wrong)
    assert not [path for path in (tmp_path / "stores").glob("*") if path.is_dir()]
    np.save(tmp_path / "val.npy", np.ones((5, 8, 8), np.uint8))
    assert main(arguments) == 0
    trained, held_out = capsys.readouterr().out.splitlines()
    assert trained.endswith(": 12 images") and held_out.endswith(": 5 images, held out")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["VERB", "ddpm-ds --help"]),
        (["prepaer"], ["prepaer", "prepare"]),
        (["prepare"], ["--spec is missing", "type --spec digits"]),
        (["prepare", "--spec", "missing.yaml"], ["missing.yaml: no such run spec"]),
        (["prepare", "--spec", str(DIGITS), "--set", "data.sorce=x"], ["did you mean data.source?"]),
        (["prepare", "--spec", str(DIGITS), "--unknown"], ["--unknown; ddpm-ds prepare --help explains"]),
        (["schema", "--markdown", "mlflow"], ["mlflow", "ds_config"]),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("ddpm-ds: error: ") and said.err.count("\n") == 1
    for word in words:
        assert word in said.err


def test_each_fault_has_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["data.sorce=x", "unet.dropout=2"]
    assert main(["prepare", "--spec", str(DIGITS), *(word for one in changes for word in ("--set", one))]) == 2
    for line, change in zip(capsys.readouterr().err.splitlines(), changes, strict=True):
        assert line.startswith(f"ddpm-ds: error: --set {change}: ")


IMPORTED = """
import os, sys, time
open(os.environ["IMPORTED"], "w").close()
time.sleep(600)
"""
CONSOLE_SCRIPT = ["-c", "import sys; from ddpm_ds.cli.main import main; sys.exit(main())"]
TRAINING = [[*CONSOLE_SCRIPT, "train"], [*CONSOLE_SCRIPT, "run"], ["-m", "ddpm_ds.cli.rank"], ["launch/train.py"]]
OTHERS = [[*CONSOLE_SCRIPT, "plan"], CONSOLE_SCRIPT, ["launch/bench.py"]]
PREPARE = [*CONSOLE_SCRIPT, "prepare", "--spec", str(DIGITS)]
TRAIN = [*CONSOLE_SCRIPT, "train", "--deepspeed_config", "ds_configs/zero1_fp32.json"]


@pytest.mark.parametrize(
    ("words", "module", "number", "code"),
    [
        *((words, "psutil", number, 75) for words in TRAINING for number in (signal.SIGINT, signal.SIGTERM)),
        *((words, "psutil", signal.SIGINT, 130) for words in OTHERS),
        (TRAIN, "yaml", signal.SIGHUP, 75),  # imported when the options are parsed
        (PREPARE, "numpy", signal.SIGINT, 130),
    ],
    ids=str,
)
def test_a_signal_during_imports_ends_every_program_without_a_word(
    words: list[str], module: str, number: signal.Signals, code: int, tmp_path: Path
) -> None:
    """The import of a module lasts until the signal comes."""
    imported = tmp_path / "imported"
    (tmp_path / f"{module}.py").write_text(IMPORTED)
    path = os.pathsep.join(map(str, (tmp_path, DIGITS.parents[2])))
    program = subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": path, "IMPORTED": str(imported)},
        cwd=DIGITS.parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # a shell or nohup may ignore the signal
    )
    wait_for(imported.exists, running=lambda: program.poll() is None)
    program.send_signal(number)
    said, _ = program.communicate(timeout=PATIENCE_SECONDS)
    assert (program.returncode, said) == (code, b"")


def test_output_that_nobody_reads_any_more_ends_the_command_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert main(["schema"]) == 128 + signal.SIGPIPE


@pytest.mark.parametrize("words", [[], ["run"], ["checkpoint", "list"], None], ids=str)
def test_help_is_exit_code_0(words: list[str] | None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        train.main(["--help"]) if words is None else main([*words, "--help"])
    shown = capsys.readouterr().out
    assert caught.value.code == 0 and ("exit codes" in shown or words == ["checkpoint", "list"])


def test_schema_and_errors_come_without_torch() -> None:
    program = """
import sys
from ddpm_ds.cli.main import main
codes = main(["schema"]), main(["prepare", "--spec", "missing.yaml"])
heavy = {"torch", "deepspeed", "mlflow", "numpy", "matplotlib"} & set(sys.modules)
sys.exit(f"{codes} {heavy}" if codes != (0, 2) or heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=DIGITS.parents[2])
    assert done.returncode == 0, done.stderr
