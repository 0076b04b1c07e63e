"""ddpm-ds export: what diffusers makes of it, the way back, the card, and what is refused."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file

from ddpm_ds.cli.main import main
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.config.spec_file import load_spec
from ddpm_ds.errors import CheckpointError, OutputError
from ddpm_ds.evaluate import diary, export
from ddpm_ds.evaluate.export import check_in_diffusers, rounded, without_labels, write_pipeline
from ddpm_ds.evaluate.model_card import last_losses, model_card
from ddpm_ds.evaluate.trained import Trained, load_trained
from ddpm_ds.train.resume import InitialWeights
from ddpm_ds.unet.layers import unet_layers
from ddpm_ds.unet.model import UNet
from tests.evaluate.planted import plant, trained_of
from tests.launching import tiny_spec

diffusers = pytest.importorskip("diffusers", reason="diffusers, an optional extra, is not installed")

UNLABELLED: dict[str, Any] = {"unet": {"classes": None}, "train": {"label_drop": 0.0}}
FEW: dict[str, Any] = {"diffusion": {"timesteps": 4}, "sampler": {"steps": 2}}


def checkpoint_of(folder: Path, **sections: dict[str, Any]) -> Path:
    """A checkpoint outside of a run's folder, so that nothing is recorded in MLflow."""
    planted = plant(folder / "run", 320, **sections)
    shutil.move(planted, folder / "checkpoint")
    shutil.rmtree(folder / "run")
    return folder / "checkpoint"


def examples(spec: RunSpec, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """x_t, t and, with classes, labels of which the last is none."""
    generator = torch.Generator().manual_seed(seed)
    x_t = torch.randn(3, spec.data.channels, spec.data.image_size, spec.data.image_size, generator=generator)
    t = torch.randint(0, spec.diffusion.timesteps, (3,), generator=generator)
    classes = spec.unet.classes
    return (x_t, t) if classes is None else (x_t, t, torch.tensor([0, classes - 1, classes]))


def assert_close(found: torch.Tensor, expected: torch.Tensor, relative: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=relative * expected.abs().max().item())


@st.composite
def sections(draw: st.DrawFn) -> dict[str, dict[str, Any]]:
    """Tiny runs that between them use everything a U-Net and a process may have."""
    levels = draw(st.integers(1, 3))
    classes = draw(st.sampled_from([None, 3]))
    unet = {
        "channels": 4 * draw(st.integers(1, 2)),
        "multipliers": draw(st.lists(st.integers(1, 3), min_size=levels, max_size=levels)),
        "blocks_per_level": draw(st.integers(1, 2)),
        "attention_resolutions": draw(st.sets(st.sampled_from([8, 4, 2][:levels])).map(sorted)),
        "middle_attention": draw(st.booleans()),
        "head_channels": draw(st.sampled_from([None, 2, 4])),
        "norm_groups": draw(st.sampled_from([1, 2, 4])),
        "norm_epsilon": draw(st.sampled_from([1e-6, 1e-3])),
        "embedding_channels": draw(st.sampled_from([None, 10])),
        "time_conditioning": draw(st.sampled_from(["add", "scale_shift"])),
        "sinusoid_order": draw(st.sampled_from(["sin_cos", "cos_sin"])),
        "sinusoid_shift": draw(st.sampled_from([0, 1])),
        "downsample_padding": draw(st.sampled_from(["symmetric", "asymmetric"])),
        "classes": classes,
    }
    diffusion = {
        "schedule": draw(st.sampled_from(["linear", "cosine", "sigmoid"])),
        "objective": draw(st.sampled_from(["eps", "x0", "v"])),
        "timesteps": draw(st.sampled_from([3, 100])),
    }
    sampler = {
        "variance": draw(st.sampled_from(["small", "large"])),
        "clip": draw(st.sampled_from(["none", "static", "dynamic"])),
        "spacing": draw(st.sampled_from(["trailing", "leading", "linspace"])),
    }
    data = {"channels": draw(st.sampled_from([1, 3]))}
    train = {"label_drop": 0.2 if classes else 0.0}
    return {"unet": unet, "diffusion": diffusion, "sampler": sampler, "data": data, "train": train}


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sections())
def test_checkpoint_to_diffusers_and_back_predicts_the_same(sections: dict[str, dict[str, Any]]) -> None:
    spec = tiny_spec(**sections)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        checkpoint, hub, imported = checkpoint_of(folder, **sections), folder / "hub", folder / "imported"
        assert main(["export", str(checkpoint), str(hub), "--samples", "0"]) == 0
        expected = load_trained(checkpoint).unet(*examples(spec))

        pipeline = diffusers.DDPMPipeline.from_pretrained(hub)
        assert_close(pipeline.unet(*examples(spec)).sample, expected)
        if spec.unet.classes is None:
            images = pipeline(batch_size=2, num_inference_steps=2, output_type="np").images
            assert images.shape == (2, 8, 8, spec.data.channels) and not (images != images).any()

        base = folder / "base.yaml"
        base.write_text(yaml.safe_dump(spec.model_dump(mode="json")))
        assert main(["import", str(hub), "--spec", str(base), "--out", str(imported)]) == 0
        back = load_spec(imported / "spec.yaml")
        assert back.diffusion == spec.diffusion
        unet = UNet(unet_layers(back.unet, image_channels=spec.data.channels, image_size=8), 0).eval()
        parameters = dict(unet.layers.named_parameters())
        weights = InitialWeights(imported / "weights.safetensors", {n: tuple(p.shape) for n, p in parameters.items()})
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights.read(name).view(parameter.shape))
            assert_close(unet(*examples(spec)), expected)
            assert_close(load_trained(hub).unet(*examples(spec)), expected)


def test_the_folder_is_complete_and_says_what_was_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = checkpoint_of(tmp_path, **FEW)
    (tmp_path / "hub").mkdir()  # an empty folder is as good as none
    assert main(["export", str(checkpoint), str(tmp_path / "hub"), "--samples", "5"]) == 0
    assert sorted(str(path.relative_to(tmp_path / "hub")) for path in (tmp_path / "hub").rglob("*.*")) == [
        "README.md",
        "model_index.json",
        "samples.png",
        "scheduler/scheduler_config.json",
        "unet/config.json",
        "unet/diffusion_pytorch_model.safetensors",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "hub"]
    out = capsys.readouterr().out
    assert re.search(r"hub: ema weights of .*checkpoint in fp32", out)
    assert f"read back by diffusers {diffusers.__version__}: " in out and "alphas_cumprod" in out
    with Image.open(tmp_path / "hub" / "samples.png") as image:
        assert image.size == (3 * (4 * 8 + 4), 2 * (4 * 8 + 4))


def test_weights_raw_are_those_as_trained(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, **FEW)
    for kind in ("ema", "raw"):
        options = ["--weights", kind, "--samples", "0"]
        assert main(["export", str(checkpoint), str(tmp_path / kind), *options]) == 0
        exported, expected = load_trained(tmp_path / kind), load_trained(checkpoint, weights=kind)
        assert exported.unet.state_dict().keys() == expected.unet.state_dict().keys()
        for name, tensor in expected.unet.state_dict().items():
            assert torch.equal(exported.unet.state_dict()[name], tensor), name
    assert load_trained(tmp_path / "ema").digest != load_trained(tmp_path / "raw").digest


def test_fp16_rounds_the_weights_and_is_half_the_size(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, **FEW)
    for dtype in ("fp32", "fp16"):
        assert main(["export", str(checkpoint), str(tmp_path / dtype), "--dtype", dtype, "--samples", "0"]) == 0
    half, full = (load_file(tmp_path / dtype / "unet" / export.WEIGHTS[0]) for dtype in ("fp16", "fp32"))
    assert all(half[name].dtype is torch.float16 and torch.equal(half[name], full[name].half()) for name in full)


def test_a_weight_beyond_fp16_is_refused_by_name() -> None:
    trained = trained_of(tiny_spec())
    trained.unet.get_parameter("layers.1.conv.bias")[2] = 7e4
    rounded(trained, "fp32")
    with pytest.raises(CheckpointError, match=r"1\.conv\.bias of memory has values beyond fp16; use --dtype fp32"):
        rounded(trained, "fp16")


@pytest.mark.parametrize("label", [0, 7, 10])
def test_a_folded_label_is_exact(label: int) -> None:
    spec = tiny_spec(sampler={"guidance": 2.0}, unet={"time_conditioning": "scale_shift"})
    trained = trained_of(spec)
    with torch.no_grad():
        for parameter in trained.unet.parameters():
            parameter.copy_((parameter * 256).round() / 256)  # of few digits: the one sum that is folded is not rounded
    folded = without_labels(trained, label)
    x_t, t = examples(spec)[0].double(), examples(spec)[1]
    found, expected = folded.unet.double()(x_t, t), trained.unet.double()(x_t, t, torch.full((3,), label))
    assert_close(found, expected, 2**-24)  # less than fp32 can show; fp64 adds in another order, with errors of 2^-53
    assert folded.unet_spec.classes is None and folded.sampler.guidance == 1.0
    assert trained.unet_spec.classes == 10, "the original is as it was"


def test_with_a_folded_label_the_pipeline_needs_none(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, **FEW)
    x_t, t, labels = examples(tiny_spec(**FEW))
    unet = load_trained(checkpoint).unet
    for label, row in (("none", 10), ("3", 3)):
        assert main(["export", str(checkpoint), str(tmp_path / label), "--label", label, "--samples", "2"]) == 0
        pipeline = diffusers.DDPMPipeline.from_pretrained(tmp_path / label)
        assert_close(pipeline.unet(x_t, t).sample, unet(x_t, t, torch.full_like(labels, row)))
        assert len(pipeline(batch_size=2, num_inference_steps=2).images) == 2
        assert f"| label | {label}, folded" in (tmp_path / label / "README.md").read_text()


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("conditional", [True, False], ids=["classes", "unconditional"])
def test_the_python_of_the_model_card_runs(
    tmp_path: Path, conditional: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = checkpoint_of(tmp_path, **FEW, **({} if conditional else UNLABELLED))
    assert main(["export", str(checkpoint), str(tmp_path / "hub"), "--samples", "0", "--dtype", dtype]) == 0
    monkeypatch.chdir(tmp_path / "hub")
    programs = re.findall(r"```python\n(.*?)```", Path("README.md").read_text(), re.DOTALL)
    assert len(programs) == (1 if conditional else 2)
    for program in programs:
        names: dict[str, Any] = {}
        exec(program, names)
        assert len(names["images"]) == (10 if conditional else 16)
        assert names["images"][0].size == (8, 8)


def test_the_model_card_has_the_runs_numbers(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    checkpoint = plant(run_dir, images=320, data={"held_out_images": 197})
    points = [(10, 0.5), (20, 0.25), (40, 0.125)]  # of 16 images each: the last one is after the checkpoint
    (run_dir / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "train/loss": loss}) + "\n" for step, loss in points) + '{"step": 2'
    )
    (run_dir / "evaluations.jsonl").write_text(
        json.dumps({"step": 20, "eval/loss": 0.375, "eval/loss_t10": 1.0}) + "\n"
    )
    trained = load_trained(checkpoint)
    assert last_losses(trained) == {"train/loss": 0.25, "eval/loss": 0.375}

    card = model_card(trained, precision="fp32", label=None, picture="samples.png")
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["library_name"] == "diffusers" and "ddpm" in front["tags"]
    for row in (
        "| parameters | 45,321 in fp32 |",
        "| data | digits, 8x8 pixels and 1 channel |",
        "| images seen | 320, 16 per step |",
        "| last training loss | 0.2500 (l2, uniform) |",
        "| held-out loss | 0.3750 on 197 images, averaged weights |",
    ):
        assert row in card, row
    assert "![samples](samples.png)" in card and "ddpm-ds sample ." in card
    assert str(tmp_path) not in card, "a card goes to other machines"


def test_losses_after_a_rewind_are_those_of_the_course_that_was_kept(tmp_path: Path) -> None:
    checkpoint = plant(tmp_path / "run", images=320)
    points = [(10, 0.5), (20, 9.0), (15, 0.25)]
    lines = [json.dumps({"step": step, "train/loss": loss}) + "\n" for step, loss in points]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines))
    assert last_losses(load_trained(checkpoint)) == {"train/loss": 0.25}


def test_without_diffusers_it_is_written_all_the_same_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "diffusers" else find(name))
    assert main(["export", str(checkpoint_of(tmp_path, **FEW)), str(tmp_path / "hub"), "--samples", "0"]) == 0
    assert "not read back, because diffusers is not installed" in capsys.readouterr().out
    assert load_trained(tmp_path / "hub").weights == "export"


@pytest.mark.parametrize("wrong", ["weights", "schedule", "not a number"])
def test_what_diffusers_reads_otherwise_is_found_and_nothing_is_left(
    tmp_path: Path, wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = checkpoint_of(tmp_path, **FEW)

    def write(trained: Trained, folder: Path, precision: Any) -> None:
        write_pipeline(trained, folder, precision)
        if wrong == "schedule":
            file = folder / "scheduler" / "scheduler_config.json"
            file.write_text(file.read_text().replace("0.02", "0.021"))
        else:
            trained.unet.get_parameter("layers.2.conv1.weight")[0, 0, 0, 0] = 0.5 if wrong == "weights" else math.nan

    monkeypatch.setattr(export, "write_pipeline", write)
    assert main(["export", str(checkpoint), str(tmp_path / "hub"), "--samples", "0"]) == 2
    err = capsys.readouterr().err
    assert "reads something else than" in err and "nothing was written" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def test_an_interruption_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = checkpoint_of(tmp_path, **FEW)

    def interrupted(trained: Trained, folder: Path) -> str:
        assert (folder / "model_index.json").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "check_in_diffusers", interrupted)
    assert main(["export", str(checkpoint), str(tmp_path / "hub"), "--samples", "0"]) == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def test_samples_take_the_classes_in_turn_and_are_those_of_ddpm_ds_sample(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, **FEW)
    assert main(["export", str(checkpoint), str(tmp_path / "hub"), "--samples", "20"]) == 0
    out = tmp_path / "grid.png"
    assert main(["sample", str(checkpoint), "--count", "20", "--out", str(out), "--device", "cpu"]) == 0
    with Image.open(out) as ours, Image.open(tmp_path / "hub" / "samples.png") as theirs:
        difference = np.abs(np.asarray(ours, dtype=int) - np.asarray(theirs, dtype=int))
        assert difference.max() <= 1, "up to rounding: the batches differ"


def test_the_export_is_an_artifact_of_a_child_run_and_a_model_by_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []

    class Recorded:
        def artifact(self, path: Path, folder: str = "") -> None:
            assert path.exists()
            calls.append(("artifact", path.name, folder))

        def register(self, name: str, folder: str) -> None:
            calls.append(("register", name, folder))

    @contextlib.contextmanager
    def begin(trained: Trained, kind: str, params: dict[str, Any]) -> Iterator[Recorded]:
        calls.append(("begin", trained.run_dir, kind, params["dtype"]))
        yield Recorded()
        calls.append(("finish",))

    monkeypatch.setattr(diary.Child, "begin", begin)
    plant(tmp_path / "run", **FEW)
    options = ["--samples", "1", "--register", "digits"]
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "hub"), *options]) == 0
    parts = ["README.md", "model_index.json", "samples.png", "scheduler", "unet"]
    assert calls == [
        ("begin", (tmp_path / "run").resolve(), "export", "fp32"),
        *(("artifact", part, "export") for part in parts),
        ("register", "digits", "export"),
        ("finish",),
    ]


BAD: dict[str, tuple[list[str], str]] = {
    "not empty": (["CHECKPOINT", "FULL"], "FULL exists and is not empty; name a new folder"),
    "a file": (["CHECKPOINT", "FULL/file"], "FULL/file exists and is no folder"),
    "in a file": (["CHECKPOINT", "FULL/file/hub"], "can't be written"),
    "no checkpoint": (["missing", "OUT"], "missing does not exist; name a checkpoint"),
    "neither": (["FULL", "OUT"], "FULL holds no weights; name a checkpoint"),
    "label of no class": (
        ["CHECKPOINT", "OUT", "--label", "10"],
        "--label 10 is out of range: the U-Net has 10 classes",
    ),
    "label of no kind": (["CHECKPOINT", "OUT", "--label", "-1"], "--label: '-1' is not none or a class|expected one"),
    "too many samples": (["CHECKPOINT", "OUT", "--samples", "65"], "'65' is not a number from 0 to 64"),
    "dtype": (["CHECKPOINT", "OUT", "--dtype", "bf16"], "bf16.*fp32"),
    "weights": (["CHECKPOINT", "OUT", "--weights", "adam"], "adam.*ema"),
    "register": (["CHECKPOINT", "OUT", "--register", "digits"], "--register digits: .* is not in the folder of a run"),
    "no folder": (["CHECKPOINT"], "DIR; ddpm-ds export --help explains"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_nothing_is_written(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words, message = BAD[name]
    checkpoint_of(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    paths = {"CHECKPOINT": "checkpoint", "FULL": "full", "OUT": "out"}
    for short, path in paths.items():
        words = [word.replace(short, str(tmp_path / path)) for word in words]
        message = message.replace(short, str(tmp_path / path))
    before = sorted(tmp_path.rglob("*"))
    assert main(["export", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("ddpm-ds: error: ") and err.count("\n") == 1
    assert re.search(message, err), err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_label_without_classes_and_a_unet_that_diffusers_cannot_hold_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow: dict[str, Any] = {"unet": {"classes": None, "channels": 2, "norm_groups": 1}, "train": {"label_drop": 0.0}}
    checkpoint = checkpoint_of(tmp_path, **narrow)
    assert main(["export", str(checkpoint), str(tmp_path / "out"), "--label", "1"]) == 2
    assert "--label 1: the U-Net has no classes" in capsys.readouterr().err
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 2
    assert "can't be exported: unet.sinusoid_shift = 1 with a first width of 2" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", ["export", "import"])
def test_both_verbs_have_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0 and f"usage: ddpm-ds {verb}" in out and "examples" in out


def test_the_check_itself_finds_a_difference(tmp_path: Path) -> None:
    trained = trained_of(tiny_spec())
    write_pipeline(trained, tmp_path, "fp32")
    assert "within" in check_in_diffusers(trained, tmp_path)
    with pytest.raises(OutputError, match="predictions differ by"):
        check_in_diffusers(trained_of(tiny_spec(), seed=2), tmp_path)
