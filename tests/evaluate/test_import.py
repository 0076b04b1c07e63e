"""ddpm-ds import, and the file of weights that a run begins with."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ddpm_ds.checkpoint.reader import consolidate
from ddpm_ds.cli.main import main
from ddpm_ds.config.spec_file import load_spec
from ddpm_ds.errors import SpecError
from ddpm_ds.evaluate import export as importing
from ddpm_ds.evaluate.export import write_pipeline
from ddpm_ds.train.resume import InitialWeights
from tests.diffusion.test_diffusers_schedule import DDPM_CIFAR10 as CIFAR10_SCHEDULER
from tests.evaluate.planted import plant, trained_of, unet_of
from tests.launching import REPOSITORY, tiny_spec, write_json
from tests.unet.test_diffusers import DDPM_CIFAR10 as CIFAR10_MODEL

SPECS = REPOSITORY / "launch" / "specs"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A pipeline of 8x8 digits without labels."""
    spec = tiny_spec(
        unet={"classes": None, "channels": 12}, train={"label_drop": 0.0}, diffusion={"schedule": "cosine"}
    )
    (tmp_path / "model").mkdir()
    write_pipeline(trained_of(spec, seed=9), tmp_path / "model", "fp32")
    return tmp_path / "model"


def shapes_of(**unet: Any) -> dict[str, tuple[int, ...]]:
    spec = tiny_spec(unet=unet, train={"label_drop": 0.0})
    return {name: tuple(parameter.shape) for name, parameter in unet_of(spec, 1).layers.named_parameters()}


def test_a_spec_of_the_base_begins_with_the_models_weights(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, base = tmp_path / "my runs" / "imported", SPECS / "digits.yaml"
    changes = ("unet.dropout=0.2", "diffusion.loss=l1", "diffusion.weighting=min_snr", "train.images=64")
    sets = [word for change in changes for word in ("--set", change)]
    assert main(["import", str(model), "--spec", str(base), "--out", str(out), *sets]) == 0

    spec, before = load_spec(out / "spec.yaml"), load_spec(base, changes)
    weights = out / "weights.safetensors"
    assert spec.unet == tiny_spec(unet={"classes": None, "channels": 12, "dropout": 0.2}, train={"label_drop": 0}).unet
    assert spec.diffusion == before.diffusion.model_copy(update={"schedule": "cosine"})
    assert spec.train == before.train.model_copy(update={"initial_weights": weights})
    others = set(type(spec).model_fields) - {"unet", "diffusion", "train"}
    assert spec.model_dump(include=others) == before.model_dump(include=others)

    expected = dict(unet_of(spec, 9).layers.named_parameters())
    read = InitialWeights(weights, {name: tuple(parameter.shape) for name, parameter in expected.items()})
    assert all(torch.equal(read.read(name), parameter.flatten()) for name, parameter in expected.items())

    *_, command = capsys.readouterr().out.splitlines()
    words = shlex.split(command)
    assert words[:2] == ["deepspeed", "launch/train.py"] and words[-2:] == ["--spec", str(out / "spec.yaml")]
    assert (REPOSITORY / words[words.index("--deepspeed_config") + 1]).is_file()
    assert sorted(path.name for path in out.parent.iterdir()) == ["imported"]


def test_ddpms_cifar10_model_makes_our_cifar10_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "ddpm-cifar10-32"
    model.mkdir()
    write_json(model / "config.json", CIFAR10_MODEL)
    write_json(model / "scheduler_config.json", CIFAR10_SCHEDULER)
    (model / "diffusion_pytorch_model.safetensors").touch()
    monkeypatch.setattr(importing, "_write_weights", lambda *_: 35_746_307)
    importing.import_weights(model, SPECS / "cifar10.yaml", [], tmp_path / "out")
    spec, ours = load_spec(tmp_path / "out" / "spec.yaml"), load_spec(SPECS / "cifar10.yaml")
    assert (spec.unet, spec.diffusion) == (ours.unet, ours.diffusion)


def test_without_a_schedule_the_base_decides(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "scheduler" / "scheduler_config.json").unlink()
    out = tmp_path / "out"
    options = ["--spec", str(SPECS / "digits.yaml"), "--set", "diffusion.timesteps=30", "--out", str(out)]
    assert main(["import", str(model), *options]) == 0
    assert load_spec(out / "spec.yaml").diffusion.timesteps == 30
    assert "no scheduler_config.json" in capsys.readouterr().out


def test_the_base_need_not_have_a_unet_that_fits_its_images(model: Path, tmp_path: Path) -> None:
    sets = ["--set", "data.image_size=8", "--set", "data.channels=1"]  # cifar10's own U-Net attends at 16 pixels
    options = ["--spec", str(SPECS / "cifar10.yaml"), *sets, "--out", str(tmp_path / "out")]
    assert main(["import", str(model), *options]) == 0


def test_labels_are_classes_and_no_label(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    write_pipeline(trained_of(tiny_spec()), tmp_path / "model", "fp32")
    options = ["import", str(tmp_path / "model"), "--spec", str(SPECS / "digits.yaml"), "--out"]
    assert main([*options, str(tmp_path / "out")]) == 0
    assert load_spec(tmp_path / "out" / "spec.yaml").unet.classes == 10
    assert "its 11 labels are read as 10 classes and, last, no label" in capsys.readouterr().out
    assert main([*options, str(tmp_path / "other"), "--set", "unet.classes=11"]) == 2
    assert "unet.classes = 11, but the model" in capsys.readouterr().err


BAD: dict[str, tuple[list[str], str]] = {
    "image size": (["--set", "data.image_size=16"], r"data.image_size = 16, but .* has 8; --set data.image_size=8"),
    "channels": (["--set", "data.channels=3"], "data.channels = 3, but .* has 1; --set data.channels=1"),
    "unknown key": (["--set", "unet.windows=3"], "unet.windows is unknown"),
    "guidance": (["--set", "sampler.steps=2000", "--set", "diffusion.timesteps=3000"], "sampler.steps = 2000 is above"),
    "no spec": (["--spec", "missing.yaml"], "no such run spec"),
    "no model": (["MODEL", "missing"], "missing is no folder of diffusers"),
    "not empty": (["--out", "MODEL"], "is not empty; name a new folder"),
    "a file": (["--out", __file__], "is no folder; name a new folder"),
    "no out": (["NO OUT"], "--out; ddpm-ds import --help explains"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_nothing_is_written(
    model: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, message = BAD[name]
    options = ["import", str(model), "--spec", str(SPECS / "digits.yaml"), "--out", str(tmp_path / "out")]
    if arguments[0] == "MODEL":
        options[1] = arguments[1]
    elif arguments[0] == "NO OUT":
        options = options[:-2]
    else:
        options += [word.replace("MODEL", str(model)) for word in arguments]
    before = sorted(tmp_path.rglob("*"))
    assert main(options) == 2
    err = capsys.readouterr().err
    assert err.startswith("ddpm-ds: error: ") and err.count("\n") == 1
    assert re.search(message, err), err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_model_with_weights_that_are_not_finite_leaves_nothing(model: Path, tmp_path: Path) -> None:
    file = model / "unet" / "diffusion_pytorch_model.safetensors"
    save_file({name: tensor / 0 for name, tensor in load_file(file).items()}, file)
    assert main(["import", str(model), "--spec", str(SPECS / "digits.yaml"), "--out", str(tmp_path / "out")]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_a_consolidated_checkpoint_is_read_piece_by_piece(tmp_path: Path, dtype: Any) -> None:
    consolidate(plant(tmp_path / "run"), tmp_path / "weights.safetensors", "ema", dtype)
    stored = load_file(tmp_path / "weights.safetensors")
    read = InitialWeights(tmp_path / "weights.safetensors", shapes_of())
    for name, tensor in stored.items():
        flat = tensor.float().flatten()
        values = read.read(name)
        assert values.dtype is torch.float32 and values.equal(flat)
        for first in (0, 1, len(flat) // 2, len(flat) - 1):
            for length in (0, 1, len(flat) // 3, len(flat) - first):
                length = min(length, len(flat) - first)
                assert read.read(name, first, length).equal(flat[first : first + length]), (name, first, length)
        with pytest.raises(ValueError, match="values"):
            read.read(name, 1, len(flat))


def test_initial_weights_of_another_unet_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    consolidate(plant(tmp_path / "run"), path, "ema", "fp32")
    for shapes, message in (
        (shapes_of(blocks_per_level=2), r"it lacks "),
        (shapes_of(classes=None), r"it also has 0\.label_embedding\.weight"),
        (shapes_of(channels=16), r"is \(32, 8\), not \(64, 16\)"),
    ):
        with pytest.raises(
            SpecError, match=rf"^train\.initial_weights = {path} is of another U-Net .*{message}"
        ) as caught:
            InitialWeights(path, shapes)
        assert "\n" not in str(caught.value)
    save_file({name: torch.zeros(shape, dtype=torch.int32) for name, shape in shapes_of().items()}, path)
    with pytest.raises(SpecError, match="no float"):
        InitialWeights(path, shapes_of())
    for content, message in ((b"damaged", "no safetensors file"), (None, "No such file")):
        path.unlink()
        if content:
            path.write_bytes(content)
            with pytest.raises(SpecError, match=message):
                InitialWeights(path, shapes_of())
        else:
            with pytest.raises(SpecError, match=rf"can't be read \({message}"):
                InitialWeights(path, shapes_of())
