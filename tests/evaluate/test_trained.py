"""Trained weights from checkpoints of any layout and from folders of diffusers, and what is refused."""

import json
import math
import re
import shutil
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ddpm_ds.diffusion.spec import SamplerSpec
from ddpm_ds.evaluate.diffusers.export import write_pipeline
from ddpm_ds.evaluate.trained import find_trained, load_trained
from ddpm_ds.ground.errors import CheckpointError
from tests.evaluate.planted import plant, same_weights, trained_of, unet_of
from tests.launching import tiny_spec, write_json

WEIGHTS = "unet/diffusion_pytorch_model.safetensors"


@pytest.mark.parametrize("cuts", [(), (0.1, 0.3, 0.35)], ids=["1 rank", "4 ranks"])
def test_weights_of_any_layout_are_whole(tmp_path: Path, cuts: Sequence[int]) -> None:
    sampler = {"kind": "ddim", "eta": 0.5}
    spec = tiny_spec(sampler=sampler)
    unets = {"ema": unet_of(spec, 5), "master": unet_of(spec, 6), "exp_avg": unet_of(spec, 7)}
    checkpoint = plant(tmp_path / "run", 640, unets=unets, cuts=cuts, sampler=sampler)
    trained = load_trained(checkpoint)
    assert same_weights(trained.unet, unets["ema"])
    assert same_weights(load_trained(checkpoint, weights="raw").unet, unets["master"])
    assert (trained.unet_spec, trained.diffusion, trained.sampler) == (spec.unet, spec.diffusion, spec.sampler)
    assert (trained.spec, trained.images_seen, trained.image_shape) == (spec, 640, (1, 8, 8))
    assert (trained.run_dir, trained.weights) == ((tmp_path / "run").resolve(), "ema")
    assert not trained.unet.training and not any(parameter.requires_grad for parameter in trained.unet.parameters())


def test_a_run_is_its_newest_good_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = plant(tmp_path / "run", 320), plant(tmp_path / "run", 640)
    assert find_trained(tmp_path / "run") == second and load_trained(tmp_path / "run").images_seen == 640
    content = bytearray((second / "rank0.safetensors").read_bytes())
    content[-1] ^= 1
    (second / "rank0.safetensors").write_bytes(content)
    assert find_trained(tmp_path / "run") == first
    assert "images-000000640 is unusable" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="another checksum"):
        load_trained(second)


def test_digest_is_another_one_for_other_weights_only(tmp_path: Path) -> None:
    checkpoint = plant(tmp_path / "run")
    moved = load_trained(shutil.copytree(checkpoint, tmp_path / "moved"))
    folders = [checkpoint, plant(tmp_path / "run", 640), *(folder_of(tmp_path / str(seed), seed) for seed in (1, 2))]
    digests = [load_trained(checkpoint, weights="raw").digest, *(load_trained(folder).digest for folder in folders)]
    assert len(set(digests)) == 5 and all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)
    assert moved.digest == digests[1] and moved.run_dir is None


def folder_of(path: Path, seed: int = 1, **sections: dict[str, Any]) -> Path:
    """A folder of diffusers with random weights."""
    path.mkdir()
    write_pipeline(trained_of(tiny_spec(**sections), seed), path, "fp32")
    return path


@pytest.mark.parametrize(("bare", "old_names", "suffix"), [(True, True, "safetensors"), (False, False, "bin")])
def test_a_folder_of_diffusers_is_read_in_all_its_forms(
    tmp_path: Path, bare: bool, old_names: bool, suffix: str
) -> None:
    folder = folder_of(tmp_path / "folder", seed=4, unet={"head_channels": 4})
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    if old_names:
        old = {".to_q.": ".query.", ".to_k.": ".key.", ".to_v.": ".value.", ".to_out.0.": ".proj_attn."}
        pattern = re.compile("|".join(map(re.escape, old)))
        tensors = {pattern.sub(lambda found: old[found[0]], name): tensor for name, tensor in tensors.items()}
        assert any(".query." in name for name in tensors)
    if suffix == "bin":
        torch.save(tensors, folder / "unet" / "diffusion_pytorch_model.bin")
    else:
        save_file(tensors, folder / WEIGHTS)
    if bare:
        for file in (*folder.glob("unet/*"), *folder.glob("scheduler/*")):
            file.rename(folder / file.name)
    trained = load_trained(folder)
    assert same_weights(trained.unet, unet_of(tiny_spec(unet={"head_channels": 4}), 4))
    assert (trained.weights, trained.spec, trained.images_seen, trained.run_dir) == ("export", None, None, None)
    assert trained.sampler == SamplerSpec() and trained.image_shape == (1, 8, 8)


def change_config(part: str, **values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (file,) = (folder / part).glob("*config.json")
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


def change_bias(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        save_file({**tensors, "conv_in.bias": change(tensors["conv_in.bias"])}, folder / WEIGHTS)

    return apply


def put_bin(content: Any) -> Callable[[Path], None]:
    """A change that puts ``content`` in the place of the weights; bytes compressed, as torch.save never does."""

    def apply(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        path = folder / "unet" / "diffusion_pytorch_model.bin"
        if isinstance(content, bytes):
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr("archive/data/0", content)
        else:
            torch.save(content, path)

    return apply


class Unsafe:
    """Code in somebody else's pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("executed",))


FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "other model": (change_config("unet", _class_name="UNet3DConditionModel"), "UNet3DConditionModel.*UNet2DModel or "),
    "other schedule": (change_config("scheduler", beta_schedule="laplace"), r"n is not a diffusion process .*lapl"),
    "other width": (change_config("unet", time_embedding_dim=16), r"does not fit its config\.json: .*float32 of shape"),
    "far too wide": (change_config("unet", block_out_channels=[2**40, 2**40]), "block_out_channels = .*65536"),
    "too many digits": (lambda folder: write_json(folder / "unet/config.json", {"norm_eps": 10**400}), "a JSON object"),
    "integers": (change_bias(torch.Tensor.int), "bias is int32"),
    "not finite": (change_bias(lambda bias: bias * math.nan), "not finite"),
    "no weights": (
        lambda folder: (folder / WEIGHTS).unlink(),
        "holds no weights; it .* hold .*safetens.* or .*bin",
    ),
    "no schedule": (lambda folder: (folder / "scheduler/scheduler_config.json").unlink(), "schedule is not known"),
    "damaged weights": (lambda folder: (folder / WEIGHTS).write_bytes(b"damaged"), "is damaged"),
    "pickle": (put_bin([Unsafe()]), "holds more than tensors"),
    "list": (put_bin([torch.zeros(3)]), "something other than plain tensors by name"),
    "keys that are no names": (put_bin({1: torch.zeros(3)}), "something other than plain tensors by name"),
    "sparse": (put_bin({"conv_in.bias": torch.zeros(8).to_sparse()}), "other than plain tensors"),
    "without values": (put_bin({"conv_in.bias": torch.zeros(8, device="meta")}), "other than plain tensors"),
    "repeated without end": (put_bin({"conv_in.bias": torch.zeros(1).expand(10**12)}), "other than plain"),
    "compressed": (put_bin(bytes(10**6)), "is damaged"),
    "damaged configuration": (lambda folder: (folder / "unet/config.json").write_text("{"), "should be a JSON object"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_diffusers_that_does_not_fit_is_refused_in_one_line(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path / "folder")
    change, message = FOLDERS[name]
    change(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_trained(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
    assert "executed" not in capsys.readouterr().out


def test_a_checkpoint_without_the_weights_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = plant(tmp_path / "run", unets={"master": unet_of(tiny_spec(), 1)})
    with pytest.raises(CheckpointError, match=r"has no ema weights; it has raw$"):
        load_trained(checkpoint)
    assert load_trained(checkpoint, weights="raw").weights == "raw"


def test_weights_that_are_not_finite_in_the_dtype_are_refused_by_name(tmp_path: Path) -> None:
    broken, large = (unet_of(tiny_spec(), 1) for _ in range(2))
    broken.get_parameter("layers.1.conv.bias")[0] = math.nan
    large.get_parameter("layers.1.conv.bias")[0] = 1e5
    with pytest.raises(CheckpointError, match=r"1\.conv\.bias of .* has values that are not finite"):
        load_trained(plant(tmp_path / "broken", unets={"ema": broken}))
    checkpoint = plant(tmp_path / "large", unets={"ema": large})
    load_trained(checkpoint)
    with pytest.raises(CheckpointError, match=r"1\.conv\.bias of .* has values beyond float16; use fp32"):
        load_trained(checkpoint, dtype=torch.float16)


def test_a_checkpoint_whose_spec_is_another_one_is_refused(tmp_path: Path) -> None:
    values = tiny_spec().model_dump(mode="json")
    newer = {**values, "unet": {**values["unet"], "window": 3}}
    with pytest.raises(CheckpointError, match=r"spec that this version can't read \(unet\.window: "):
        load_trained(plant(tmp_path / "newer", spec_as=newer))
    wider = {**values, "unet": {**values["unet"], "channels": 16}}
    with pytest.raises(CheckpointError, match="is of another U-Net than its spec"):
        load_trained(plant(tmp_path / "wider", spec_as=wider))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "does not exist; name a checkpoint"),
        ("file", "is no folder; name a checkpoint"),
        ("empty", r"holds no weights; name a checkpoint \(manifest\.json\), a run's folder"),
        ("young", "has no checkpoint yet"),
        ("export", "leave out --weights raw"),
    ],
)
def test_what_holds_no_weights_is_refused_and_says_what_would(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "young" / "checkpoints").mkdir(parents=True)
    folder_of(tmp_path / "export")
    with pytest.raises(CheckpointError, match=message):
        load_trained(tmp_path / name, weights="raw")
