"""Data sets of sd-scripts, OneTrainer and SimpleTuner become a run spec that needs no editing."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from make_text import write_encoders
from PIL import Image

from ddpm_ds.cli.main import main
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.config.spec_file import load_spec
from ddpm_ds.data.captions import texts_of
from ddpm_ds.data.prepare import prepare
from tests.evaluate import planted
from tests.launching import tiny_spec
from tests.training.test_previews import train

SHAPES = {"cats": (16, 16), "dogs": (24, 16), "birds": (16, 16), "reg": (16, 16)}


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of four pictures each, beside the encoders of their words, in the working directory."""
    monkeypatch.chdir(tmp_path)
    for name, (width, height) in SHAPES.items():
        (tmp_path / name).mkdir()
        for k in range(4):
            Image.new("RGB", (width, height), (20 * k, 80, 0)).save(tmp_path / name / f"{k}.png")
    (tmp_path / "masks").mkdir()
    for k in range(4):
        Image.new("L", (16, 16), 255 * (k % 2)).save(tmp_path / "masks" / f"{k}.png")
    write_encoders(tmp_path / "encoders", ("a", "cat", "dog", "bird", "red"), width=16, tokens=8)
    return tmp_path


@pytest.fixture
def base(pictures: Path) -> Path:
    """A spec of a tiny U-Net that reads captions of pixels."""
    unet = {"classes": None, "text": {"context_channels": 16, "tokens": 8, "blocks": [0, 1], "heads": [1, 1]}}
    values = tiny_spec(train={"label_drop": 0.0}).model_dump(mode="json", exclude_defaults=True)
    text = {"encoders": str(pictures / "encoders")}
    values["unet"] = {key: value for key, value in values["unet"].items() if key != "dropout"} | unet
    values["unet"] |= {"attention_resolutions": [], "attention_levels": []}
    values["data"] = {"source": "folder", "path": "none", "image_size": 16, "channels": 3, "text": text}
    path = pictures / "base.yaml"
    path.write_text(f"# A base with a comment.\n{yaml.safe_dump(values)}# Its end.\n")
    return path


TOML = """
[general]
shuffle_caption = true
keep_tokens = 1
caption_extension = ".txt"
flip_aug = true
[[datasets]]
resolution = 16
batch_size = 2
enable_bucket = true
bucket_reso_steps = 8
min_bucket_reso = 8
max_bucket_reso = 32
caption_dropout_rate = 0.25
keep_tokens = 2
  [[datasets.subsets]]
  image_dir = "cats"
  num_repeats = 3
  class_tokens = "a cat"
  [[datasets.subsets]]
  image_dir = "dogs"
  keep_tokens = 1
  caption_suffix = "end"
  [[datasets.subsets]]
  image_dir = "birds"
  metadata_file = "birds.json"
  num_repeats = 2
  conditioning_data_dir = "masks"
  [[datasets.subsets]]
  image_dir = "reg"
  alpha_mask = true
  is_reg = true
  class_tokens = "a"
"""


def imported(file: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> tuple[RunSpec, str]:
    """The spec that a file becomes, and what is printed."""
    capsys.readouterr()
    assert main(["import-data", str(file), "--spec", str(base), "--out", "mine.yaml"]) == 0
    return load_spec(Path("mine.yaml")), capsys.readouterr().out


def refusal(file: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which a file is refused; nothing is written."""
    line = planted.refusal(capsys, "import-data", file, "--spec", base, "--out", "mine.yaml")
    assert not Path("mine.yaml").exists() and not [*Path().glob("*/metadata.jsonl")]
    return line


@pytest.mark.launch
def test_a_toml_with_subsets_repeats_and_tags_trains_without_editing(
    pictures: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keys of a subset count before its data set's, and those before the general ones."""
    (pictures / "cats" / "0.txt").write_text("a cat, red, a\nnever read")
    (pictures / "birds.json").write_text(
        json.dumps({str(pictures / "birds" / "0.png"): {"caption": "a bird", "tags": "red, a"}, "1": {"tags": "bird"}})
    )
    (file := pictures / "set.toml").write_text(TOML.replace('_dir = "', f'_dir = "{pictures}/'))
    spec, out = imported(file, base, capsys)
    data = spec.data
    assert [(source.path.name, source.repeats, source.caption) for source in data.sources] == [
        *(("cats", 3, "a cat"), ("dogs", 1, ""), ("birds", 2, "")),
        ("reg", 6, "a"),  # as many as 24 others
    ]
    assert [source.mask for source in data.sources] == [None, None, str(pictures / "masks"), "alpha"]
    assert (
        data.horizontal_flips
        and data.buckets is not None
        and (data.buckets.step, data.buckets.sizes) == (8, "sd_scripts")
    )
    assert (data.buckets.minimum, data.buckets.maximum, data.size) == (8, 32, (16, 16))
    assert data.text is not None and data.text.tags is not None and data.text.drop == 0.25
    assert (data.text.stored, data.text.tags.keep, data.text.tags.shuffle) == ("text", 2, True)
    assert data.text.encoders == str(pictures / "encoders") and spec.unet == load_spec(base).unet
    text = Path("mine.yaml").read_text()
    for note in (
        "datasets.0.batch_size = 2 is not carried over: images on a device",
        'datasets.0.subsets.1.caption_suffix = "end" is not carried over: text after each caption',
        "datasets.0.subsets.1 asks for data.text.tags = ",
        "datasets.0.subsets.2.metadata_file lacks 2 images of",
        "reg has is_reg: such images come as often as all others",
        "datasets.0.subsets.3: alpha weighs the loss, as masked_loss does; else remove this mask",
    ):
        assert note in out and note in " ".join(text.replace("\n#", "").split())
    assert text.startswith("# Data sets of set.toml, by ddpm-ds import-data.\n#") and text.endswith("# Its end.\n")
    assert "# A base with a comment." in text and "ddpm-ds prepare --encode --spec mine.yaml" in out
    cache = prepare(data, group=4)
    texts = texts_of(cache)
    rows = [row[0] for each in cache.caches for row in each.others["captions"][:]]
    assert sorted(texts[number] for number in rows) == sorted(
        [*["a cat, red, a", *["a cat"] * 3], *[""] * 4, *["a bird, red, a", "bird", "", ""], *["a"] * 4]
    )
    masks = np.concatenate([each.others["mask"][:][:, 0, 0, 0] for each in cache.caches])
    assert sorted(masks.tolist()) == [0] * 2 + [255] * 14, "two are black"
    run_dir = train(tmp_path, spec, 2)
    assert (run_dir / "metrics.jsonl").exists()


def test_concepts_of_one_trainer_are_sources(pictures: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (pictures / "cats" / "0.txt").write_text("a cat\na red cat\n")
    (pictures / "words.txt").write_text("a dog\nred dog\n")
    text = {"prompt_source": "sample", "enable_tag_shuffling": True, "keep_tags_count": 1, "tag_delimiter": ","}
    concepts: list[dict[str, Any]] = [
        {"name": "x", "path": "cats", "seed": 3, "balancing": 2.5, "loss_weight": 0.5, "text": text}
        | {"image": {"enable_crop_jitter": True, "enable_random_flip": True, "random_hue_max_strength": 0.0}},
        {"path": "dogs", "text": text | {"prompt_source": "concept", "prompt_path": "words.txt"}, "balancing": 2}
        | {"balancing_strategy": "SAMPLES", "image_variations": 1},
        {"path": "reg", "enabled": False},
        {"path": "birds", "type": "VALIDATION", "text": text | {"prompt_source": "filename"}},
    ]
    Image.new("L", (16, 16)).save(pictures / "birds" / "3-masklabel.png")
    Image.new("L", (16, 16)).save(pictures / "cats" / "3-masklabel.png")
    (file := pictures / "concepts.json").write_text(json.dumps(concepts))
    spec, out = imported(file, base, capsys)
    found = [(source.path.name, source.repeats, source.loss_weight) for source in spec.data.sources]
    assert found == [("cats", 2.5, 0.5), ("dogs", 0.5, 1.0)] and spec.data.held_out_path == Path("birds")
    assert spec.data.text is not None and spec.data.text.tags is not None
    assert (spec.data.text.tags.keep, spec.data.text.tags.shuffle, spec.data.text.tags.drop) == (1, True, 0.0)
    assert spec.data.mask == "beside" and spec.data.horizontal_flips
    assert "concepts.0: beside weighs the loss, as masked_training does; else remove data.mask" in out
    assert "concepts.1 asks for data.horizontal_flips = false; all data sets here have true" in out
    assert "concepts.0.image.enable_crop_jitter = true is not carried over: changes crop" in out
    lines = {name: (pictures / name / "metadata.jsonl").read_text().splitlines() for name in ("cats", "dogs", "birds")}
    assert [*map(json.loads, lines["cats"])] == [{"file_name": "0.png", "text": ["a cat", "a red cat"]}]
    assert [json.loads(line)["text"] for line in lines["dogs"]] == [["a dog", "red dog"]] * 4
    assert json.loads(lines["birds"][3]) == {"file_name": "3.png", "text": "3"}
    Path("mine.yaml").unlink()
    imported(file, base, capsys)  # the same metadata.jsonl may be there
    Path("mine.yaml").unlink()
    (pictures / "cats" / "metadata.jsonl").write_text("{}")
    assert main(["import-data", str(file), "--spec", str(base), "--out", "mine.yaml"]) == 2
    assert "cats/metadata.jsonl exists, and is not replaced; move it away" in capsys.readouterr().err
    (file := pictures / "concepts.json").write_text(json.dumps([concepts[0] | {"type": "PRIOR_PREDICTION"}]))
    assert main(["import-data", str(file), "--spec", str(base), "--out", "mine.yaml"]) == 2
    assert (
        "concepts.0.type = PRIOR_PREDICTION teaches predictions of the base model; remove it" in capsys.readouterr().err
    )


def test_backends_of_simple_tuner_are_sources(pictures: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backends: list[dict[str, Any]] = [
        {"id": "a", "type": "local", "instance_data_dir": "cats", "caption_strategy": "instanceprompt", "repeats": 0}
        | {"instance_prompt": "a cat", "resolution": 16, "resolution_type": "pixel_area", "minimum_image_size": 8}
        | {"crop": True, "crop_aspect": "square", "cache_dir_vae": "c"},
        {"id": "b", "type": "local", "instance_data_dir": "dogs", "caption_strategy": "filename", "repeats": 3}
        | {"resolution": 0.000256, "resolution_type": "area", "crop": True},
        {"id": "t", "dataset_type": "text_embeds", "type": "aws", "aws_bucket_name": "x"},
        {"id": "c", "disabled": True},
    ]
    (file := pictures / "multidatabackend.json").write_text(json.dumps(backends))
    spec, out = imported(file, base, capsys)
    assert [(source.path.name, source.repeats) for source in spec.data.sources] == [("cats", 1), ("dogs", 4)]
    assert spec.data.size == (16, 16) and spec.data.buckets is None
    assert "backends.0.minimum_image_size = 8 is not carried over: leaves images out" in out
    assert json.loads((pictures / "cats" / "metadata.jsonl").read_text().splitlines()[2])["text"] == "a cat"
    Path("mine.yaml").unlink()
    for path in pictures.glob("*/metadata.jsonl"):
        path.unlink()
    for change, message in (
        ({"type": "csv"}, 'backends.0.type = "csv" can\'t be read; local can'),
        ({"dataset_type": "video"}, 'backends.0.dataset_type = "video" can\'t be read; image can'),
        ({"caption_strategy": "parquet"}, "backends.0.caption_strategy = parquet can't be read; write metadata.jsonl"),
        ({"instance_data_dir": "none"}, 'backends.0.instance_data_dir = "none" is no folder here; give its path'),
        ({"crops": True}, "backends.0.crops is unknown; did you mean crop?"),
    ):
        file.write_text(json.dumps([backends[0] | change]))
        assert message in refusal(file, base, capsys)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TOML.replace("num_repeats = 3", "num_repeat = 3"), "datasets.0.subsets.0.num_repeat is unknown; did you mean"),
        (TOML.replace("[general]", "[generals]"), "file.generals is unknown; did you mean general?"),
        (TOML.replace("shuffle_caption", "xyz"), "general.xyz is unknown; remove it"),
        (TOML.replace("keep_tokens = 2", "is_reg = true"), "datasets.0.is_reg is unknown"),
        (TOML.replace('image_dir = "cats"', 'image_dir = "none"'), 'image_dir = "none" is no folder here'),
        (TOML.replace("birds.json", "none.json"), "none.json can't be read (No such file or directory); mend it"),
        (
            TOML.replace("resolution = 16", "resolution = [16]"),
            "datasets.0.resolution = [16] should be a number from 0",
        ),
        (TOML.replace("keep_tokens = 2", 'keep_tokens = "x"'), 'data.text.tags.keep = "x" should be a whole number'),
        ("[general]\n", "it has no data set to train on"),
        ("x = [", "it is no configuration of data sets ("),
        ("[[datasets]]\nsubsets = [3]", "datasets.0.subsets.0 = 3 should be a block of keys"),
        (
            TOML.replace("num_repeats = 3", "num_repeats = -3"),
            "subsets.0.num_repeats = -3 should be a number from 0 to",
        ),
    ],
)
def test_what_nobody_knows_is_refused_in_a_line(
    pictures: Path, base: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (pictures / "birds.json").write_text("{}")
    (file := pictures / "set.toml").write_text(text)
    assert message in refusal(file, base, capsys)


def test_metadata_of_other_folders_and_of_lines_is_read(
    pictures: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"image_path": str(pictures / "birds" / "0.png"), "caption": "a bird"}]
    (pictures / "birds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (file := pictures / "set.toml").write_text(TOML.replace("birds.json", "birds.jsonl"))
    imported(file, base, capsys)
    assert (pictures / "birds" / "metadata.jsonl").read_text() == '{"file_name": "0.png", "text": "a bird"}\n'
    Path("mine.yaml").unlink()
    (pictures / "birds" / "metadata.jsonl").unlink()
    lines[0]["image_path"] = str(pictures / "dogs" / "0.png")
    (pictures / "birds.jsonl").write_text(json.dumps(lines[0]))
    assert "dogs/0.png is not in image_dir = birds; give the folder that has all images" in refusal(file, base, capsys)


def test_sdxl_is_the_base_and_sizes_are_of_latents(pictures: Path) -> None:
    (file := pictures / "set.toml").write_text(
        '[[datasets]]\nresolution = [832, 1216]\nflip_aug = true\n[[datasets.subsets]]\nimage_dir = "cats"\n'
    )
    assert main(["import-data", str(file), "--out", "mine.yaml"]) == 0
    spec = load_spec(Path("mine.yaml"))
    assert spec.data.size == (152, 104) and spec.data.autoencoder is not None and spec.data.buckets is None
    assert spec.data.horizontal_flips, "latents of mirrored images are stored"
