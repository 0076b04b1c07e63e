"""Runs and trained weights that nobody trained: a U-Net with random weights, in memory or saved as a checkpoint."""

import itertools
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ddpm_ds.checkpoint.manifest import Description
from ddpm_ds.checkpoint.writer import Fragment
from ddpm_ds.cli.main import main
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.data.cache import FieldFacts
from ddpm_ds.diffusion.spec import SamplerSpec
from ddpm_ds.evaluate.trained import Trained
from ddpm_ds.unet.layers import unet_layers
from ddpm_ds.unet.model import UNet
from tests.checkpoint.saving import ranks, scalars
from tests.launching import tiny_spec

Sample = Callable[..., str]
FAST = ("--sampler", "ddim", "--steps", "3", "--eta", "1", "--device", "cpu")
"""Options of a drawing that takes no time and has noise in every step."""
FAST_SAMPLER = SamplerSpec(kind="ddim", steps=3, eta=1.0)
"""The same."""
UNLABELLED: dict[str, Any] = {"unet": {"classes": None}, "train": {"label_drop": 0.0}}
"""Sections of a run without classes."""
KINDS = {"ema": 1, "master": 2}
"""Kinds of weights that a planted checkpoint has, each with another seed."""


def unet_of(spec: RunSpec, seed: int) -> UNet:
    """A U-Net all of whose weights are random, those that begin at zero too."""
    unet = UNet(unet_layers(spec.unet, spec.data.interface), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in unet.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return unet.eval().requires_grad_(False)


def trained_of(spec: RunSpec, seed: int = 1, dtype: torch.dtype = torch.float32) -> Trained:
    """Weights in memory."""
    return Trained(
        unet=unet_of(spec, seed).to(dtype),
        unet_spec=spec.unet,
        diffusion=spec.diffusion,
        sampler=spec.sampler,
        interface=spec.data.interface,
        origin="memory",
        digest=f"{seed:064}",
        weights="ema",
        images_seen=320,
        spec=spec,
        known_data=spec.data,
        text=spec.data.text,
    )


def plant(
    run_dir: Path,
    images: int = 320,
    data_sha256: dict[str, str] | None = None,
    *,
    facts: FieldFacts | None = None,
    unets: Mapping[str, UNet] | None = None,
    cuts: Sequence[float] = (),
    spec_as: dict[str, Any] | None = None,
    **sections: dict[str, Any],
) -> Path:
    """Save a checkpoint of a tiny run, which learned images of these checksums; returns its folder.

    ``unets`` are the weights by kind. ``cuts`` are where the ranks' shares end, which may be anywhere, as in ZeRO.
    ``spec_as`` is stored in the place of the spec.
    """
    spec = tiny_spec(**sections)
    unets = unets or {kind: unet_of(spec, seed) for kind, seed in KINDS.items()}
    shapes = {name: tuple(p.shape) for name, p in next(iter(unets.values())).layers.named_parameters()}
    description = Description(
        images=images,
        step=images // 16,
        spec=spec_as or spec.model_dump(mode="json"),
        ds_config={},
        layout={},
        data_sha256=data_sha256 or {},
        parameters=shapes,
        fields=None if facts is None else facts.model_dump(mode="json"),
    )
    total = sum(map(math.prod, shapes.values()))
    bounds = list(itertools.pairwise((0, *(int(cut * total) for cut in cuts), total)))
    printed: list[str] = []
    writers = ranks(run_dir / "checkpoints", len(bounds), printed.append)
    for rank, (writer, (start, stop)) in enumerate(zip(writers, bounds, strict=True)):
        fragments = []
        for kind, unet in unets.items():
            at = 0
            for name, parameter in unet.layers.named_parameters():
                low, high = max(start - at, 0), min(stop - at, parameter.numel())
                if low < high:
                    fragments.append(Fragment(kind, name, low, parameter.flatten()[low:high].clone()))
                at += parameter.numel()
        writer.begin(f"rank{rank}", fragments, description, {**scalars(images), "steps": description.step})
    assert all([writer.wait() for writer in writers]), printed
    return run_dir / "checkpoints" / f"images-{images:09}"


def plant_alone(folder: Path, **how: Any) -> Path:
    """Save a checkpoint outside of a run's folder, so that nothing is recorded in MLflow; returns its folder."""
    plant(folder / "run", **how).rename(folder / "checkpoint")
    shutil.rmtree(folder / "run")
    return folder / "checkpoint"


def same_weights(one: UNet, other: UNet) -> bool:
    """Whether two U-Nets have the same values under the same names."""
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def report(folder: Path) -> dict[str, Any]:
    """The only scores.json in a folder of evaluations."""
    (path,) = folder.glob("*/scores.json")
    return dict(json.loads(path.read_text()))


def refusal(capture: pytest.CaptureFixture[str], *words: object) -> str:
    """The only line that a refused command prints on stderr."""
    capture.readouterr()
    assert main([*map(str, words)]) == 2
    (line,) = capture.readouterr().err.splitlines()
    assert line.startswith("ddpm-ds: error: ")
    return line


def difference(one: Tensor, other: Tensor) -> int:
    """The largest difference of the pixels of two sets of uint8 images."""
    return int((one.int() - other.int()).abs().max())


def evaluate_verb(capfd: pytest.CaptureFixture[str]) -> Sample:
    """Return what runs ``ddpm-ds evaluate`` in this process and gives what it printed, its bars left out."""

    def run(path: Path, *arguments: object, code: int = 0) -> str:
        words = ["--sampler", "ddim", "--steps", "2", "--device", "cpu", *map(str, arguments)]
        assert main(["evaluate", str(path), *words]) == code
        out, err = capfd.readouterr()
        return out + "".join(line for line in err.splitlines(keepends=True) if "\r" not in line and "%|" not in line)

    return run


def sample_verb(planted: Path, capsys: pytest.CaptureFixture[str]) -> Sample:
    """Return what runs ``ddpm-ds sample`` in this process and gives what it printed, or its one line of error."""

    def run(*arguments: object, code: int = 0, run_dir: Path = planted) -> str:
        capsys.readouterr()
        assert main(["sample", str(run_dir), *FAST, *map(str, arguments)]) == code, capsys.readouterr().err
        output = capsys.readouterr()
        if code != 2:
            return output.out
        line, *more = [line for line in output.err.splitlines() if line and "%|" not in line]
        assert line.startswith("ddpm-ds: error: ") and not more, output.err
        return line

    return run
