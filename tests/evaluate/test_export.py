"""ddpm-ds export and import: what diffusers makes of a folder, the way back, the card, and what is refused."""

import copy
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import yaml
from diffusers.training_utils import EMAModel
from PIL import Image
from safetensors.torch import load_file, save_file

from ddpm_ds.checkpoint.reader import consolidate
from ddpm_ds.cli.main import main
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.config.spec_file import load_spec
from ddpm_ds.evaluate.diffusers import export
from ddpm_ds.evaluate.diffusers.card import model_card
from ddpm_ds.evaluate.diffusers.export import rounded, write_pipeline
from ddpm_ds.evaluate.diffusers.unet_config import AVERAGE, diffusers_config
from ddpm_ds.evaluate.trained import Trained, load_trained
from ddpm_ds.ground.errors import CheckpointError, SpecError
from ddpm_ds.training.resume import InitialWeights
from ddpm_ds.unet.layers import unet_layers
from ddpm_ds.unet.model import UNet
from ddpm_ds.unet.spec import Interface
from tests.evaluate.conftest import FakeTracker
from tests.evaluate.planted import UNLABELLED, plant, plant_alone, refusal, same_weights, trained_of, unet_of
from tests.launching import REPOSITORY, tiny_spec, write_json
from tests.model_hub import ModelHub

FEW: dict[str, Any] = {"diffusion": {"timesteps": 4}, "sampler": {"steps": 2}}
TIMESTEPS = 32
"""Number of timesteps, from 0, whose predictions are compared: angles t x frequency in fp32 err in proportion to t."""
SPECS = REPOSITORY / "launch" / "specs"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A class-conditional checkpoint of 4 timesteps."""
    return plant_alone(tmp_path_factory.mktemp("few"), **FEW)


@pytest.fixture(scope="module")
def unlabelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant_alone(tmp_path_factory.mktemp("plain"), **FEW, **UNLABELLED)


def examples(trained: Trained) -> tuple[torch.Tensor, ...]:
    """x_t in fp64, t and, with classes, labels of which the last is none."""
    generator = torch.Generator().manual_seed(0)
    x_t = torch.randn(3, *trained.image_shape, generator=generator, dtype=torch.float64)
    t = torch.randint(0, min(trained.diffusion.timesteps, TIMESTEPS), (3,), generator=generator)
    classes = trained.unet_spec.classes
    return (x_t, t) if classes is None else (x_t, t, torch.tensor([0, classes - 1, classes]))


def assert_close(theirs: torch.Tensor, ours: torch.Tensor) -> None:
    """In fp64 only the sinusoid's angles t x frequency are rounded to fp32, with t below TIMESTEPS:
    by division, product, exponential and product, each within half a unit, an angle errs by up to 4 x 32 x 2^-24."""
    tolerance = 4 * TIMESTEPS * 2**-24
    torch.testing.assert_close(theirs, ours, rtol=0, atol=tolerance * ours.abs().max().item())


def shapes_of(unet: UNet) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in unet.layers.named_parameters()}


def assert_initial(path: Path, unet: UNet) -> None:
    """A run that starts from a file has the weights of ``unet``."""
    weights = InitialWeights(path, shapes_of(unet))
    for name, parameter in unet.layers.named_parameters():
        assert weights.read(name).equal(parameter.flatten()), name


COLOUR: dict[str, Any] = {
    "unet": {
        **{"multipliers": [1, 3, 2], "attention_resolutions": [4], "head_channels": 2, "embedding_channels": 10},
        **{"time_conditioning": "scale_shift", "sinusoid_order": "cos_sin", "sinusoid_shift": 0},
        **{"downsample_padding": "symmetric", "classes": None},
    },
    "diffusion": {"schedule": "sigmoid", "objective": "v", "timesteps": 100},
    "sampler": {"variance": "small", "clip": "dynamic", "spacing": "leading"},
    "data": {"channels": 3},
    "train": {"label_drop": 0.0},
}
ODD: dict[str, Any] = {"unet": {"channels": 3, "multipliers": [2, 3], "norm_groups": 3}}
"""Levels of 6 and 9 channels, whose greatest common divisor is odd."""
OF_EDM: dict[str, Any] = {
    **UNLABELLED,
    "diffusion": {"schedule": "edm", "objective": "v", "sigma_data": 0.3},
    "sampler": {"sigma_min": 0.01, "sigma_max": 120.0, "rho": 5.0},
}
RECTANGLES: dict[str, Any] = {
    **UNLABELLED,
    "data": {"image_size": [8, 16]},
    "unet": {**UNLABELLED["unet"], "attention_resolutions": [], "attention_levels": [1]},
}
LEVELS = {"sigma_min", "sigma_max", "rho"}
"""Fields of the sampler that EDM's scheduler stores."""


@pytest.mark.parametrize(
    "sections", [{}, COLOUR, ODD, OF_EDM, RECTANGLES], ids=["classes", "colour", "odd", "edm", "rectangles"]
)
def test_checkpoint_to_diffusers_and_back_predicts_the_same(sections: dict[str, Any], tmp_path: Path) -> None:
    spec = tiny_spec(**sections)
    checkpoint, hub, imported = plant_alone(tmp_path, **sections), tmp_path / "hub", tmp_path / "imported"
    assert main(["export", str(checkpoint), "--out", str(hub), "--samples", "0"]) == 0
    trained = load_trained(checkpoint)
    exported = load_trained(hub)
    assert same_weights(exported.unet, trained.unet)
    assert exported.sampler.model_dump(include=LEVELS) == spec.sampler.model_dump(include=LEVELS)
    pipeline = diffusers.DDPMPipeline.from_pretrained(hub)
    if spec.unet.classes is None and spec.diffusion.schedule != "edm":
        images = pipeline(batch_size=2, num_inference_steps=2, output_type="np").images
        assert images.shape == (2, *spec.data.size, spec.data.channels) and not (images != images).any()
    inputs = examples(trained)
    assert_close(pipeline.unet.double()(*inputs).sample, copy.deepcopy(trained.unet).double()(*inputs))

    base = tmp_path / "base.yaml"
    base.write_text(yaml.safe_dump(spec.model_dump(mode="json")))
    assert main(["import", str(hub), "--spec", str(base), "--out", str(imported)]) == 0
    back = load_spec(imported / "spec.yaml")
    assert back.diffusion == spec.diffusion
    assert_initial(imported / "weights.safetensors", trained.unet)


def test_the_folder_is_complete_and_its_samples_are_those_of_ddpm_ds_sample(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hub").mkdir()  # an empty folder is as good as none
    assert main(["export", str(checkpoint), str(tmp_path / "hub"), "--samples", "20"]) == 0
    files = sorted(str(path.relative_to(tmp_path / "hub")) for path in (tmp_path / "hub").rglob("*.*"))
    parts = ["scheduler/scheduler_config.json", "unet/config.json", "unet/diffusion_pytorch_model.safetensors"]
    assert files == ["README.md", "model_index.json", "samples.png", *parts]
    out = capsys.readouterr().out
    assert re.search(r"hub: ema weights of .*checkpoint in fp32", out)
    assert "diffusers opens it as DDPMPipeline" in out
    grid = tmp_path / "drawn"
    assert main(["sample", str(checkpoint), "--count", "20", "--out", str(grid), "--device", "cpu"]) == 0
    with Image.open(grid / "grid.png") as ours, Image.open(tmp_path / "hub" / "samples.png") as theirs:
        difference = np.abs(np.asarray(ours, dtype=int) - np.asarray(theirs, dtype=int))
        assert difference.max() <= 1, "up to rounding: the batches differ"


def test_fp16_rounds_the_weights_and_what_it_cannot_hold_is_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    options = ["--dtype", "fp16", "--weights", "raw", "--samples", "0"]
    assert main(["export", str(checkpoint), str(tmp_path / "half"), *options]) == 0
    assert main(["export", str(checkpoint), str(tmp_path / "raw"), "--weights", "raw", "--samples", "0"]) == 0
    assert same_weights(load_trained(tmp_path / "raw").unet, load_trained(checkpoint, weights="raw").unet)
    half, full = (load_file(tmp_path / name / "unet" / export.WEIGHTS[0]) for name in ("half", "raw"))
    assert all(half[name].dtype is torch.float16 and torch.equal(half[name], full[name].half()) for name in full)
    trained = trained_of(tiny_spec())
    trained.unet.get_parameter("layers.1.conv.bias")[2] = 7e4
    rounded(trained, "fp32")
    with pytest.raises(CheckpointError, match=r"1\.conv\.bias of memory has values beyond fp16; use --dtype fp32"):
        rounded(trained, "fp16")


def test_with_a_folded_label_the_pipeline_needs_none(checkpoint: Path, tmp_path: Path) -> None:
    trained = load_trained(checkpoint)
    x_t, t, labels = examples(trained)
    unet = trained.unet.double()
    for label, row in (("none", 10), ("3", 3)):
        assert main(["export", str(checkpoint), str(tmp_path / label), "--label", label, "--samples", "2"]) == 0
        pipeline = diffusers.DDPMPipeline.from_pretrained(tmp_path / label)
        assert len(pipeline(batch_size=2, num_inference_steps=2).images) == 2
        assert_close(pipeline.unet.double()(x_t, t).sample, unet(x_t, t, torch.full_like(labels, row)))
        assert f"| label | {label}, folded" in (tmp_path / label / "README.md").read_text()


@pytest.mark.parametrize(("sections", "dtype"), [(FEW, "fp32"), ({**FEW, **UNLABELLED}, "fp16"), (OF_EDM, "fp32")])
def test_the_python_of_the_model_card_runs(
    tmp_path: Path, sections: dict[str, Any], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = str(plant_alone(tmp_path, **sections))
    assert main(["export", source, str(tmp_path / "hub"), "--samples", "0", "--dtype", dtype]) == 0
    monkeypatch.chdir(tmp_path / "hub")
    (program,) = re.findall(r"```python\n(.*?)```", Path("README.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(program, names)
    assert len(names["images"]) == (10 if sections is FEW else 16) and names["images"][0].size == (8, 8)


def test_the_model_card_has_the_licence_and_the_runs_numbers(tmp_path: Path) -> None:
    trained = load_trained(plant(tmp_path / "run", images=320))
    card = model_card(trained, precision="fp32", label=None, picture="samples.png")
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["license"] == "apache-2.0" and front["library_name"] == "diffusers" and "ddpm" in front["tags"]
    assert "| data | digits, 8x8 pixels and 1 channel |\n| images seen | 320, 16 per step |" in card
    assert "| parameters | 45,321 in fp32 |" in card
    assert "![samples](samples.png)" in card and "ddpm-ds sample ." in card and "use_clipped_model_output=True" in card
    assert str(tmp_path) not in card, "a card goes to other machines"


def test_an_interrupted_export_leaves_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(trained: Trained, folder: Path, precision: Any) -> None:
        write_pipeline(trained, folder, precision)
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "write_pipeline", write)
    assert main(["export", str(checkpoint), str(tmp_path / "new" / "hub"), "--samples", "0"]) == 130
    assert not any(tmp_path.iterdir())


WIDER: dict[str, Any] = {"classes": None, "channels": 12}
BAD_EXPORTS: dict[str, tuple[list[str], str]] = {
    "not empty": (["CHECKPOINT", "FULL"], "FULL exists and is not empty; name a new folder"),
    "current folder": (["CHECKPOINT", "."], "here is the current folder, which can't be replaced; name a new folder"),
    "in a file": (["CHECKPOINT", "FULL/file/hub"], "can't be written"),
    "no checkpoint": (["missing", "OUT"], "missing does not exist; name a checkpoint"),
    "no place": (["CHECKPOINT"], "the following arguments are required: "),
    "two places": (["CHECKPOINT", "OUT", "--out", "OUT"], "--out OUT: .* already; leave one of them out"),
    "a file that exists": (["CHECKPOINT", "FULL/x.safetensors"], "x.safetensors exists; name a new file"),
    "a file without text": (["CHECKPOINT", "OUT.safetensors"], "its U-Net reads no text; export a folder instead"),
    "a run that is not there": (["runs/none", "OUT"], "error: runs/none does not exist; name a checkpoint"),
    "label of no class": (["CHECKPOINT", "OUT", "--label", "10"], "--label 10 is out of range: the U-Net has 10"),
    "label without classes": (["UNLABELLED", "OUT", "--label", "1"], "--label 1: the U-Net has no classes"),
    "label of no kind": (["CHECKPOINT", "OUT", "--label", "x"], "--label: 'x' is not none or a class"),
    "long label": (["CHECKPOINT", "OUT", "--label", "9" * 5000], "is not none or a class"),
    "too many samples": (["CHECKPOINT", "OUT", "--samples", "65"], "'65' is not a number from 0 to 64"),
}
BAD_IMPORTS: dict[str, tuple[list[str], str]] = {
    "image size": (["--set", "data.image_size=16"], r"data.image_size = 16, but .* has 8; --set data.image_size=8"),
    "steps": (["--set", "sampler.steps=2000"], "sampler.steps = 2000 is above"),
    "typed": (["--set", "unet.channels=4096"], r"--set unet.channels=4096: the model of .* decides it, \d+; leave"),
    "a file": (["--out", __file__], "is no folder; name a new folder"),
    "no model": (["/nowhere"], "/nowhere does not exist; name a folder of diffusers"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline of 8x8 digits without labels."""
    spec = tiny_spec(unet=WIDER, train={"label_drop": 0.0}, diffusion={"schedule": "cosine"})
    return written(tmp_path_factory.mktemp("models") / "model", spec, seed=9)


def written(folder: Path, spec: RunSpec, seed: int = 1) -> Path:
    folder.mkdir()
    write_pipeline(trained_of(spec, seed), folder, "fp32")
    return folder


@pytest.mark.parametrize("name", [*BAD_EXPORTS, *BAD_IMPORTS])
def test_bad_input_is_one_line_and_nothing_is_written(
    tmp_path: Path,
    name: str,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)  # no name here is one on the hub
    for folder in ("here", "full"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for file in ("file", "x.safetensors"):
        (tmp_path / "full" / file).touch()
    options, message = BAD_EXPORTS.get(name) or BAD_IMPORTS[name]
    words = ["export", *options]
    if name in BAD_IMPORTS:
        model = [] if options[0] == "/nowhere" else ["MODEL"]
        words = ["import", *model, "--spec", str(SPECS / "digits.yaml"), "--out", "OUT", *options]
    paths = {"FULL": tmp_path / "full", "OUT": tmp_path / "out"}
    paths |= {name.upper(): request.getfixturevalue(name) for name in ("checkpoint", "unlabelled", "model")}
    for short, path in paths.items():
        words, message = [word.replace(short, str(path)) for word in words], message.replace(short, str(path))
    before = sorted(tmp_path.rglob("*"))
    line = refusal(capsys, *words)
    assert re.search(message, line), line
    assert sorted(tmp_path.rglob("*")) == before


def run_import(model: Path, out: Path, *options: str, base: str = "digits", code: int = 0) -> RunSpec | None:
    """The spec that the verb makes."""
    words = ["import", str(model), "--spec", str(SPECS / f"{base}.yaml"), "--out", str(out), *options]
    assert main(words) == code
    return load_spec(out / "spec.yaml") if code == 0 else None


def test_a_spec_of_the_base_begins_with_the_models_weights(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "my runs" / "imported"
    changes = ("unet.dropout=0.2", "diffusion.loss=l1", "diffusion.weighting=min_snr", "train.images=64")
    spec = run_import(model, out, *(word for change in changes for word in ("--set", change)))
    before = load_spec(SPECS / "digits.yaml", changes)
    weights = out / "weights.safetensors"
    assert spec is not None
    assert spec.unet == tiny_spec(unet={**WIDER, "dropout": 0.2}, train={"label_drop": 0}).unet
    assert spec.diffusion == before.diffusion.model_copy(update={"schedule": "cosine"})
    assert spec.train == before.train.model_copy(update={"initial_weights": weights})
    others = set(type(spec).model_fields) - {"unet", "diffusion", "train"}
    assert spec.model_dump(include=others) == before.model_dump(include=others)
    assert_initial(weights, unet_of(spec, 9))
    *_, command = capsys.readouterr().out.splitlines()
    words = shlex.split(command)
    assert words[:2] == ["ddpm-ds", "train"] and words[-2:] == ["--spec", str(out / "spec.yaml")]
    assert (REPOSITORY / words[words.index("--deepspeed_config") + 1]).is_file()
    assert sorted(path.name for path in out.parent.iterdir()) == ["imported"]


def test_the_base_decides_what_the_model_leaves_open(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = shutil.copytree(model, tmp_path / "plain")
    (plain / "scheduler" / "scheduler_config.json").unlink()
    spec = run_import(plain, tmp_path / "out", "--set", "diffusion.timesteps=30")
    assert spec is not None and spec.diffusion.timesteps == 30
    assert "no scheduler_config.json" in capsys.readouterr().out
    # The base's own U-Net need not fit its images: cifar10's attends at 16 pixels.
    run_import(model, tmp_path / "8", "--set", "data.image_size=8", "--set", "data.channels=1", base="cifar10")


def foreign_model(folder: Path, **options: Any) -> Any:
    """A tiny model that diffusers has made and saved."""
    torch.manual_seed(0)
    config = diffusers_config(tiny_spec(**UNLABELLED).unet, Interface(channels=1, size=(8, 8)))
    theirs: Any = diffusers.UNet2DModel(**{**config, **options})
    theirs.save_pretrained(folder)
    return theirs.eval()


def test_labels_are_classes_and_no_label(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = run_import(written(tmp_path / "model", tiny_spec()), tmp_path / "out")
    assert spec is not None and spec.unet.classes == 10
    assert "its 11 labels are read as 10 classes and, last, no label" in capsys.readouterr().out
    run_import(tmp_path / "model", tmp_path / "other", "--set", "unet.classes=11", code=2)
    printed = capsys.readouterr().err
    assert "unet.classes = 11, but the model" in printed and "has 10 (of 11 labels, see --last-label)" in printed


@pytest.mark.parametrize("labels", [1, 10])
def test_every_label_may_be_a_class(labels: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = foreign_model(tmp_path / "model", num_class_embeds=labels)
    changes = ("--set", f"unet.classes={labels}")
    run_import(tmp_path / "model", tmp_path / "out", *changes, code=2)
    spec = run_import(tmp_path / "model", tmp_path / "out", *changes, "--last-label", "class")
    assert f"its {labels} labels are read as {labels} classes; no label, which it lacks" in capsys.readouterr().out
    assert spec is not None and spec.unet.classes == labels
    ours = UNet(unet_layers(spec.unet, Interface(channels=1, size=(8, 8))), 0).eval()
    ours.layers.load_state_dict(load_file(tmp_path / "out" / "weights.safetensors"))
    x_t, t, label = torch.randn(labels, 1, 8, 8, dtype=torch.float64), torch.full((labels,), 5), torch.arange(labels)
    with torch.no_grad():
        assert_close(theirs.double()(x_t, t, label).sample, ours.double()(x_t, t, label))
        theirs.class_embedding.weight.zero_()
        assert_close(theirs(x_t, t, label).sample, ours(x_t, t, torch.full_like(label, labels)))


def test_averaged_weights_of_diffusers_own_training_are_imported(tmp_path: Path) -> None:
    theirs = foreign_model(tmp_path / "plain")
    EMAModel(theirs.parameters(), model_cls=diffusers.UNet2DModel, model_config=theirs.config).save_pretrained(
        tmp_path / "unet_ema"
    )
    there = json.loads((tmp_path / "unet_ema" / "config.json").read_text())
    assert there.keys() - json.loads((tmp_path / "plain" / "config.json").read_text()).keys() == AVERAGE
    plain, averaged = (run_import(tmp_path / name, tmp_path / f"{name}-out") for name in ("plain", "unet_ema"))
    assert plain is not None and averaged is not None and plain.unet == averaged.unet
    files = [(tmp_path / f"{name}-out" / "weights.safetensors").read_bytes() for name in ("plain", "unet_ema")]
    assert files[0] == files[1]


def test_a_model_that_cannot_be_trained_is_refused_and_leaves_nothing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = shutil.copytree(model, tmp_path / "models" / "mine")
    config = json.loads((mine / "unet" / "config.json").read_text())
    config |= {"norm_num_groups": 3, "attn_norm_num_groups": 3, "block_out_channels": [9, 6]}
    write_json(mine / "unet" / "config.json", config)
    run_import(mine, tmp_path / "out", code=2)
    message = "first level of 9 channels (diffusers: the first of block_out_channels), which is odd"
    assert message in capsys.readouterr().err and [path.name for path in tmp_path.iterdir()] == ["models"]


def test_initial_weights_of_another_unet_are_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    path, unet = tmp_path / "weights.safetensors", unet_of(tiny_spec(), 1)
    consolidate(checkpoint, path, "ema", "fp32")
    with pytest.raises(SpecError, match=f"^train.initial_weights = {path} is of another U-Net .*it lacks "):
        InitialWeights(path, shapes_of(unet_of(tiny_spec(unet={"blocks_per_level": 2}), 1)))
    save_file({name: torch.zeros(shape, dtype=torch.int32) for name, shape in shapes_of(unet).items()}, path)
    with pytest.raises(SpecError, match="no float"):
        InitialWeights(path, shapes_of(unet))


def test_an_export_on_the_hub_is_drawn_from_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_alone(tmp_path, **FEW, **UNLABELLED)
    monkeypatch.chdir(tmp_path)
    assert main(["export", "checkpoint", "out", "--samples", "2"]) == 0
    hub = ModelHub(tmp_path / "cache")
    hub.repositories["me/digits"] = tmp_path / "out"
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot_download)
    trained = load_trained("me/digits")
    assert trained.origin == "me/digits" and same_weights(trained.unet, load_trained("checkpoint").unet)
    for name, grid in (("me/digits", "1.npz"), ("out", "2.npz")):
        assert main(["sample", name, "--count", "2", "--steps", "2", "--device", "cpu", "--out", grid]) == 0
    assert Path("1.npz").read_bytes() == Path("2.npz").read_bytes()
    with pytest.raises(CheckpointError, match=r"^me/digits is no folder here, and on .* leave out --weights raw$"):
        load_trained("me/digits", weights="raw")


def test_a_run_with_text_shows_its_last_picture(tmp_path: Path, trackers: list[FakeTracker]) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    text = {"context_channels": 8, "tokens": 4, "blocks": [1, 1], "heads": [2, 4]}
    data = {"source": "folder", "path": "p", "text": {"encoders": str(tmp_path / "missing"), "layer": "last"}}
    unet = {**UNLABELLED["unet"], "attention_resolutions": [], "text": text}
    plant(run, data=data, unet=unet, train=UNLABELLED["train"])
    (run / "samples").mkdir()
    for images in ("images-000000160", "images-000000320"):
        (run / "samples" / f"{images}.png").write_text(images)
    assert main(["export", str(run), str(out)]) == 0
    assert (out / "samples.png").read_text() == "images-000000320" and "samples.png" in (out / "README.md").read_text()
    for number, words in enumerate((["--samples", "0"], ["--weights", "raw"])):
        assert main(["export", str(run), str(tmp_path / str(number)), *words]) == 0
        assert not (tmp_path / str(number) / "samples.png").exists()
