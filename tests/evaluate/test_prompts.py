"""Images for prompts: which text the U-Net reads, and what guidance leads away from."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make_text import write_encoders
from PIL import Image
from torch import Tensor

from ddpm_ds.cli.main import main
from ddpm_ds.cli.sample import TextOptions, texts_of
from ddpm_ds.data.captions import PROMPTS, EncodedPrompts
from ddpm_ds.data.prepare import How, prepare
from ddpm_ds.data.text import TextEncoders
from ddpm_ds.diffusion.samplers import Drawing, Sampler
from ddpm_ds.diffusion.spec import DiffusionSpec
from ddpm_ds.evaluate.sampling import Setup, draw, sample
from ddpm_ds.evaluate.trained import Trained, load_trained
from ddpm_ds.ground.errors import SpecError
from tests.evaluate.conftest import FakeTracker
from tests.evaluate.planted import (
    FAST,
    FAST_SAMPLER,
    Sample,
    difference,
    plant,
    refusal,
    report,
    sample_verb,
    trained_of,
)
from tests.launching import tiny_spec

CPU = torch.device("cpu")
WORDS = ("a", "red", "blue", "circle", "square")
INDEX = torch.arange(5)


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    write_encoders(folder, WORDS, width=12, tokens=9, second=8, pooled=10)
    return folder


def sections(encoders: Path, drop_to: str = "empty") -> dict[str, Any]:
    """Sections of a run with text whose U-Net also reads the pooled text and sizes, as SDXL's."""
    text = {"context_channels": 20, "tokens": 9, "blocks": [1, 1], "heads": [2, 4], "pooled_channels": 10}
    return {
        "data": {"source": "folder", "path": "p", "text": {"encoders": str(encoders), "drop_to": drop_to}},
        "unet": {"classes": None, "attention_resolutions": [], "text": {**text, "size_channels": 8}},
        "train": {"label_drop": 0.0},
    }


@pytest.fixture(scope="module")
def trained(encoders: Path) -> Trained:
    return trained_of(tiny_spec(**sections(encoders)))


def test_sizes_that_the_u_net_reads_are_those_drawn(encoders: Path, trained: Trained) -> None:
    other = sections(encoders)
    other["data"] |= {"image_size": [12, 8]}
    assert images(trained.resized((12, 8)), "a red circle").equal(
        images(trained_of(tiny_spec(**other)), "a red circle")
    )


def images(trained: Trained, prompts: str | list[str], negative: str | None = None, **sampler: Any) -> Tensor:
    return sample(trained, 4, sampler=FAST_SAMPLER.model_copy(update=sampler), prompts=prompts, negative=negative)


def test_an_image_is_that_of_its_prompt_whatever_is_drawn_beside_it(trained: Trained) -> None:
    together = images(trained, ["a red circle", "a blue square"], guidance=3.0)
    red, blue = (images(trained, prompt, guidance=3.0) for prompt in ("a red circle", "a blue square"))
    assert difference(together[::2], red[::2]) <= 1 and difference(together[1::2], blue[1::2]) <= 1
    assert difference(red, blue) > 20


@pytest.mark.parametrize("drop_to", ["empty", "zeros"])
def test_guidance_is_between_the_prediction_with_the_prompt_and_that_with_no_text(encoders: Path, drop_to: str) -> None:
    """Both in batches of their own; sizes are those of an image that was not cropped."""
    trained = trained_of(tiny_spec(**sections(encoders, drop_to)))
    assert trained.spec is not None and trained.spec.data.text is not None
    texts = TextEncoders.open(trained.spec.data.text, CPU).encode(["a red circle", ""])
    assert texts.pooled is not None
    tokens, pooled = texts.tokens.half(), texts.pooled.half().float()
    if drop_to == "zeros":
        tokens[1], pooled[1] = 0.0, 0.0
    sampler = FAST_SAMPLER.model_copy(update={"guidance": 3.0})
    drawing = Drawing(Sampler(FAST_SAMPLER, trained.diffusion), seed=0, index=INDEX, shape=(1, 8, 8))
    for _ in range(drawing.calls):
        x_t, t = drawing.inputs()
        predicted = []
        for row in (0, 1):
            vector = torch.cat((pooled[row], torch.tensor([8.0, 8.0, 0.0, 0.0, 8.0, 8.0]))).expand(5, -1)
            predicted.append(trained.unet(x_t, t, vector, context=tokens[row].expand(5, -1, -1)))
        drawing.take(predicted[1] + 3.0 * (predicted[0] - predicted[1]))
    expected = trained.finished(drawing.images())
    assert difference(sample(trained, 5, sampler=sampler, prompts="a red circle"), expected) <= 1
    unguided = sample(trained, 5, sampler=FAST_SAMPLER, prompts="a red circle")
    assert difference(unguided, expected) > 20


def test_guidance_of_1_is_none_and_of_0_reads_no_text(trained: Trained) -> None:
    known = EncodedPrompts.of(trained.data.text, ["a red circle", ""], CPU, print)  # type: ignore[arg-type]
    prompts = trained.prompts(known)
    drawn = draw(Setup(trained, FAST_SAMPLER, prompts=prompts), INDEX * 2, labels=None)
    assert difference(sample(trained, 9, sampler=FAST_SAMPLER, prompts="a red circle")[::2], drawn) <= 1
    assert difference(images(trained, "a red circle", guidance=0.0), images(trained, "")) <= 1


def test_a_negative_prompt_is_the_other_end_of_guidance(trained: Trained) -> None:
    """a + w (b - a) is b + (1 - w) (a - b)."""
    one = images(trained, "a red circle", "a blue square", guidance=0.25)
    other = images(trained, "a blue square", "a red circle", guidance=0.75)
    assert difference(one, other) <= 1
    assert difference(one, images(trained, "a red circle", guidance=0.25)) > 5


@pytest.fixture(scope="module")
def run_dir(encoders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "shapes"
    plant(path, **sections(encoders))
    return path


@pytest.fixture
def verb(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> Sample:
    return sample_verb(run_dir, capsys)


def drawn(path: Path) -> np.ndarray:
    found: np.ndarray = np.load(path)["arr_0"]
    return found


def test_the_verb_draws_an_image_of_each_prompt(verb: Sample, run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a red circle\n\n  a blue square\n")
    by_option, guided = ("--prompt", "a red circle", "--prompt", "a blue square"), ("--guidance", 3, "--negative", "a")
    printed = verb(*by_option, *guided, "--out", tmp_path / "one.npz")
    assert "2 images by ddim" in printed and "no prompt" not in printed
    verb("--prompts", tmp_path / "prompts.txt", *guided, "--out", tmp_path / "two.npz")
    one = drawn(tmp_path / "one.npz")
    assert len(one) == 2 and np.array_equal(one, drawn(tmp_path / "two.npz"))
    sampler = FAST_SAMPLER.model_copy(update={"guidance": 3.0})
    python = sample(load_trained(run_dir), sampler=sampler, prompts=["a red circle", "a blue square"], negative="a")
    assert np.array_equal(python.permute(0, 2, 3, 1).numpy(), one)
    verb(*by_option, "--out", tmp_path / "pngs")
    assert Image.open(tmp_path / "pngs" / "grid.png").size[0] > 500


def test_lines_of_a_file_may_have_options_of_their_own(
    verb: Sample, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--d 7 --s 2 --l 3 --n a"
    lines = ["# two alike among others", "red --w 4 --h 12", "a red circle", "a", f"a blue square {options}"]
    file, out = tmp_path / "prompts.txt", tmp_path / "drawn"
    file.write_text("\n".join(lines))
    assert f"{out}: 4 images, as the lines of {file} say" in verb("--prompts", file, "--out", out)
    assert sorted(path.name for path in out.iterdir()) == [f"{number:06}.png" for number in range(4)]
    alone: dict[int, list[object]] = {
        0: ["--prompt", "red", "--size", "12x4"],
        1: ["--prompt", "a red circle"],
        2: ["--prompt", "a"],
        3: ["--prompt", "a blue square", "--seed", 7, "--steps", 2, "--guidance", 3, "--negative", "a"],
    }
    for number, words in alone.items():
        verb(*words, "--first", number, "--count", 1, "--out", tmp_path / str(number))
        name = f"{number:06}.png"
        one, other = (np.asarray(Image.open(path / name)).astype(int) for path in (out, tmp_path / str(number)))
        assert one.shape == other.shape and abs(one - other).max() <= 1  # another batch rounds otherwise
    assert np.asarray(Image.open(out / "000000.png")).shape[:2] == (12, 4)
    file.write_text(f"a {options}\nred {options}")
    verb("--prompts", file, "--count", 4, "--out", tmp_path / "alike.npz")
    assert len(drawn(tmp_path / "alike.npz")) == 4, "all have the same options"
    file.write_text(f"a\nred {options}")
    for words, message in (
        (["--out", tmp_path / "x.npz"], "x.npz can't hold images for lines with options of their own; name a folder"),
        (["--count", 4], "has lines with options of their own, an image each, and --count 4; leave it out"),
    ):
        assert message in refusal(capsys, "sample", run_dir, *FAST, "--prompts", file, *words)
    for line, message in (
        ("a --ss euler", "line 1: --ss is none of --n, --w, --h, --d, --s, --l, --fs; remove it"),
        ("a -- b", "line 1: -- is none of --n, "),
        ("\na --w wide", "line 2: --w: 'wide' is not a number of pixels"),
        ("a --fs 0", "--shift 0.0: input should be greater than 0"),
        ("a --w 5", "--size 8x5: "),
    ):
        file.write_text(line)
        assert message in refusal(capsys, "sample", run_dir, *FAST, "--prompts", file)
    file.write_text("a --s 3")
    with pytest.raises(SpecError, match=r"--s is an option for ddpm-ds sample; remove it$"):
        texts_of(TextOptions(prompts=file), load_trained(run_dir))  # as evaluate reads the file


def test_images_of_another_size_are_drawn_with_its_shift(trained: Trained) -> None:
    flow = DiffusionSpec(schedule="flow", objective="velocity", shift=3.0, shift_size=8)
    trained = replace(trained, diffusion=flow)
    assert trained.process.shift == 3.0 and trained.resized((16, 16)).process.shift == 6.0
    sampler = FAST_SAMPLER.model_copy(update={"eta": 0.0, "clip": "none"})
    for size, shift in (((8, 8), 3.0), ((16, 16), 6.0)):
        drawing = trained.resized(size)
        one, other = (
            sample(drawing, 2, sampler=sampler.model_copy(update={"shift": value}), prompts="a red circle")
            for value in (None, shift)
        )
        assert torch.equal(one, other)


def test_without_a_prompt_a_line_names_the_text_that_is_drawn(
    verb: Sample, run_dir: Path, trained: Trained, tmp_path: Path
) -> None:
    def same(given: str, line: str) -> None:
        out = ("--count", 2, "--overwrite", "--out")
        assert f"no prompt is given, so it draws for {line}" in verb(*out, tmp_path / "none.npz")
        verb("--prompt", given, *out, tmp_path / "given.npz")
        assert np.array_equal(drawn(tmp_path / "none.npz"), drawn(tmp_path / "given.npz"))

    same("", "the empty text")
    assert trained.text is not None
    (run_dir / PROMPTS).write_bytes(EncodedPrompts.of(trained.text, ["a red circle"], CPU, print).content())
    try:
        same("a red circle", f"the prompts of the run's own pictures, 1 in {PROMPTS}")
    finally:
        (run_dir / PROMPTS).unlink()


def test_a_prompt_that_is_too_long_is_cut_with_a_line(verb: Sample, tmp_path: Path) -> None:
    long = "a red circle a blue square a red circle"  # 9 words and two ends, of 9 tokens
    printed = verb("--prompt", long, "--out", tmp_path / "long.npz")
    assert f'the prompt "{long}" is longer than 9 tokens: its last 2 are not read' in printed
    verb("--prompt", " ".join(long.split()[:7]), "--out", tmp_path / "short.npz")
    assert np.array_equal(drawn(tmp_path / "long.npz"), drawn(tmp_path / "short.npz"))


NO_TEXT = "reads no text (unet.text is null); leave it out"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--negative a", '--negative "a" has no effect, since --guidance is 1; leave'),
        ("--prompt a --prompt red --count 1", "--count 1: 2 prompts are an image each; use at least 2"),
        ("--prompts missing.txt", "--prompts missing.txt can't be read"),
        ("--prompts EMPTY", "has no prompt"),
        ("--prompt a --prompts b.txt", "not allowed with argument --prompt"),
        ("--prompt a", NO_TEXT),
        ("--negative a", NO_TEXT),
    ],
)
def test_prompts_that_can_not_be_drawn_are_refused_in_one_line(
    run_dir: Path, without_classes: Path, words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    path = without_classes if message == NO_TEXT else run_dir
    options = words.replace("EMPTY", str(tmp_path / "empty.txt")).split()
    assert message in refusal(capsys, "sample", path, *FAST, *options)


def test_prompts_of_pictures_that_can_not_be_drawn_are_refused(encoders: Path) -> None:
    for text, samples, message in (
        (sections(encoders), {"count": 1, "prompts": ["a", "b"]}, "samples.count = 1 is below the 2 of samples.p"),
        ({}, {"prompts": ["a"]}, r"samples\.prompts = \[a\] is used only with data\.text; remove it, or use \[\]"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny_spec(**text, samples=samples)


def test_a_prompt_of_a_million_characters_is_refused_in_a_line(trained: Trained) -> None:
    for prompt, negative in (("a" * 10**6, None), ("a", "a" * 10**6)):
        with pytest.raises(SpecError, match=r"a prompt has 1,000,000 characters; write 10,000 at most"):
            sample(trained, 1, sampler=FAST_SAMPLER, prompts=prompt, negative=negative)


def test_prompts_may_be_the_captions_of_the_held_out_images(
    encoders: Path, tmp_path: Path, trackers: list[FakeTracker]
) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    captions = {f"{number:02}.png": f"{'red' if number % 2 else 'blue'} circle" for number in range(12)}
    for name in captions:
        Image.new("L", (8, 8), 20 * len(captions)).save(pictures / name)
    lines = [json.dumps({"file_name": name, "text": text}) for name, text in captions.items()]
    (pictures / "metadata.jsonl").write_text("\n".join(lines))
    run, values = tmp_path / "run", sections(encoders)
    values["data"] |= {"path": str(pictures), "store_root": str(tmp_path), "held_out_images": 3, "held_out": "last"}
    known = prepare(tiny_spec(**values).data, How(encode_on=CPU)).meta.sha256
    plant(run, data_sha256=known, **values)
    assert main(["evaluate", str(run), *FAST, "--count", "10", "--metrics", "pixel", "--prompts", "held-out"]) == 0
    assert report(run / "evaluations")["prompts"] == ["red circle", "blue circle", "red circle"]
