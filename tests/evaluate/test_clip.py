"""The CLIP score: cosines of transformers' own model, for the prompts that were drawn for, kept where scores are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make_text import write_encoders
from PIL import Image
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

from ddpm_ds.cli.main import main
from ddpm_ds.data.prepare import prepare
from ddpm_ds.errors import DataError
from ddpm_ds.evaluate.inception import Clip
from tests.evaluate.conftest import FakeTracker
from tests.evaluate.planted import FAST, plant
from tests.launching import tiny_spec
from tests.model_hub import ModelHub

CPU = torch.device("cpu")
WORDS = ("a", "red", "blue", "circle", "square")
PROMPTS = ["a red circle", "a blue square", "a circle"]


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    write_encoders(folder, WORDS, width=12, tokens=9)
    return folder


@pytest.fixture(scope="module")
def model(encoders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random CLIP model with its processor."""
    folder = tmp_path_factory.mktemp("clip")
    tokenizer = CLIPTokenizer.from_pretrained(encoders / "tokenizer")
    layer = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = {**layer, "vocab_size": len(tokenizer), "max_position_embeddings": 9, **ends}
    vision = {**layer, "image_size": 16, "patch_size": 8}
    with torch.random.fork_rng():
        torch.manual_seed(2)  # some prompts fit, others point away
        made = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.normal_(std=0.5)  # else all images are about alike
    made.save_pretrained(folder)
    images = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    CLIPProcessor(images, tokenizer).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("channels", [1, 3])
def test_scores_are_the_cosines_of_transformers_own_model_times_100(model: Path, channels: int) -> None:
    random = np.random.default_rng(0)
    images = (random.integers(0, 256, (40, channels, 20, 24)) * random.random((40, channels, 1, 1))).astype(np.uint8)
    found = Clip(model).scores(images, PROMPTS, CPU)
    assert found.shape == (40,) and (found == 0.0).any() and len(np.unique(found.round(3))) > 5
    judge, processor = CLIPModel.from_pretrained(model), CLIPProcessor.from_pretrained(model)
    for number, image in enumerate(images):
        shown = Image.fromarray(image[0] if channels == 1 else image.transpose(1, 2, 0)).convert("RGB")
        with torch.no_grad():
            logit = judge(**processor(text=PROMPTS[number % 3], images=shown, return_tensors="pt")).logits_per_image
            theirs = 100.0 * (logit / judge.logit_scale.exp()).item()
        assert found[number] == pytest.approx(max(theirs, 0.0), abs=1e-3), "a cosine in fp32, times 100"


def test_a_prompt_that_is_too_long_is_cut_and_a_name_on_the_hub_is_as_good_as_a_folder(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = ModelHub(tmp_path / "cache")
    hub.repositories["owner/clip"] = model
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot_download)
    monkeypatch.chdir(tmp_path)
    images = np.random.default_rng(0).integers(0, 256, (2, 3, 16, 16), dtype=np.uint8)
    long = [" ".join(["red"] * count) for count in (7, 30)]
    by_name = Clip(Path("owner/clip"))
    assert by_name.scores(images[:1], long[:1], CPU) == by_name.scores(images[:1], long[1:], CPU)
    np.testing.assert_array_equal(by_name.scores(images, PROMPTS, CPU), Clip(model).scores(images, PROMPTS, CPU))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        ("model.safetensors", "it is no CLIP model with weights in safetensors"),
        ("config.json", "No such file or directory"),
        ("tokenizer", "it has neither tokenizer.json nor vocab.json"),
        ("text model", "it is no CLIP model"),
    ],
)
def test_what_is_no_clip_model_is_one_line(model: Path, encoders: Path, tmp_path: Path, harm: str, said: str) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(encoders / "text_encoder" if harm == "text model" else model, folder)
    for path in folder.glob(f"{harm}*"):
        path.unlink()
    with pytest.raises(DataError, match=rf"^--clip-model .*{said}.*; name the folder of a CLIPModel[^\n]*$"):
        Clip(folder)


def sections() -> dict[str, Any]:
    """Sections of a run with text, besides its data."""
    text = {"context_channels": 12, "tokens": 9, "blocks": [1, 1], "heads": [2, 4]}
    unet: dict[str, Any] = {"classes": None, "attention_resolutions": [], "text": text}
    return {"unet": unet, "train": {"label_drop": 0.0}}


def test_evaluate_scores_the_prompts_that_it_draws_for(
    model: Path, encoders: Path, tmp_path: Path, trackers: list[FakeTracker], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    plant(
        run, data={"source": "folder", "path": "p", "text": {"encoders": str(encoders), "layer": "last"}}, **sections()
    )
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    words = ["evaluate", str(run), *FAST, "--count", "10", "--metrics", "clip"]
    prompts = ["--prompts", str(tmp_path / "prompts.txt")]
    assert main([*words, *prompts, "--clip-model", str(model)]) == 0, "without a data set"
    (folder,) = (run / "evaluations").iterdir()
    content = json.loads((folder / "scores.json").read_text())
    (score,) = content["scores"]
    found = Clip(model).scores(np.load(folder / "drawn" / "images.npy"), PROMPTS, CPU)
    assert score["value"] == pytest.approx(found.mean()) and score["references"] == 3 and content["reference"] is None
    assert trackers[-1].logged == {"eval/clip_10": score["value"]} and content["prompts"] == PROMPTS
    assert f"CLIP score, {model.name}" in capsys.readouterr().out

    capsys.readouterr()
    assert main([*words, *prompts]) == 2
    assert "--metrics clip needs --clip-model, such as" in capsys.readouterr().err


def test_a_unet_without_text_has_no_clip_score(
    without_classes: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, asked in ((["--metrics", "clip"], "--metrics clip"), (["--clip-model", str(model)], "--clip-model")):
        assert main(["evaluate", str(without_classes), *FAST, "--count", "10", *words]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"ddpm-ds: error: {asked}") and said.count("\n") == 1
        assert "reads no text (unet.text is null); leave it out" in said


def test_prompts_may_be_the_captions_of_the_held_out_images(
    model: Path, encoders: Path, tmp_path: Path, trackers: list[FakeTracker]
) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    captions = {f"{number:02}.png": f"{'red' if number % 2 else 'blue'} circle" for number in range(12)}
    for name in captions:
        Image.new("L", (8, 8), 20 * len(captions)).save(pictures / name)
    lines = [json.dumps({"file_name": name, "text": text}) for name, text in captions.items()]
    (pictures / "metadata.jsonl").write_text("\n".join(lines))
    data = {"source": "folder", "path": str(pictures), "store_root": str(tmp_path), "held_out_images": 3}
    data |= {"held_out": "last", "text": {"encoders": str(encoders), "layer": "last"}}
    run = tmp_path / "run"
    known = prepare(tiny_spec(data=data, **sections()).data, encode_on=CPU).meta.sha256
    plant(run, data_sha256=known, data=data, **sections())
    words = ["--count", "10", "--metrics", "clip", "--clip-model", str(model), "--prompts", "held-out"]
    assert main(["evaluate", str(run), *FAST, *words]) == 0
    (folder,) = (run / "evaluations").iterdir()
    prompts = json.loads((folder / "scores.json").read_text())["prompts"]
    assert prompts == ["red circle", "blue circle", "red circle"]
