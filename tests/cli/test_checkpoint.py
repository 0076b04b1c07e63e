"""``ddpm-ds checkpoint``: its output, its one-line errors, and no import of torch where none is needed."""

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ddpm_ds.cli.main import main
from tests.checkpoint.saving import SHAPES, save, values_of
from tests.evaluate.planted import refusal


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for images in (1000, 20000):
        save(tmp_path / "a run" / "checkpoints", images)
    return tmp_path / "a run"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_list_shows_the_checkpoints_oldest_first(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(run_dir / "checkpoints" / "images-000001000" / "manifest.json")
    assert main(["checkpoint", "list", str(run_dir)]) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["checkpoint", "images", "steps", "written", "(UTC)", "MB", "holds"]
    assert first.startswith("images-000001000") and "manifest.json is damaged" in first
    assert second.split()[:3] == ["images-000020000", "20,000", "2,000"]
    assert second.endswith("ema, exp_avg, exp_avg_sq, master")


def test_verify_reads_a_checkpoint_or_all_of_a_run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (run_dir / "checkpoints" / f"images-{images:09}" for images in (1000, 20000))
    assert main(["checkpoint", "verify", str(run_dir)]) == main(["checkpoint", "verify", str(second)]) == 0
    good = [line.split(": good, ")[0] for line in capsys.readouterr().out.splitlines()]
    assert good == ["images-000001000", "images-000020000", "images-000020000"]
    flip(first / "rank1.safetensors")
    assert "rank1.safetensors has another checksum" in refusal(capsys, "checkpoint", "verify", run_dir)
    assert main(["checkpoint", "verify", str(second)]) == 0
    (second / "state.json").unlink()
    said = refusal(capsys, "checkpoint", "verify", run_dir)
    assert "2 of 2 checkpoints are damaged" in said and str(first) in said and str(second) in said


def test_describe_says_what_it_was_made_from(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "describe", str(run_dir / "checkpoints" / "images-000001000")]) == 0
    words = ("1,000 images, 100 steps", "81 parameters in 4 tensors", "stages 2", "learning_rate: 0.0001", "fp16:")
    out = capsys.readouterr().out
    assert all(word in out for word in words)
    assert main(["checkpoint", "describe", str(run_dir)]) == 0
    assert "20,000 images" in capsys.readouterr().out, "a run's newest"


@pytest.mark.parametrize(("option", "kind"), [([], "ema"), (["--weights", "raw", "--dtype", "fp32"], "master")])
def test_consolidate_writes_the_weights(
    run_dir: Path, tmp_path: Path, option: list[str], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "weights.safetensors"
    checkpoint = run_dir / "checkpoints" / "images-000001000"
    assert main(["checkpoint", "consolidate", str(checkpoint), str(out), *option]) == 0
    assert load_file(out)["2.weight"].equal(values_of(kind, "2.weight", 1000, 40).view(SHAPES["2.weight"]))
    assert str(out) in capsys.readouterr().out


def test_wrong_paths_are_one_line_and_exit_code_2(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "there are no checkpoints in" in refusal(capsys, "checkpoint", "list", tmp_path)
    for verb in ("verify", "describe"):
        line = refusal(capsys, "checkpoint", verb, tmp_path)
        assert "manifest.json can't be read (No such file or directory)" in line
    assert "manifest.json can't be read" in refusal(capsys, "checkpoint", "consolidate", tmp_path, tmp_path / "x")
    assert "VERB" in refusal(capsys, "checkpoint")
    assert "fp8" in refusal(capsys, "checkpoint", "consolidate", run_dir, tmp_path / "x", "--dtype", "fp8")


def test_looking_needs_no_torch(run_dir: Path) -> None:
    checkpoint = run_dir / "checkpoints" / "images-000001000"
    program = f"""
import sys
from ddpm_ds.cli.main import main
for verb, path in (("list", {str(run_dir)!r}), ("verify", {str(run_dir)!r}), ("describe", {str(checkpoint)!r})):
    assert main(["checkpoint", verb, path]) == 0
sys.exit("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
