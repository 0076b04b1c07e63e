"""The tiny job on captions of docs/text.md: its commands on one and two ranks, and whether pictures show what prompts
say."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from make_text import COLOURS, SHAPES, captions, draw, main
from PIL import Image
from torch import Tensor, nn

from ddpm_ds import open_run
from ddpm_ds.cli.main import main as ddpm_ds
from ddpm_ds.evaluate.trained import load_trained
from tests.forking import READS_TEXT
from tests.launching import REPOSITORY, place_empty_store, run_ranks

SPEC = REPOSITORY / "launch" / "specs" / "tiny_text.yaml"
QUICK = [
    "unet.channels=8",
    "unet.norm_groups=4",
    *("unet.multipliers=[1,1]", "unet.text.blocks=[0,1]", "unet.text.heads=[2,4]"),
    "train.images=64",
    "train.batch_images=16",
    "optimizer.warmup_images=0",
    "optimizer.decay=null",  # so that a longer run is the same run
    "optimizer.learning_rate=0.03",  # so that 64 images show
    "data.held_out_images=8",
    "evaluation.every_images=32",
    "samples.every_images=64",
    "samples.count=6",
    "sampler.steps=3",
    "logging.log_every_images=16",
]
PROMPTS = list(islice(cycle(captions()), 200))


def prepared(folder: Path, count: int) -> Path:
    """Make pictures, captions and encoders in ``folder``, and prepare and encode them."""
    main(["--out", str(folder / "shapes"), "--count", str(count)])
    assert ddpm_ds(["prepare", "--encode", *settings(folder)]) == 0
    place_empty_store(folder / "runs")
    return folder


def settings(folder: Path, *changes: str) -> list[str]:
    """Options of the spec, with its data in ``folder`` and some values changed."""
    data = {"path": "shapes/pictures", "text.encoders": "shapes/encoders", "store_root": "data"}
    changes = (*changes, *(f"data.{key}={folder / name}" for key, name in data.items()))
    return ["--spec", str(SPEC), *(word for change in changes for word in ("--set", change))]


def train(folder: Path, run: str, processes: int, stages: int, changes: Sequence[str] = ()) -> Path:
    """Train in ``folder``, or continue a run, and return the run's folder."""
    config = REPOSITORY / "ds_configs" / "zero1_fp32.json"
    run_dir = folder / "runs" / run
    done = run_ranks(
        processes,
        REPOSITORY / "launch" / "train.py",
        *("--deepspeed_config", str(config), "--run-dir", str(run_dir), "-p", str(stages)),
        *settings(folder, *changes),
        MLFLOW_TRACKING_URI="",
        XDG_CACHE_HOME=str(folder / "cache"),
        **{READS_TEXT: "1"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return run_dir


def drawn(run_dir: Path, prompts: list[str], guidance: float) -> npt.NDArray[np.uint8]:
    """The images (N, 16, 16, 3) that the verb draws for prompts in a file."""
    file, out = run_dir / "asked.txt", run_dir / f"guided-{guidance}.npz"
    file.write_text("".join(prompt + "\n" for prompt in prompts))
    words = ["--prompts", str(file), "--count", str(len(prompts)), "--guidance", str(guidance), "--out", str(out)]
    assert ddpm_ds(["sample", str(run_dir), *words, "--device", "cpu"]) == 0
    images: npt.NDArray[np.uint8] = np.load(out)["arr_0"]
    return images


@pytest.mark.launch
@pytest.mark.long
def test_the_commands_of_the_tiny_job_work_on_one_rank_and_on_two_and_after_a_stop(
    tmp_path: Path, forked_workers: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = prepared(tmp_path, 48)
    one = train(folder, "one", 1, 1, changes=QUICK)
    train(folder, "two", 2, 2, changes=[*QUICK, "train.images=32"])
    two = train(folder, "two", 2, 2, changes=QUICK)
    curves = [open_run(str(run)).evaluations["eval/loss"] for run in (one, two)]
    assert len(curves[0]) == 2 and curves[0] == pytest.approx(curves[1], rel=1e-4)
    pictures = [np.asarray(Image.open(run / "samples" / "images-000000064.png")).astype(int) for run in (one, two)]
    below = pictures[0].shape[0] * 4 // 5  # the title is above
    assert np.abs(pictures[0] - pictures[1])[-below:].max() <= 2, "fp32 rounds in another order, and an image to 8 bits"
    prompts = ["a red circle", "a blue cross"]
    assert ddpm_ds(["sample", str(two), "--prompt", prompts[0], "--prompt", prompts[1], "--out", "shapes.png"]) == 0
    assert Image.open("shapes.png").width > 500
    images = drawn(two, prompts, 3.0)
    assert images.shape == (2, 16, 16, 3) and not (images[0] == images[1]).all()
    assert ddpm_ds(["export", str(two), "exported"]) == 0, capsys.readouterr().err
    weights = [load_trained(path).unet.state_dict() for path in (str(two), "exported")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def real(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Real pictures (N, 3, 16, 16) from -1 to 1, and the numbers of their captions (N,)."""
    generator = np.random.default_rng(seed)
    images = [draw(caption, generator) for caption in islice(cycle(captions()), count)]
    return as_inputs(np.stack(images)), torch.arange(count) % len(captions())


def as_inputs(images: npt.NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1.0


def classifier() -> nn.Module:
    """A small network that reads the number of a picture's caption, trained on real pictures."""
    torch.manual_seed(0)
    images, numbers = real(6000, seed=1)
    net = nn.Sequential(
        *(nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 48, 3, 2, 1), nn.ReLU()),
        *(nn.Conv2d(48, 48, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(48 * 4 * 4, len(captions()))),
    )
    optimizer, steps = torch.optim.AdamW(net.parameters()), 900
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, steps)
    for _ in range(steps):
        batch = torch.randint(len(images), (96,))
        noisy = images[batch] + 0.05 * torch.randn(96, 3, 16, 16)
        optimizer.zero_grad()
        F.cross_entropy(net(noisy), numbers[batch]).backward()
        optimizer.step()
        rate.step()
    return net.eval().requires_grad_(False)


@pytest.mark.long
@pytest.mark.launch
def test_pictures_show_the_colour_and_the_shape_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(set(captions())) == len(COLOURS) * len(SHAPES) == 24
    judge = classifier()
    images, numbers = real(2400, seed=2)
    assert (judge(images).argmax(dim=1) == numbers).float().mean() >= 0.99, "it is right on real pictures"
    monkeypatch.chdir(tmp_path)
    run_dir = train(prepared(tmp_path, 6000), "shapes", 2, 1)
    asked = torch.arange(len(PROMPTS)) % len(captions())
    right = judge(as_inputs(drawn(run_dir, PROMPTS, 3.0))).argmax(dim=1) == asked
    assert right.float().mean() >= 0.9, [PROMPTS[number] for number in (~right).nonzero().flatten().tolist()]
