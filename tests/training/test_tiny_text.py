"""The tiny job on captions of docs/text.md: pictures show what prompts say."""

from itertools import cycle, islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from make_text import COLOURS, SHAPES, captions, draw, main, write_encoders
from torch import Tensor, nn

from ddpm_ds.cli.main import main as ddpm_ds
from ddpm_ds.config.spec_file import load_spec
from ddpm_ds.data.prepare import How, prepare
from tests.launching import REPOSITORY
from tests.training.test_previews import train

SPEC = REPOSITORY / "launch" / "specs" / "tiny_text.yaml"
PROMPTS = list(islice(cycle(captions()), 200))


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


SHUFFLED = {
    "data.text.stored": "text",
    "data.text.tags.separator": '" "',
    "data.text.tags.shuffle": "true",
    "data.text.tokens": "152",
    "unet.text.tokens": "152",
}
"""Captions such as "circle a red", in two chunks of 75 tokens, which are encoded while training."""


@pytest.mark.long
@pytest.mark.launch
@pytest.mark.parametrize("changes", [{}, SHUFFLED], ids=["stored", "shuffled-152-tokens"])
def test_pictures_show_the_colour_and_the_shape_that_was_asked_for(tmp_path: Path, changes: dict[str, str]) -> None:
    assert len(set(captions())) == len(COLOURS) * len(SHAPES) == 24
    judge = classifier()
    images, numbers = real(2400, seed=2)
    assert (judge(images).argmax(dim=1) == numbers).float().mean() >= 0.99, "it is right on real pictures"
    main(["--out", str(tmp_path / "shapes"), "--count", "6000"])
    data = {"path": "shapes/pictures", "text.encoders": "shapes/encoders", "store_root": "data"}
    if changes:
        write_encoders(tmp_path / "shapes/encoders", {word for text in captions() for word in text.split()}, tokens=77)
    places = [f"data.{key}={tmp_path / name}" for key, name in data.items()]
    spec = load_spec(SPEC, [*places, *(f"{key}={value}" for key, value in changes.items())])
    prepare(spec.data, How(encode_on=torch.device("cpu")))
    run_dir, file, out = train(tmp_path, spec, 2, stages=1), tmp_path / "prompts.txt", tmp_path / "drawn.npz"
    file.write_text("".join(prompt + "\n" for prompt in PROMPTS))
    words = ["--prompts", str(file), "--count", str(len(PROMPTS)), "--guidance", "3.0", "--out", str(out)]
    assert ddpm_ds(["sample", str(run_dir), *words, "--device", "cpu"]) == 0
    asked = torch.arange(len(PROMPTS)) % len(captions())
    right = judge(as_inputs(np.load(out)["arr_0"])).argmax(dim=1) == asked
    assert right.float().mean() >= 0.9, [PROMPTS[number] for number in (~right).nonzero().flatten().tolist()]
