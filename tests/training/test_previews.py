"""Pictures drawn while training for what images are conditioned on: through a pipeline they are those of sampling."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from make_text import write_encoders
from PIL import Image

from ddpm_ds.cli.main import main
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.data.cache import DatasetCache, Subset
from ddpm_ds.data.captions import PROMPTS, EncodedPrompts
from ddpm_ds.data.held_out import parts, split
from ddpm_ds.data.latents import Autoencoder, Coder, pixels_of
from ddpm_ds.data.prepare import How, Recipes, prepare, prepared
from ddpm_ds.ground.errors import SpecError
from ddpm_ds.training.start import check_store
from ddpm_ds.training.validation import Previews
from tests.autoencoders import save_autoencoder
from tests.evaluate.conditioned import COUNT, HELD_OUT, arrays, field_spec, sections_of
from tests.forking import READS_TEXT
from tests.launching import REPOSITORY, place_empty_store, run_ranks, tiny_spec
from tests.training.ranks import end_of, measured_losses, recorded_losses, the_same
from tests.training.validation_worker import WATCHDOG, engine_of

MEMBERS = 4
CAPTIONS = ("a red circle", "a blue square", "a circle")
CHANGES: dict[str, Any] = {
    "train": {"images": 64, "batch_images": 16},
    "optimizer": {"learning_rate": 0.03},  # so that 64 images show
    "samples": {"every_images": 64, "count": 20},
    "sampler": {"steps": 3, "guidance": 2.0, "kind": "ddim", "eta": 1.0},
}


def train(folder: Path, spec: RunSpec, processes: int, stages: int | None = None) -> Path:
    """Train a run, by default on as many stages as processes, and return its folder."""
    place_empty_store(folder)
    file = folder / "spec.yaml"
    file.write_text(yaml.safe_dump({"name": "tiny", **json.loads(json.dumps(sections_of(spec)))}))
    config = str(REPOSITORY / "ds_configs" / "zero1_fp32.json")
    words = ["--deepspeed_config", config, "--spec", str(file), "-p", str(stages or processes)]
    done = run_ranks(
        processes,
        REPOSITORY / "launch" / "train.py",
        *words,
        *("--run-dir", str(folder / "run")),
        MLFLOW_TRACKING_URI="",
        XDG_CACHE_HOME=str(folder / "cache"),
        **({READS_TEXT: "1"} if spec.data.text else {}),
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return folder / "run"


@pytest.mark.launch
@pytest.mark.parametrize(("processes", "apart"), [(2, True), pytest.param(1, False, marks=pytest.mark.long)])
def test_a_picture_of_training_is_that_of_the_checkpoint_on_its_own(
    processes: int, apart: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint says all that sampling needs, a guided condition goes through two stages, and held-out images may
    be a file of their own.
    """
    others = {name: values + (name != "land") for name, values in arrays().items()}
    np.savez(tmp_path / "val.npz", **others)
    data = {"held_out_path": str(tmp_path / "val.npz"), "held_out": "last"} if apart else {}
    run_dir = train(tmp_path, field_spec(tmp_path, data=data, **CHANGES), processes)
    (tmp_path / "fields.npz").rename(tmp_path / "moved.npz")
    recorded = recorded_losses(run_dir)
    assert "validation/loss_channel_t2m" in recorded and len(recorded) == 12
    assert measured_losses(run_dir) == pytest.approx(recorded, rel=1e-5)
    grid = tmp_path / "alone" / "grid.png"
    words = ["--conditions", "held-out", "--members", str(MEMBERS), "--out", str(grid.parent), "--device", "cpu"]
    assert main(["sample", str(run_dir), *words]) == 0, capsys.readouterr().err
    drawn, alone = (np.asarray(Image.open(path)) for path in (run_dir / "samples" / "images-000000064.png", grid))
    assert drawn.shape == alone.shape
    assert np.abs(drawn.astype(int) - alone).mean() < 0.5  # colours round, and so do the numbers of the range
    assert (np.abs(drawn.astype(int) - alone) > 3).mean() < 0.01


@pytest.mark.parametrize(
    ("count", "available", "drawn", "members"), [(20, 5, 20, 4), (9, 5, 9, 3), (7, 5, 5, 1), (64, 5, 20, 4)]
)
def test_as_many_images_as_asked_for_are_shared_by_the_inputs(
    count: int, available: int, drawn: int, members: int, tmp_path: Path
) -> None:
    spec = field_spec(tmp_path, samples={"count": count})
    store: DatasetCache = prepare(spec.data)
    previews = Previews(spec, engine_of(7), WATCHDOG, Subset(store, split(COUNT, HELD_OUT)[1][:available]))
    assert (previews.count, previews.members) == (drawn, members)
    regression = field_spec(tmp_path, samples={"count": count}, diffusion={"objective": "regression"})
    previews = Previews(regression, engine_of(7), WATCHDOG, Subset(store, split(COUNT, HELD_OUT)[1]))
    assert previews.members == 1


def test_pictures_show_the_given_condition_and_the_truth_beside(tmp_path: Path) -> None:
    spec = field_spec(tmp_path, samples={"count": 12})
    store, positions = prepare(spec.data), split(COUNT, HELD_OUT)[1]
    previews = Previews(spec, engine_of(7), WATCHDOG, Subset(store, positions))
    beside = previews._beside(torch.zeros(12, 2, 8, 12))
    found = arrays()
    assert beside.truths is not None and beside.given is not None
    assert np.array_equal(beside.truths[:, 0].numpy(), found["t2m"][positions[:3]])
    assert beside.channels == ("t2m", "u") and beside.given_channels == ("coarse",)
    enlarged = torch.nn.functional.interpolate(
        torch.from_numpy(found["coarse"][positions[:3], None]), (8, 12), mode="bilinear", align_corners=False
    )
    torch.testing.assert_close(beside.given, enlarged, rtol=1e-5, atol=1e-2)


def text_spec(folder: Path, samples: dict[str, Any], **text: Any) -> RunSpec:
    """A run on twelve small pictures with captions, of which the last are held out."""
    (folder / "pictures").mkdir()
    draws = np.random.default_rng(0)
    for number in range(12):
        picture = Image.fromarray(draws.integers(0, 256, (8, 8, 3), np.uint8))
        picture.save(folder / "pictures" / f"{number:02}.png")
        (folder / "pictures" / f"{number:02}.txt").write_text(CAPTIONS[number % 3])
    write_encoders(folder / "encoders", ["a", "red", "blue", "circle", "square"], width=12, second=8, pooled=10)
    unet = {"context_channels": 20, "blocks": [1], "heads": [2], "pooled_channels": 10, "size_channels": 8}
    data = {"source": "folder", "path": str(folder / "pictures"), "channels": 3, "store_root": str(folder / "stores")}
    captions = {"encoders": str(folder / "encoders"), "drop_to": "zeros", **text}
    return tiny_spec(
        data={**data, "horizontal_flips": False, "held_out_images": 4, "text": captions},
        unet={"classes": None, "multipliers": [1], "attention_resolutions": [], "text": unet},
        optimizer={"learning_rate": 0.03},
        train={"images": 32, "batch_images": 16, "label_drop": 0.0},
        samples={"every_images": 32, **samples},
        evaluation={"every_images": 32},
        sampler={"steps": 3, "guidance": 2.0, "kind": "ddim", "eta": 1.0},
    )


@pytest.mark.launch
@pytest.mark.parametrize("prompts", [["a red square", "a circle"], pytest.param([], marks=pytest.mark.long)])
def test_a_picture_of_a_run_with_text_is_that_of_its_prompts_or_captions(
    prompts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two stages read what rank 0 has encoded; the run keeps it, and sampling draws it again without its encoders."""
    spec = text_spec(tmp_path, {"count": 6, "prompts": prompts})
    prepare(spec.data, How(encode_on=torch.device("cpu")))
    run_dir = train(tmp_path, spec, 2)
    known = EncodedPrompts.read(run_dir / PROMPTS)
    expected = tuple(prompts or (CAPTIONS[position % 3] for position in split(12, 4)[1]))
    assert known is not None and known.texts == expected
    assert measured_losses(run_dir) == pytest.approx(recorded_losses(run_dir), rel=1e-5)
    (tmp_path / "encoders").rename(tmp_path / "moved")
    grid = tmp_path / "alone" / "grid.png"
    assert main(["sample", str(run_dir), "--count", "6", "--out", str(grid.parent), "--device", "cpu"]) == 0
    assert f"{len(expected)} in {PROMPTS}" in capsys.readouterr().out
    drawn, alone = (np.asarray(Image.open(path)) for path in (run_dir / "samples" / "images-000000032.png", grid))
    assert drawn.shape == alone.shape
    assert (np.abs(drawn.astype(int) - alone) > 1).mean() < 0.01
    (losses,) = [json.loads(line) for line in (run_dir / "evaluations.jsonl").read_text().splitlines()]
    assert np.isfinite(losses["eval/loss"])


@pytest.mark.launch
def test_a_run_that_encodes_its_captions_is_that_on_stored_ones(tmp_path: Path) -> None:
    """Bit for bit: losses, held-out losses and pictures, of captions that are dropped to the empty text too."""
    found = []
    for stored in ("float16", "ids", "text"):
        (folder := tmp_path / stored).mkdir()
        spec = text_spec(folder, {"count": 4}, stored=stored, drop_to="empty", drop=0.4)
        if stored == "float16":
            prepare(spec.data, How(encode_on=torch.device("cpu")))
        run_dir = train(folder, spec, 2)
        lines = [(run_dir / name).read_text() for name in ("metrics.jsonl", "evaluations.jsonl")]
        values = [json.loads(line) for text in lines for line in text.splitlines()]
        losses = [(key, point[key]) for point in values for key in ("train/loss", "eval/loss") if key in point]
        assert measured_losses(run_dir) == pytest.approx(recorded_losses(run_dir), rel=1e-5)
        found.append((losses, (run_dir / "samples" / "images-000000032.png").read_bytes()))
    assert found[0] == found[1] == found[2] and len(found[0][0]) >= 2


def latent_spec(folder: Path, **changes: Any) -> RunSpec:
    """A run on latents of pictures in two buckets and two folders, with masks, second pictures, flips and captions."""
    if not (folder / "encoders").exists():
        draws = np.random.default_rng(0)
        for number in range(24):
            shape = (8, 32) if number % 2 else (16, 16)
            for kind, channels in (("few", (3,)), ("masks", ()), ("second", (3,))):
                there = folder / kind / ("a" if number < 8 else "b")
                there.mkdir(parents=True, exist_ok=True)
                Image.fromarray(draws.integers(0, 256, (*shape, *channels), np.uint8)).save(there / f"{number:02}.png")
            (folder / "few" / ("a" if number < 8 else "b") / f"{number:02}.txt").write_text(CAPTIONS[number % 3])
        write_encoders(folder / "encoders", ["a", "red", "blue", "circle", "square"], width=12, second=8, pooled=10)
        save_autoencoder(folder / "autoencoder")
    sources = [
        {"path": str(folder / "few" / name), "mask": str(folder / "masks" / name), "repeats": repeats}
        | {"condition": str(folder / "second" / name)}
        for name, repeats in (("a", 3), ("b", 1))
    ]
    data: dict[str, Any] = {"source": "folder", "path": None, "sources": sources, "channels": 4, "image_size": 8}
    data |= {"autoencoder": str(folder / "autoencoder"), "store_root": str(folder / "stores"), "held_out_images": 6}
    data |= {"condition": {"kind": "stored", "drop": 0.2, "scaled": False}, "horizontal_flips": True}
    data |= {"buckets": {"step": 8, "widest": 4.0, "images": 8}, "crop_from": None}
    captions = {"encoders": str(folder / "encoders"), "drop_to": "zeros", "drop": 0.2}
    unet = {"context_channels": 20, "blocks": [1], "heads": [2], "pooled_channels": 10, "size_channels": 8}
    return tiny_spec(
        data=data | {"text": captions},
        unet={"classes": None, "multipliers": [1], "attention_resolutions": [], "text": unet, "dropout": 0.0},
        train={"images": 64, "batch_images": 8, "label_drop": 0.0, **changes},
        optimizer={"learning_rate": 0.03},
        samples={"every_images": 64, "count": 8},
        evaluation={"every_images": 64},
        sampler={"steps": 3, "guidance": 2.0, "kind": "ddim", "clip": "none"},
    )


@pytest.mark.launch
def test_masked_latents_with_conditions_train_and_go_on_bit_for_bit(tmp_path: Path) -> None:
    """Two stages; the picture shows decoded conditions and truths beside what is drawn."""
    spec = latent_spec(tmp_path)
    cache = prepared(Recipes(spec.data).all(8), How(encode_on=torch.device("cpu")))
    assert len(cache.caches) == 2 and all(count > 8 for count in cache.counts)
    tall = spec.model_copy(update={"data": spec.data.model_copy(update={"image_size": (16, 4)})})
    with pytest.raises(SpecError, match=r"samples.every_images = 64 draws for .* \[16,4\], and its bucket has none"):
        check_store(cache, tall)
    whole = train(tmp_path / "whole", spec, 2)
    train(tmp_path / "parts", latent_spec(tmp_path, images=24), 2)
    resumed = train(tmp_path / "parts", spec, 2)
    assert the_same(end_of(whole), end_of(resumed))
    recorded = recorded_losses(whole)
    assert recorded and all(map(math.isfinite, recorded.values())) and recorded == recorded_losses(resumed)
    one, other = (folder / "samples" / "images-000000064.png" for folder in (whole, resumed))
    assert one.read_bytes() == other.read_bytes()
    held_out, pictures = parts(spec.data, cache, cache)[1], prepare(pixels_of(spec.data), group=8)
    beside = Previews(spec, engine_of(8), WATCHDOG, held_out)._beside(torch.zeros(8, 3, 16, 16, dtype=torch.uint8))
    assert beside.truths is not None and beside.given is not None and beside.truths.shape[1:] == (3, 16, 16)
    row = held_out.of_size(spec.data.size).positions[:1]
    coder = Coder(Autoencoder.open(tmp_path / "autoencoder"), torch.device("cpu"))
    for shown, name in ((beside.truths, "images"), (beside.given, "condition")):
        pixels = torch.from_numpy(pictures.fields[name].read(row))
        torch.testing.assert_close(shown[:1], coder.decode(coder.encode(pixels)).float(), atol=1.0, rtol=0.0)
