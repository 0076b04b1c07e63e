"""``launch/quality.py``: its runs, how many share the machine, its classifier and its table."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import quality

from ddpm_ds.cli.main import main as ddpm_ds
from ddpm_ds.data.prepare import prepare
from ddpm_ds.data.spec import DataSpec


def test_every_run_is_trained_and_scored_once_and_a_second_command_adds_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []

    def run(command: Sequence[str], **_: object) -> SimpleNamespace:
        words = list(command[3:])
        commands.append(words)
        if words[0] == "sample":
            count = int(words[words.index("--count") + 1])
            np.savez(words[words.index("--out") + 1], np.zeros((count, 8, 8, 1), np.uint8))
        return SimpleNamespace(returncode=0)

    drawn = SimpleNamespace(scores=lambda images: dict.fromkeys(quality.SCORES, float(len(images))))
    folder = SimpleNamespace(evaluations={"eval/loss": [0.9, 0.3]}, metrics={"train/loss": [0.7]})
    monkeypatch.setattr(quality.subprocess, "run", run)
    monkeypatch.setattr(quality, "classifier", lambda: drawn)
    monkeypatch.setattr(quality, "open_run", lambda _: folder)
    words = ["--out", str(tmp_path), "--images", "640", "--count", "8", "--rows"]
    assert quality.main([*words, "ddpm,2 replicas", "--seeds", "1"]) == 0
    assert [(command[0], command[2]) for command in commands[::2]] == [("train", "1"), ("train", "2")]
    assert [command[0] for command in commands[1::2]] == ["sample"] * 2
    assert quality.main([*words, "ddpm,2 replicas,edm", "--seeds", "2"]) == 0
    seeds = [next(word for word in command if "seed" in word) for command in commands[4:] if command[0] == "train"]
    assert sorted(seeds) == ["train.seed=0", "train.seed=1", "train.seed=1", "train.seed=1"] and len(commands) == 12
    assert "8 (8 to 8)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        quality.main([*words, "ddpm,vp"])
    assert "--rows has 'vp'; there are ddpm, edm" in capsys.readouterr().err


def test_the_classifier_reads_real_digits_that_it_has_not_seen_and_is_sure_of_nothing_else(tmp_path: Path) -> None:
    digits = prepare(DataSpec(source="digits", image_size=8, channels=1, store_root=tmp_path))
    images, labels = digits.images[:], digits.labels
    classifier = quality.DigitsClassifier(images, labels)
    unseen = classifier.held_out
    read = classifier.probabilities(images[unseen])
    assert len(unseen) == 450 and (read.argmax(1) == labels[unseen]).mean() > 0.97 and 0.95 < read.max(1).mean() < 1.0
    noise = np.random.Generator(np.random.Philox(0)).integers(0, 256, (300, 1, 8, 8), np.uint8)
    for other in (noise, np.full_like(noise, 127), np.zeros_like(noise)):
        assert classifier.probabilities(other).max(1).mean() < 0.35
    real, drawn = classifier.scores(images[unseen]), classifier.scores(noise)
    assert real["Fréchet, features"] < drawn["Fréchet, features"] / 10 and real["class balance"] > 0.99
    assert real["recognised"] > 0.97 and drawn["recognised"] < 0.3


@pytest.mark.parametrize("name", quality.ROWS)
def test_every_row_is_a_run_that_can_be_trained(name: str, tmp_path: Path) -> None:
    command = quality.command(name, tmp_path / "run", 640, 0)
    assert ddpm_ds([*command, "--dry-run"]) == 0
