"""Latents are what diffusers' autoencoder makes of the prepared pixels, and drawn ones become its pixels again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2
from safetensors.torch import load_file, save_file

from ddpm_ds.cli import main as command
from ddpm_ds.data import latents
from ddpm_ds.data.latents import Autoencoder, Coder, autoencoder_of, pixels_learned, pixels_of, to_pixels
from ddpm_ds.data.prepare import How, Recipes, prepare
from ddpm_ds.data.spec import DataSpec
from ddpm_ds.ground.errors import DataError
from tests.autoencoders import save_autoencoder
from tests.launching import REPOSITORY, tiny_spec
from tests.model_hub import ModelHub

CPU = torch.device("cpu")
SpecOf = Callable[..., DataSpec]
Saved = tuple[Path, Any]
DIGITS = REPOSITORY / "launch" / "specs" / "digits.yaml"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A saved autoencoder: its folder, and itself."""
    path = tmp_path_factory.mktemp("autoencoder") / "tiny"
    return path, save_autoencoder(path)


@pytest.fixture
def spec_of(model: Saved, folder: Path, tmp_path: Path) -> SpecOf:
    """Specs of the latents of twelve pictures of 8x8 pixels."""

    def make(**changes: Any) -> DataSpec:
        given = {"source": "folder", "path": folder, "image_size": 4, "channels": 4, "autoencoder": model[0]}
        return DataSpec.model_validate(given | {"store_root": tmp_path / "stores"} | changes)

    return make


def test_the_store_holds_what_diffusers_encodes_shifted_and_scaled(
    spec_of: SpecOf, model: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latents, "MOVED_PIXELS", 330)  # five images of 64 pixels
    monkeypatch.setattr("ddpm_ds.data.writing.SHARD_BYTES", 7 * 128)
    monkeypatch.setattr(latents, "PIXELS_AT_ONCE", 150)  # two images of 64 pixels
    store, pixels = prepare(spec_of(), How(encode_on=CPU)), prepare(pixels_of(spec_of()))
    assert pixels.path.name.startswith("folder-8px-3ch-") and store.path.name.startswith(pixels.path.name + "-latents-")
    images = torch.from_numpy(np.array(pixels.images[:12])).float() / 127.5 - 1
    expected = (model[1].encode(images).latent_dist.mean - 0.25) * 0.7
    other = prepare(spec_of(latent_scale=2.0, latent_shift=[0, 0, 0, 1]), How(encode_on=CPU))
    moved = torch.tensor([0.0, 0.0, 0.0, 1.0])[:, None, None]
    wanted = (model[1].encode(images).latent_dist.mean - moved) * 2.0
    np.testing.assert_allclose(other.images[:12], wanted.numpy(), rtol=1e-3, atol=2e-3)
    assert other.path != store.path and other.path.name.startswith(f"{pixels.path.name}-latents-")
    found = store.images[:12]
    assert found.dtype == np.float16 and found.shape == (12, 4, 4, 4) and expected.std() > 0.1
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-3, atol=1e-3)
    assert np.array_equal(store.labels, pixels.labels) and store.meta.classes == ("cats", "dogs")
    assert store.meta.shards == (7, 5)
    assert pixels_learned(store.meta.sha256) == pixels_learned(pixels.meta.sha256) == pixels.meta.sha256
    assert prepare(spec_of()).meta == store.meta, "it is opened without encoding, and its checksums are right"


def test_drawn_latents_become_what_diffusers_decodes_some_at_a_time(
    spec_of: SpecOf, model: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latents, "PIXELS_AT_ONCE", 150)
    drawn = torch.randn(5, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    before, together = drawn.clone(), []
    decode = AutoencoderKL.decode

    def counted(self: AutoencoderKL, part: torch.Tensor) -> Any:
        together.append(len(part))
        return decode(self, part)

    monkeypatch.setattr(AutoencoderKL, "decode", counted)
    autoencoder = autoencoder_of(spec_of())
    assert autoencoder is not None
    found = to_pixels(Coder(autoencoder, CPU))(drawn)
    assert together == [2, 2, 1] and torch.equal(drawn, before)
    expected = (decode(model[1], drawn / 0.7 + 0.25).sample + 1) * 127.5
    assert found.shape == (5, 3, 8, 8) and found.dtype == torch.uint8 and expected.std() > 5
    assert (found - expected.clamp(0, 255)).abs().max() <= 0.51


def test_a_step_that_is_not_finite_in_half_precision_is_repeated_in_single(
    model: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    autoencoder, tried, decode = Autoencoder.open(model[0]), list[torch.dtype](), AutoencoderKL.decode
    coder, drawn = Coder(autoencoder, CPU), torch.randn(2, 4, 4, 4)
    coder._dtype = torch.float16

    def overflowing(self: Any, part: torch.Tensor) -> Any:
        tried.append(part.dtype)
        found = decode(self, part.float() if self.dtype is torch.float32 else part)
        return type(found)(found.sample * (float("inf") if part.dtype is torch.float16 else 1.0))

    monkeypatch.setattr(AutoencoderKL, "decode", overflowing)
    found = coder.decode(drawn)
    assert tried == [torch.float16, torch.float32]
    assert torch.equal(found, Coder(autoencoder, CPU).decode(drawn)), "with weights that were not rounded"


@pytest.mark.parametrize("upcast", [True, False, None])
def test_an_autoencoder_that_says_so_is_in_fp32_on_cuda_at_once(upcast: bool | None, tmp_path: Path) -> None:
    save_autoencoder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("force_upcast")
    (tmp_path / "config.json").write_text(json.dumps(config if upcast is None else {**config, "force_upcast": upcast}))
    coder = Coder(Autoencoder.open(tmp_path), torch.device("cuda"))
    assert coder._dtype is (torch.float32 if upcast else torch.float16)


def test_without_memory_on_the_device_the_cpu_decodes(model: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    autoencoder, decode, drawn = Autoencoder.open(model[0]), AutoencoderKL.decode, torch.randn(2, 4, 4, 4)

    def full(self: AutoencoderKL, part: torch.Tensor) -> Any:
        if part.is_meta:  # which stands for a device
            raise torch.OutOfMemoryError("CUDA out of memory")
        return decode(self, part)

    monkeypatch.setattr(AutoencoderKL, "decode", full)
    found = Coder(autoencoder, torch.device("meta")).decode(drawn)
    assert torch.equal(found, Coder(autoencoder, CPU).decode(drawn))


def test_a_store_is_named_after_pixels_and_autoencoder(spec_of: SpecOf, tmp_path: Path, model: Saved) -> None:
    shutil.copytree(model[0], tmp_path / "moved")
    config = tmp_path / "moved" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"_diffusers_version": "0.1"}))
    save_autoencoder(tmp_path / "other", seed=1)
    save_autoencoder(tmp_path / "scaled", scaling_factor=0.5)
    folders = [model[0], *(tmp_path / name for name in ("moved", "other", "scaled"))]
    paths = [Recipes(spec_of(autoencoder=folder)).of().path for folder in folders]
    assert paths[0] == paths[1] and len({*paths}) == 3
    assert Recipes(spec_of(image_size=8)).of().path.name.startswith("folder-16px-3ch-")


def test_latents_are_made_only_when_asked_for(spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"data.autoencoder = .*tiny: there are no latents at .* with: .* --encode"):
        prepare(spec_of())
    assert not spec_of().store_root.exists()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"needs diffusers: pip install 'ddpm_ds\[latents\]'"):
        prepare(spec_of(), How(encode_on=CPU))


def test_latents_of_pixels_that_have_changed_are_refused(spec_of: SpecOf, folder: Path) -> None:
    store = prepare(spec_of(), How(encode_on=CPU))
    assert prepare(spec_of(), How(encode_on=CPU)).meta == store.meta
    shutil.rmtree(Recipes(pixels_of(spec_of())).of().path)
    assert prepare(spec_of(), How(encode_on=CPU)).meta == store.meta, "the pixels may be deleted"
    (folder / "cats" / "0.png").unlink()
    with pytest.raises(DataError, match=r"data.path = .* has other images than .*-latents-.* was prepared from"):
        prepare(spec_of())
    prepare(pixels_of(spec_of()))
    with pytest.raises(DataError, match="has latents of other pixels than there are now; delete it and try again"):
        prepare(spec_of(), How(encode_on=CPU, verify=False))


def test_values_beyond_float16_are_one_line_and_leave_nothing(spec_of: SpecOf, tmp_path: Path) -> None:
    save_autoencoder(tmp_path / "huge", scaling_factor=1e7)
    spec = spec_of(autoencoder=tmp_path / "huge")
    with pytest.raises(
        DataError, match=r"huge makes values up to .* from image 0 of .*, and float16 ends at 65,504; use"
    ):
        prepare(spec, How(encode_on=CPU))
    assert [path.name for path in spec.store_root.glob("[!.]*")] == [Recipes(pixels_of(spec)).of().path.name]
    assert not list(spec.store_root.glob(".*preparing*"))


def broken(folder: Path, how: str | dict[str, Any]) -> None:
    """Break a saved autoencoder, by some values of its configuration or in another way."""
    config, weights = folder / "config.json", folder / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    bias = tensors["decoder.conv_out.bias"]  # which encoding does not use
    if isinstance(how, dict):
        config.write_text(json.dumps(json.loads(config.read_text()) | how))
    elif how == "no weights":
        weights.unlink()
    elif how == "no JSON":
        config.write_text("{")
    elif how == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "missing":
        shutil.rmtree(folder)
    else:
        other = bias.to(torch.float8_e4m3fn) if how == "float8" else bias * torch.nan
        save_file(tensors | {"decoder.conv_out.bias": other}, weights)


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("missing", "does not exist; name a folder that AutoencoderKL.save_pretrained"),
        ("no weights", r"can't be used: .*safetensors can't be read \(No such file"),
        (
            {"_class_name": "VQModel"},
            r"config.json is of another kind \(_class_name = .VQModel.: Input should be 'AutoencoderKL' or ",
        ),
        ({"in_channels": 1}, r"can't be used: config.json is of another kind \(in_channels = 1: Input should be 3\)"),
        ({"_class_name": ["AutoencoderKL"]}, r"of another kind \(_class_name = \["),
        ({"latents_mean": [0.1] * 4}, r"of another kind \(latents_mean = \[0.1, "),
        ({"patch_size": [2, 2]}, r"of another kind \(patch_size = \[2, 2\]: Extra inputs"),
        ("float8", r"can't be read \(decoder.conv_out.bias is float8_e4m3fn; convert it to fp16 or fp32\)"),
        ("no JSON", "can't be used: config.json is damaged"),
        ({"block_out_channels": [8, 8]}, "safetensors is damaged or of another model"),
        ({"block_out_channels": [65536, 65536]}, r"of another model \([0-9,]* bytes for [0-9]*,[0-9,]* parameters\)"),
        ({"use_quant_conv": False}, r"safetensors is of another model \(quant_conv"),
        ("cut", r"safetensors can't be read \(it is no safetensors file\)"),
        ("NaN", r"safetensors can't be read \(decoder.conv_out.bias has a value that is not finite\)"),
    ],
)
def test_a_bad_autoencoder_is_one_line(
    how: str | dict[str, Any], line: str, spec_of: SpecOf, tmp_path: Path, model: Saved
) -> None:
    shutil.copytree(model[0], tmp_path / "bad")
    broken(tmp_path / "bad", how)
    spec = spec_of(autoencoder=tmp_path / "bad")
    with pytest.raises(DataError, match=rf"^data.autoencoder = .*bad .*{line}") as caught:
        prepare(spec, How(encode_on=CPU))
    assert "\n" not in str(caught.value)
    assert not list(spec.store_root.glob("[!.]*latents*")) and not list(spec.store_root.glob(".*preparing*"))


def test_numbers_that_do_not_fit_are_one_line_with_fitting_ones(spec_of: SpecOf) -> None:
    with pytest.raises(DataError, match=r"data.channels = 3, .* have 4; --set data.channels=4"):
        autoencoder_of(spec_of(channels=3))
    with pytest.raises(DataError, match=r"data.image_size = 8000 .* of 2x2 pixels, .* use 4096 or less"):
        autoencoder_of(spec_of(image_size=8000))
    with pytest.raises(DataError, match="did not make the latents that were learned"):
        autoencoder_of(spec_of(), {"images.npy": "0", "autoencoder": "1"})


PER_CHANNEL = {"latent_scale": (0.5, 2.0, 0.7, 1.0), "latent_shift": (0.1, 0.0, -0.3, 0.25)}


@pytest.mark.parametrize("flux_2", [False, True])
@pytest.mark.parametrize("numbers", [{}, {"latent_scale": 0.3}, PER_CHANNEL], ids=["own", "scale", "channels"])
def test_latents_of_other_scales_and_of_flux_2_go_round_and_so_does_their_copy(
    numbers: dict[str, Any], flux_2: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "vae"
    if flux_2:
        torch.manual_seed(0)
        sides = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
        model: Any = AutoencoderKLFlux2(**sides, block_out_channels=(4, 8), norm_num_groups=2, latent_channels=4)
        model.eval().requires_grad_(False).save_pretrained(folder)
    else:
        model = save_autoencoder(folder)
    data = DataSpec.model_validate(
        {"source": "folder", "path": "x", "image_size": 4, "channels": 4, "autoencoder": folder, **numbers}
    )
    found, own = autoencoder_of(data), Autoencoder.open(folder)
    assert found is not None and (found.digest == own.digest) == (not numbers)
    usual = (0.6043, 0.076) if flux_2 else (0.7, 0.25)
    scale, shift = (numbers.get(key, value) for key, value in zip(("latent_scale", "latent_shift"), usual, strict=True))
    assert (found.scale, found.shift) == (scale, shift)
    pixels = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    means = model.encode(pixels / 127.5 - 1).latent_dist.mean
    each = [torch.tensor(one).expand(4)[:, None, None] for one in (scale, shift)]
    drawn, coder = (means - each[1]) * each[0], Coder(found, CPU)
    torch.testing.assert_close(coder.encode(pixels), drawn, rtol=1e-5, atol=1e-5)
    expected = (model.decode(means).sample + 1) * 127.5
    assert (coder.decode(drawn) - expected.clamp(0, 255)).abs().max() <= 0.51

    found.copy_to(tmp_path / "copy")
    copy = Autoencoder.open(tmp_path / "copy")
    assert (copy.kind, copy.shift, copy.scale) == ("AutoencoderKL", 0.0, found.exported_scale)
    again = Coder(copy, CPU)
    torch.testing.assert_close(again.encode(pixels), drawn, rtol=1e-5, atol=1e-5)
    assert (again.decode(drawn).int() - coder.decode(drawn).int()).abs().max() <= 1
    spread = [Coder(one, CPU).model.encode(pixels / 127.5 - 1).latent_dist.std for one in (found, copy)]
    torch.testing.assert_close(spread[1] * found.exported_scale, spread[0] * each[0])


def test_scales_that_do_not_fit_are_refused_in_one_line() -> None:
    latents = {"source": "folder", "path": "x", "channels": 4, "autoencoder": "vae"}
    for data, message in (
        ({**latents, "latent_scale": [1, 2]}, r"data.latent_scale has 2 numbers, and data.channels = 4; give one, or"),
        ({"latent_shift": 1}, r"data.latent_shift = 1 is used only with data.autoencoder; remove it"),
        ({**latents, "latent_scale": 0}, r"latent_scale"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny_spec(data=data, sampler={"clip": "none"})


@pytest.mark.parametrize("convolved", [True, False])
def test_an_exported_copy_has_its_shift_in_its_weights(convolved: bool, tmp_path: Path) -> None:
    """Also of weights in fp16 alone, and without convolutions around the latents, as FLUX's."""
    torch.manual_seed(0)
    save_autoencoder(tmp_path / "vae", use_quant_conv=convolved, use_post_quant_conv=convolved).half().save_pretrained(
        tmp_path / "half", variant="fp16"
    )
    assert not (tmp_path / "half" / "diffusion_pytorch_model.safetensors").exists()
    first = Autoencoder.open(tmp_path / "half")
    first.copy_to(tmp_path / "copy")
    second = Autoencoder.open(tmp_path / "copy")
    assert (first.shift, second.shift, second.scale) == (0.25, 0.0, first.scale)
    pixels, latents = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8), torch.randn(2, 4, 4, 4)
    one, two = (Coder(each, torch.device("cpu")) for each in (first, second))
    assert (one.encode(pixels) - two.encode(pixels)).abs().max() < 1e-5
    assert (one.decode(latents).int() - two.decode(latents).int()).abs().max() <= 1
    theirs = two.model.decode(latents / two.model.config.scaling_factor).sample  # as pipelines do
    assert (theirs.add(1).mul(127.5).clamp(0, 255) - one.decode(latents)).abs().max() <= 1


def test_a_name_of_the_hub_is_downloaded(model: Saved, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    hub = ModelHub(tmp_path / "cache")
    hub.repositories |= {"owner/pipeline": tmp_path / "pipeline", "owner/model": model[0]}
    for part in ("vae", "unet"):
        shutil.copytree(model[0], tmp_path / "pipeline" / part)
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot_download)
    found = Autoencoder.open(Path("owner/pipeline/vae"))
    assert (found.name, found.folder) == ("owner/pipeline/vae", hub.cache / "owner" / "pipeline" / "vae")
    files = {"config.json", "diffusion_pytorch_model.safetensors"}
    assert hub.downloaded("owner/pipeline") == {f"vae/{file}" for file in files}
    assert Autoencoder.open(Path("owner/model")).digest == found.digest and hub.downloaded("owner/model") == files
    with pytest.raises(DataError, match=r"data.autoencoder = owner/pipeline/vea can't be used: it has no vea/config"):
        Autoencoder.open(Path("owner/pipeline/vea"))


def test_the_verb_encodes_and_refuses_without_an_autoencoder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Saved
) -> None:
    arguments = ["prepare", "--encode", "--spec", str(DIGITS), "--set", f"data.store_root={tmp_path}"]
    assert command.main(arguments) == 2
    assert "--encode needs data.autoencoder or data.text" in capsys.readouterr().err
    latent = ["data.channels=4", f"data.autoencoder={model[0]}", "sampler.clip=none", "data.image_size=4"]
    latent.append("unet.attention_resolutions=[]")
    assert command.main([*arguments, *(word for change in latent for word in ("--set", change))]) == 0
    out, notes = capsys.readouterr()
    assert "digits-8px-3ch-latents-" in out and "1,797 latents of 4x4x4" in out
    assert "1,797 images' latents of 128 bytes need 0.2 MiB" in notes
