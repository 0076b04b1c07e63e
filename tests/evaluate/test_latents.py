"""Runs that have learned latents: what they draw is decoded, in pictures, samples, scores and exports."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from ddpm_ds.cli.main import main
from ddpm_ds.config.spec import SamplesSpec
from ddpm_ds.data.cache import DatasetCache
from ddpm_ds.data.latents import pixels_of
from ddpm_ds.data.prepare import How, prepare
from ddpm_ds.diffusion.samplers import Drawing, Sampler
from ddpm_ds.evaluate.sampling import check_guide, sample
from ddpm_ds.evaluate.scores import open_reference
from ddpm_ds.evaluate.trained import Trained, load_trained
from ddpm_ds.ground.errors import CheckpointError, DataError, SpecError
from ddpm_ds.training.start import check_store
from tests.autoencoders import save_autoencoder
from tests.evaluate.planted import UNLABELLED, plant, plant_alone, refusal, report
from tests.launching import REPOSITORY, run_ranks, tiny_spec, write_json
from tests.training.ranks import measured_losses, recorded_losses

CPU = torch.device("cpu")
SAMPLER = {"kind": "ddim", "steps": 3, "clip": "none"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an autoencoder in ``vae``."""
    path = tmp_path_factory.mktemp("latents")
    save_autoencoder(path / "vae")
    return path


@pytest.fixture(scope="module")
def sections(folder: Path) -> dict[str, Any]:
    """What a spec of latents of the digits has beside a tiny one."""
    data = {"channels": 4, "autoencoder": str(folder / "vae"), "horizontal_flips": False}
    return {"data": {**data, "store_root": str(folder / "data")}, "sampler": SAMPLER, **UNLABELLED}


@pytest.fixture(scope="module")
def store(sections: dict[str, Any]) -> DatasetCache:
    """The latents of the digits, 4x8x8."""
    return prepare(tiny_spec(**sections).data, How(encode_on=CPU))


@pytest.fixture(scope="module")
def checkpoint(folder: Path, sections: dict[str, Any], store: DatasetCache) -> Path:
    return plant_alone(folder, data_sha256=store.meta.sha256, **sections)


def decoded_by_diffusers(trained: Trained, vae: Path, count: int) -> torch.Tensor:
    """The first images of seed 0, whose latents our U-Net draws; in the units of uint8, before they are rounded."""
    sampler = Sampler(trained.sampler, trained.diffusion)
    shape, index = trained.image_shape, torch.arange(count)
    drawing = Drawing(sampler, seed=0, index=index, shape=shape, labels=None, no_label=None)
    with torch.no_grad():
        for _ in range(drawing.calls):
            drawing.take(trained.unet(*drawing.inputs()))
        decoder = diffusers.AutoencoderKL.from_pretrained(vae)
        images: torch.Tensor = decoder.decode(drawing.images() / 0.7 + 0.25).sample
    return (images + 1).mul(127.5).clamp(0, 255)


def test_samples_are_decoded(folder: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = load_trained(checkpoint)
    assert (trained.image_shape, trained.picture_shape) == ((4, 8, 8), (3, 16, 16))
    expected = decoded_by_diffusers(trained, folder / "vae", 5)
    assert expected.std() > 5
    assert (sample(trained, 5) - expected).abs().max() < 0.51
    assert main(["sample", str(checkpoint), "--count", "5", "--out", str(folder / "drawn.npz"), "--device", "cpu"]) == 0
    with np.load(folder / "drawn.npz") as drawn:
        assert np.abs(drawn["arr_0"].transpose(0, 3, 1, 2) - expected.numpy()).max() < 0.51
    line = refusal(capsys, "sample", checkpoint, "--clip", "static", "--device", "cpu")
    assert "--clip = static keeps pixels in [-1, 1], and latents" in line
    with pytest.raises(SpecError, match=r"sampler\.clip = dynamic"):
        sample(trained, sampler=trained.sampler.model_copy(update={"clip": "dynamic"}))


def test_scores_compare_decoded_images_with_the_pixels_that_were_encoded(
    folder: Path, checkpoint: Path, sections: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    trained, pixels = load_trained(checkpoint), prepare(pixels_of(tiny_spec(**sections).data))
    assert pixels.meta.shape == (3, 16, 16) and open_reference(trained, None).meta == pixels.meta
    arguments = ["evaluate", str(checkpoint), "--count", "20", "--metrics", "pixel", "--device", "cpu"]
    assert main([*arguments, "--out", str(folder / "scores")]) == 0
    facts = report(folder / "scores")
    assert facts["scores"][0]["details"]["dims"] == 768 and facts["reference"]["sha256"] == pixels.meta.sha256
    other = prepare(pixels_of(tiny_spec(**sections).data).model_copy(update={"image_size": 8}))
    with pytest.raises(DataError, match="is not the data set of"):
        open_reference(trained, other.path)


def test_an_export_brings_its_autoencoder_and_draws_the_same(
    folder: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, trained = folder / "hub", load_trained(checkpoint)
    assert main(["export", str(checkpoint), str(hub), "--samples", "2", "--device", "cpu"]) == 0
    with Image.open(hub / "samples.png") as picture:
        assert picture.mode == "RGB"
    pipeline = diffusers.DiffusionPipeline.from_pretrained(hub)
    assert type(pipeline).__name__ == "LDMPipeline" and type(pipeline.vqvae).__name__ == "AutoencoderKL"
    exported = load_trained(hub)
    assert exported.autoencoder is not None and trained.autoencoder is not None
    assert (exported.autoencoder.shift, trained.autoencoder.shift) == (0.0, 0.25), "pipelines read no shift"
    drawn = [sample(each, 3, sampler=trained.sampler).int() for each in (exported, trained)]
    assert (drawn[0] - drawn[1]).abs().max() <= 1 and exported.sampler.clip == "none"
    card = (hub / "README.md").read_text()
    assert "images of 16x16 pixels and 3 channels" in card

    monkeypatch.chdir(hub)
    program = card.split("```python\n")[1].split("```")[0].replace("set_timesteps(1000)", "set_timesteps(2)")
    values: dict[str, Any] = {}
    exec(program, values)
    assert len(values["images"]) == 16 and values["images"][0].size == (16, 16)

    shutil.move(hub / "vqvae", folder / "elsewhere")
    with pytest.raises(CheckpointError, match=r"images of 4 channels, which are latents, .* add it as vae/config"):
        load_trained(hub)


def test_another_autoencoder_than_the_one_that_encoded_is_refused(folder: Path, checkpoint: Path) -> None:
    shutil.move(folder / "vae", folder / "kept")
    try:
        with pytest.raises(DataError, match=r"vae does not exist; name a folder"):
            load_trained(checkpoint)
        arguments = ["sample", str(checkpoint), "--count", "2", "--device", "cpu", "--out", str(folder / "moved.npz")]
        assert main([*arguments, "--autoencoder", str(folder / "kept")]) == 0
        save_autoencoder(folder / "vae", seed=1)
        with pytest.raises(DataError, match=r"vae did not make the latents that were learned"):
            load_trained(checkpoint)
    finally:
        shutil.rmtree(folder / "vae")
        shutil.move(folder / "kept", folder / "vae")
    with pytest.raises(SpecError, match=r"--autoencoder vae: .* has learned pixels; leave it out"):
        load_trained(plant(folder / "pixels"), autoencoder=Path("vae"))
    trained = load_trained(checkpoint)
    assert trained.autoencoder is not None
    guide = replace(trained, autoencoder=replace(trained.autoencoder, digest="0" * 64))
    guided = trained.sampler.model_copy(update={"guidance": 2.0})
    with pytest.raises(SpecError, match="has an autoencoder with checksum = 00000000, and"):
        check_guide(guide, trained, [guided])


def test_pictures_of_decoded_images_have_a_limit(sections: dict[str, Any], store: DatasetCache) -> None:
    spec = tiny_spec(**sections)
    check_store(store, spec)
    many = spec.model_copy(update={"samples": SamplesSpec.model_construct(count=2**19)})
    with pytest.raises(SpecError, match=r"samples.count = 524288 makes a picture of 134,217,728 pixels"):
        check_store(store, many)


@pytest.mark.launch
@pytest.mark.long
def test_a_run_of_two_ranks_learns_latents_and_pictures_samples_and_resumption_follow(
    folder: Path, sections: dict[str, Any], store: DatasetCache, tmp_path: Path
) -> None:
    values = tiny_spec(**sections).model_dump(mode="json")
    values["data"] |= {"held_out_images": 40}
    values["samples"] |= {"every_images": 64, "count": 4}
    values["evaluation"] |= {"every_images": 64}
    spec, run_dir = write_json(tmp_path / "spec.yaml", values), tmp_path / "runs" / "latents"
    config = ["--deepspeed_config", "ds_configs/zero0_fp32.json", "--spec", str(spec), "--run-dir", str(run_dir)]

    def train(*changes: str) -> str:
        words = [*config, "--device", "cpu", "-p", "2", *changes]
        done = run_ranks(2, REPOSITORY / "launch" / "train.py", *words, MLFLOW_TRACKING_URI="")
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    printed = train()
    assert f"digits, 8x8x4, latents of {folder / 'vae'}" in printed and "held-out loss" in printed
    with Image.open(run_dir / "samples" / "images-000000064.png") as picture:
        assert picture.mode == "RGB"
    recorded = recorded_losses(run_dir)
    assert "validation/loss_channel_3" in recorded
    assert measured_losses(run_dir) == pytest.approx(recorded, rel=1e-5)
    trained = load_trained(run_dir)
    assert trained.images_seen == 64
    assert (sample(trained, 4) - decoded_by_diffusers(trained, folder / "vae", 4)).abs().max() < 0.51
    assert "resuming from" in train("--set", "train.images=96") and load_trained(run_dir).images_seen == 96
