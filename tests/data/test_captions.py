"""Captions are read beside their images, encoded once as diffusers' pipelines encode them, and chosen by key."""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from make_text import write_encoders
from PIL import ExifTags, Image

from ddpm_ds.data import captions
from ddpm_ds.data.cache import DatasetCache
from ddpm_ds.data.captions import texts_of
from ddpm_ds.data.latents import pixels_learned
from ddpm_ds.data.loader import MicroBatch
from ddpm_ds.data.prepare import How, Recipes, images_of, prepare
from ddpm_ds.data.sources import open_source
from ddpm_ds.data.spec import DataSpec, TagsSpec, TextSpec
from ddpm_ds.data.text import TEXTS_AT_ONCE, TextEncoders, check_text, chunks
from ddpm_ds.ground.errors import DataError, SpecError, print_once
from ddpm_ds.ground.keyed import Draws, Stream
from ddpm_ds.training.objective import encoded
from ddpm_ds.unet.spec import CrossAttentionSpec
from tests.autoencoders import save_autoencoder
from tests.data.reading import PICTURES, loaded
from tests.launching import tiny_spec

CPU = torch.device("cpu")
WORDS = ("a", "red", "green", "cat", "dog")
SpecOf = Callable[..., DataSpec]
TEXT_FIELDS = {"images", "text", "pooled", "sizes"}


def prepared_images(spec: DataSpec) -> DatasetCache:
    """The cache of images without their encoded captions."""
    return images_of(Recipes(spec).of(), How())


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny encoders such as SDXL's, of 32 and 16 channels and 24 of pooled text, whose tokenizers pad differently."""
    path = tmp_path_factory.mktemp("encoders")
    write_encoders(path, WORDS, width=32, second=16, pooled=24)
    settings = path / "tokenizer_2" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"pad_token": "!"}))
    return path


@pytest.fixture
def spec_of(encoders: Path, folder: Path, tmp_path: Path) -> SpecOf:
    """Specs of twelve pictures with captions: two of the first cat, and one of the others."""
    for number in range(6):
        (folder / "dogs" / f"{number}.txt").write_text(f"a red dog{' of many' * number}\n")
    lines = [{"file_name": f"cats/{number}.png", "text": "a cat"} for number in range(1, 6)]
    lines.append({"file_name": "./cats/0.png", "text": ["a cat", "a green cat"]})  # type: ignore[dict-item]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def make(text: dict[str, Any] | None = None, **changes: Any) -> DataSpec:
        asked = {"encoders": str(encoders), "layer": "penultimate"} | (text or {})
        given = {"source": "folder", "path": folder, "image_size": 8, "channels": 3, "text": asked}
        return DataSpec.model_validate(given | {"store_root": tmp_path / "stores"} | changes)

    return make


def batch_of(cache: DatasetCache, size: int = 12, **changes: Any) -> MicroBatch:
    """The first micro-batch of a run."""
    asked: dict[str, Any] = {"fields": TEXT_FIELDS, "seed": 0} | changes
    return next(loaded(cache, micro_batch_images=size, **asked))


def captioned(cache: DatasetCache) -> list[list[str]]:
    """The captions of each image."""
    texts = texts_of(cache)
    return [[texts[number] for number in row if number >= 0] for row in cache.others["captions"][:]]


def opened(spec_of: SpecOf, root: Path, files: Mapping[str, str | int | None], **changes: Any) -> Any:
    """The source of two pictures, a/1.png and 2.png, beside these files, of which None makes a named pipe, and a number
    a hole of so many bytes.
    """
    for name, text in {"a/1.png": "", "2.png": "", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            os.mkfifo(root / name)
        elif isinstance(text, int):
            (root / name).touch()
            os.truncate(root / name, text)
        elif name.endswith(".png"):
            Image.new("RGB", (8, 8)).save(root / name)
        else:
            (root / name).write_text(text)
    return open_source(spec_of(path=root, **changes), progress=True)


LINES = '{"file_name": "a/1.png", "text": "one"}\n{"file_name": "./2.png", "text": ["two", "too"]}\n'
ONE = {"2.txt": "two"}


@pytest.mark.parametrize(
    ("files", "captions"),
    [
        ({"2.txt": "two\n", "a/1.txt": "one"}, [["two"], ["one"]]),
        ({"2.caption": "two", "a/1.TXT": "one"}, [["two"], ["one"]]),
        ({"2.png.txt": "two", "a/1.png.Caption": "one"}, [["two"], ["one"]]),
        (
            {"2.json": '{"url": "x", "text": ["two", "too"]}', "a/1.txt": "one", "a/1.json": "{}"},
            [["two", "too"], ["one"]],
        ),
        ({"metadata.jsonl": LINES, "2.txt": "not read"}, [["two", "too"], ["one"]]),
        (
            {"metadata.csv": '\ufefffile_name,text\na/1.png,"one, ""1""\nand more"\n2.png,\n', **ONE},
            [["two"], ['one, "1"\nand more']],
        ),
        ({"a/metadata.jsonl": '\n{"file_name": "1.png", "text": "one"}', **ONE}, [["two"], ["one"]]),
        (
            {"a/metadata.csv": "text,file_name\none,1.png", "metadata.jsonl": LINES[LINES.index("\n") :]},
            [["two", "too"], ["one"]],
        ),
    ],
)
def test_usual_places_of_captions_are_read(
    spec_of: SpecOf, tmp_path: Path, files: Mapping[str, str], captions: list[list[str]]
) -> None:
    source = opened(spec_of, tmp_path / "few", files)
    table, texts = source.captions.table, [*source.captions.texts]
    assert [[texts[number] for number in row if number >= 0] for row in table] == captions
    assert [source.name(i) for i in range(2)] == ["2.png", "a/1.png"] and not source.captions.missing


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"metadata.jsonl": LINES.replace("text", "caption")}, "2 of 2 images"),
        ({"a/1.txt": ""}, "1 of 2 images of data.source = folder have no caption, first 2.png; give each a .txt "),
        ({"metadata.jsonl": '{"file_name": "no/9.png"}', **ONE, "a/1.txt": ""}, "1 of 3 images"),
        ({"metadata.jsonl": LINES * 2}, "line 3: a/1.png is named twice, and several captions are a list; write it"),
        ({"metadata.jsonl": '{"image_path": "2.png"}'}, "line 1: it has no file_name, but image_path; write"),
        ({"metadata.csv": 'file_name,text\n2.png,"two'}, "line 2: unexpected end of data; write"),
        ({"a/metadata.jsonl": '{"file_name": "../2.png", "text": "two"}'}, "it points outside its folder (../2.png)"),
        (
            {"metadata.jsonl": json.dumps({"file_name": "2.png", "text": ["x"] * 65_536})},
            "it has 65,536 captions, and an image may have 256",
        ),
        ({"2.txt": None}, "2.txt can't be read (it is a named pipe, not a file); write it again"),
        ({"metadata.csv": None}, "metadata.csv, line 0: it is a named pipe, not a file"),
        ({"dataset.json": None, **ONE, "a/1.txt": ""}, "dataset.json of data.path"),
        ({"metadata.jsonl": 2**40}, "line 1: Expecting value: line 1 column 1 (char 0); write it again"),
        ({"metadata.csv": 2**40}, "line 1: field larger than field limit (131072); write it again"),
        ({"2.caption": 2**40}, "2.caption can't be read (it has more than 16,777,216 bytes); write it again"),
    ],
)
def test_captions_that_are_not_read_are_one_line(
    spec_of: SpecOf, tmp_path: Path, files: Mapping[str, str | int | None], message: str
) -> None:
    with pytest.raises(DataError) as caught:
        captions.known_captions(opened(spec_of, tmp_path / "few", files), spec_of())
    line = str(caught.value)
    assert message in line and "\n" not in line


def test_images_that_are_named_but_missing_are_unreadable_ones(spec_of: SpecOf, tmp_path: Path) -> None:
    """As those in a dataset.json."""
    lines = LINES + '{"file_name": "a/9.png", "text": "nine"}'
    labels = json.dumps({"labels": [[name, 1] for name in ("2.png", "3.png", "a/1.png", "a/9.png", "b/0.png")]})
    opened(spec_of, tmp_path / "few", {"metadata.jsonl": lines, "3.png": None, "3.txt": "a pipe"})
    spec = spec_of(path=tmp_path / "few", max_bad_fraction=0.5)
    cache = prepared_images(spec)
    assert captioned(cache) == [["two", "too"], ["one"]] and cache.meta.skipped == 2
    skipped = (cache.path / "skipped.txt").read_text()
    assert "3.png\tit is a named pipe, not a file\n" in skipped and "a/9.png\tNo such file" in skipped
    with pytest.raises(DataError, match=r"data\.max_bad_fraction = 0\.4, but 2 of 4 images are unreadable"):
        prepared_images(spec.model_copy(update={"max_bad_fraction": 0.4, "store_root": tmp_path / "anew"}))
    (tmp_path / "few" / "dataset.json").write_text(labels)  # which names one more that is missing
    (tmp_path / "few" / "b").mkdir()
    (tmp_path / "few" / "b" / "0.txt").write_text("none")
    spec = spec.model_copy(update={"max_bad_fraction": 0.7, "store_root": tmp_path / "labelled"})
    cache = prepared_images(spec)
    assert captioned(cache) == [["two", "too"], ["one"]] and cache.meta.skipped == 3 and cache.labels.tolist() == [1, 1]


def test_what_other_trainers_mean_by_names_gets_a_line(
    spec_of: SpecOf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Masks are no images, folders' names have repeats and captions, and of several captions' files one is read."""
    print_once.cache_clear()
    beside: dict[str, str | None] = {"10_cat/3.txt": "3", "10_cat/3.caption": "three", "10_cat/3.json": "{}"}
    masks: dict[str, str | None] = {"10_cat/3-masklabel.png": "", "10_cat/3-condlabel.png": "", "10_cat/3.png": ""}
    source = opened(spec_of, tmp_path / "few", {**beside, **masks, **ONE, "a/1.txt": "one"})
    assert [source.name(i) for i in range(len(source.labels))] == ["10_cat/3.png", "2.png", "a/1.png"]
    message = capsys.readouterr().err
    assert "2 masks of OneTrainer, such as 10_cat/3-condlabel.png, are neither images here nor read" in message
    assert "10_cat is read as 10 repeats, and as the caption cat of images without one, unless" in message
    assert source.parts.tolist() == [[0, 10], [0, 0], [0, 0]]
    assert "of 10_cat/3.txt, 10_cat/3.caption, 10_cat/3.json the first is read" in message
    open_source(spec_of(path=tmp_path / "few"), progress=True)
    assert not capsys.readouterr().err, "once, however often the source is opened"


@pytest.mark.parametrize("values", [["one", "two"], [["one", "other"], ["two"]]])
def test_captions_of_hugging_face_are_a_column(spec_of: SpecOf, tmp_path: Path, values: list[Any]) -> None:
    import datasets

    images = [Image.fromarray(pixels) for pixels in PICTURES[:2]]
    rows = datasets.Dataset.from_dict({"image": images, "text": values}).cast_column("image", datasets.Image())
    rows.save_to_disk(str(tmp_path / "saved"))
    spec = spec_of(source="huggingface", path=tmp_path / "saved")
    assert captioned(prepared_images(spec)) == [[each] if isinstance(each, str) else each for each in values]
    with pytest.raises(
        DataError, match=r"data\.text\.captions = image of .* no texts; choose with --set \S+ one of text$"
    ):
        open_source(spec_of({"captions": "image"}, source="huggingface", path=tmp_path / "saved"))


def test_tokens_are_those_of_the_pipelines(encoders: Path, tmp_path: Path) -> None:
    texts = ["a red cat", "", "green dog " * 60, *["dog"] * (TEXTS_AT_ONCE - 3)]  # as many as are encoded at once
    load: Any = _loaded
    found = TextEncoders.open(TextSpec(encoders=str(encoders), layer="penultimate"), CPU)
    xl: Any = StableDiffusionXLPipeline.encode_prompt
    pipeline = load(StableDiffusionXLPipeline, encoders, second=True)
    tokens, _, pooled, _ = xl(pipeline, texts, device=CPU, do_classifier_free_guidance=False)
    encoded = found.encode(texts)
    assert torch.equal(encoded.tokens, tokens) and encoded.pooled is not None and torch.equal(encoded.pooled, pooled)
    assert (found.tokens, found.channels, found.pooled_channels) == (77, 48, 24)
    few = found.encode(texts[:3])
    assert torch.equal(few.tokens, tokens[:3]), "each text has its bits, however many are encoded"
    assert (found.ids(texts[:1])[:, 0] != found.ids(texts[:1])[:, 1]).any()
    assert found.excess(texts[:3]) == [0, 0, 45], "120 words, a start and an end"
    write_encoders(tmp_path / "one", WORDS, width=16)
    last = TextEncoders.open(TextSpec(encoders=str(tmp_path / "one")), CPU)
    pipeline = load(StableDiffusionPipeline, tmp_path / "one", second=False)
    tokens, _ = StableDiffusionPipeline.encode_prompt(pipeline, texts, CPU, 1, False)
    assert torch.equal(last.encode(texts).tokens, tokens) and last.encode(texts).pooled is None
    assert last.pooled_channels is None and last.digest != found.digest


LONG = " ".join(["red", "green", "cat", "dog", "a"] * 46)  # 230 words


@pytest.mark.parametrize("words", [0, 1, 74, 75, 76, 150, 151, 225, 230])
@pytest.mark.parametrize("tokens", [152, 227])
def test_long_captions_are_tokenized_in_chunks_as_in_sd_scripts(encoders: Path, tokens: int, words: int) -> None:
    """Each chunk has a start; an encoder that pads with its end has one last, the other one after the words."""
    found = TextEncoders.open(TextSpec.model_validate({"encoders": str(encoders), "tokens": tokens}), None)
    text = " ".join(LONG.split()[:words])
    for number, tokenizer in enumerate(found.tokenizers):
        start, end, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
        assert (pad == end) is (number == 0)
        own = [tokenizer.convert_tokens_to_ids(f"{word}</w>") for word in text.split()][: tokens - 2]
        expected = []
        for first in range(0, tokens - 2, 75):
            rest = own[first : first + 75]
            expected.append([start, *rest, end, *[pad] * (75 - len(rest))])
        got = chunks(found.ids([text])[:, number].long(), 77, end, pad)
        assert [chunk[0].tolist() for chunk in got] == expected, "one with no words is start, end and padding"


def test_long_captions_have_the_inner_states_of_each_chunk_and_the_first_ones_pooled_text(
    encoders: Path, spec_of: SpecOf
) -> None:
    known = TextSpec(encoders=str(encoders), layer="penultimate", tokens=227)
    found, short = TextEncoders.open(known, CPU), TextEncoders.open(known.model_copy(update={"tokens": None}), CPU)
    texts = [LONG, "a red cat", " ".join(LONG.split()[:100])]
    encoded = found.encode(texts)
    assert encoded.tokens.shape == (3, 227, 48) and encoded.pooled is not None
    once = short.encode(texts)
    assert torch.equal(encoded.tokens[:, :76], once.tokens[:, :76]) and once.pooled is not None
    assert torch.equal(encoded.pooled, once.pooled), "that of the first chunk"
    second = short.encode([" ".join(LONG.split()[75:150]), "", " ".join(LONG.split()[75:100])])
    assert torch.equal(encoded.tokens[:, 76:151], second.tokens[:, 1:76])
    third = short.encode([" ".join(LONG.split()[150:225]), "", ""])
    assert torch.equal(encoded.tokens[:, 151:], third.tokens[:, 1:])
    assert found.digest != short.digest and found.excess(texts) == [5, 0, 0]
    assert short.digest == TextEncoders.open(known.model_copy(update={"tokens": 77}), CPU).digest
    made = [prepare(spec_of({"tokens": 152, "stored": stored}), How(encode_on=CPU)) for stored in ("float16", "ids")]
    batch, ids = (batch_of(cache, fields={"text"}) for cache in made)
    assert batch.text is not None and batch.text.shape == (12, 152, 48)
    again = TextEncoders.open(known.model_copy(update={"tokens": 152}), CPU).encode_ids(ids.text).rounded()  # type: ignore[arg-type]
    assert torch.equal(again.tokens, batch.text)
    with pytest.raises(
        DataError, match=r"data\.text\.tokens = 77 should be 2 more than a multiple of 6, since the enc"
    ):
        write_encoders(made[0].path / "few", WORDS, width=16, tokens=8)
        TextEncoders.open(TextSpec(encoders=str(made[0].path / "few"), tokens=77), None)


def _loaded(kind: Any, folder: Path, second: bool) -> Any:
    """A pipeline of diffusers that can encode, and no more."""
    from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

    pipeline = kind.__new__(kind)
    modules: dict[str, Any] = dict.fromkeys(("vae", "unet", "scheduler"))
    for suffix, model in (("", CLIPTextModel), ("_2", CLIPTextModelWithProjection))[: 1 + second]:
        modules[f"tokenizer{suffix}"] = CLIPTokenizer.from_pretrained(folder / f"tokenizer{suffix}")
        modules[f"text_encoder{suffix}"] = model.from_pretrained(folder / f"text_encoder{suffix}")
    pipeline.register_modules(**modules)
    pipeline.register_to_config(force_zeros_for_empty_prompt=True)
    return pipeline


@pytest.mark.parametrize("size", [1, 3, 8, 12])
def test_captions_that_are_encoded_while_training_are_the_stored_ones_bit_for_bit(spec_of: SpecOf, size: int) -> None:
    """In micro-batches of any size; their tokens' numbers are stored without encoding anything."""
    spec, stored = spec_of({"stored": "ids"}), prepare(spec_of(), How(encode_on=CPU))
    ids = prepare(spec)
    assert ids.text is not None and ids.text.path.name.endswith("-ids") and ids.empty_text is None
    assert "the longest loses" not in str(captions.warnings_of(ids.text)) and ids.key != stored.key
    encoders = TextEncoders.open(spec.text, CPU)  # type: ignore[arg-type]
    batch, expected = batch_of(ids, size, fields={"text", "sizes"}), batch_of(stored, size)
    assert batch.text is not None and batch.text.shape == (size, 2, 77) and batch.text.dtype == torch.int32
    found = encoded(batch, encoders)
    assert found.text is not None and torch.equal(found.text, expected.text)  # type: ignore[arg-type]
    assert found.pooled is not None and torch.equal(found.pooled, expected.pooled)  # type: ignore[arg-type]
    (empty,), stored_empty = encoders.encode([""]).rounded().tokens, stored.empty_text
    assert stored_empty is not None and torch.equal(empty, stored_empty.tokens[0])
    assert encoded(batch._replace(text=None), encoders).text is None, "nothing is read"


def test_what_encoders_take_of_a_device_is_counted_without_loading_them(encoders: Path) -> None:
    found = TextEncoders.open(TextSpec(encoders=str(encoders), layer="penultimate"), CPU)
    counted, elements = found.parameters, found.elements
    assert counted == sum(each.numel() for model in found.models for each in model.parameters())
    states = [
        model(found.ids([""] * TEXTS_AT_ONCE)[:, n].long(), output_hidden_states=True)
        for n, model in enumerate(found.models)
    ]
    assert elements - counted == sum(each.numel() for state in states for each in state.hidden_states)


def test_the_loader_yields_the_text_and_sizes_of_each_image(spec_of: SpecOf) -> None:
    spec = spec_of()
    cache = prepare(spec, How(encode_on=CPU))
    assert prepare(spec).meta == cache.meta, "it is opened without encoding"
    batch, texts = batch_of(cache), texts_of(cache)
    encoded = TextEncoders.open(spec.text, CPU).encode(texts)  # type: ignore[arg-type]
    rows = cache.others["captions"][:]
    positions = _positions(cache, batch)
    draws = Draws(0, batch.index, {Stream.CAPTION: 1}).bits(Stream.CAPTION)[:, 0].numpy()
    chosen = [rows[at][draw % (2 if at == 0 else 1)] for at, draw in zip(positions, draws, strict=True)]
    assert batch.text is not None and torch.equal(batch.text, encoded.tokens[chosen].half())
    assert batch.pooled is not None and torch.equal(batch.pooled, encoded.pooled[chosen].half())  # type: ignore[index]
    assert batch.sizes is not None and batch.sizes.tolist() == [[8, 10, 0, 1, 8, 8]] * 12
    empty = cache.empty_text
    assert empty is not None and torch.equal(empty.tokens[0], encoded.tokens[0].half()) and empty.pooled is not None
    first = cache.fields["text"].read(np.array([0, 6]))
    assert torch.equal(torch.from_numpy(first), encoded.tokens[rows[[0, 6], 0]].half()), (
        "held-out images have their first"
    )


def _positions(cache: DatasetCache, batch: MicroBatch) -> list[int]:
    """Positions of the images of a micro-batch, each of which is of one value."""
    values = cache.images[:][:, 0, 0, 0].tolist()
    return [values.index(value) for value in batch.images[:, 0, 0, 0].tolist()]


def test_a_caption_is_chosen_by_seed_and_index_alone(spec_of: SpecOf) -> None:
    cache = prepare(spec_of(), How(encode_on=CPU))
    whole = batch_of(cache, size=48)
    for fields in ({"text"}, {"pooled", "images"}):  # ranks ask for different fields
        for replica in (0, 1):
            given: dict[str, Any] = {"fields": fields, "seed": 0, "start_images": 24}
            given |= {"micro_batch_images": 6, "replicas": 2, "replica": replica}
            part = next(loaded(cache, **given))
            mine = slice(24 + 6 * replica, 30 + 6 * replica)
            assert torch.equal(part.index, whole.index[mine])
            for name in fields:
                assert torch.equal(getattr(part, name), getattr(whole, name)[mine])
    twice = np.array(_positions(cache, whole)) == 0
    assert whole.text is not None and len(twice.nonzero()[0]) == 4
    many = batch_of(cache, size=480)
    first = np.array(_positions(cache, many)) == 0
    assert many.text is not None and len(many.text[first].unique(dim=0)) == 2, "both captions of the first cat are seen"


def test_long_captions_are_cut_and_counted(spec_of: SpecOf, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "dogs" / "5.txt").write_text("dog " * 100)
    prepare(spec_of(), How(progress=True, encode_on=CPU))
    assert "1 of 9 captions have more than 77 tokens and are cut" in (message := capsys.readouterr().err)
    assert "the longest loses 25" in message, "100 words, a start and an end"
    assert "9 distinct captions of" in message and "are free" in message


def test_latents_and_pixels_share_their_text_and_sizes(spec_of: SpecOf, tmp_path: Path) -> None:
    save_autoencoder(tmp_path / "autoencoder")
    pixels = prepare(spec_of(), How(encode_on=CPU))
    latents = prepare(spec_of(autoencoder=tmp_path / "autoencoder", image_size=4, channels=4), How(encode_on=CPU))
    assert latents.meta.kind == "latents" and latents.text is not None and pixels.text is not None
    assert latents.text.path == pixels.text.path and latents.path != pixels.path
    assert np.array_equal(latents.others["sizes"][:], pixels.others["sizes"][:])
    assert captioned(latents) == captioned(pixels)
    for found, name in ((latents, "text"), (pixels, "text")):
        assert np.array_equal(found.fields[name].read(np.arange(12)), pixels.fields[name].read(np.arange(12)))
    assert pixels_learned(latents.meta.sha256) == pixels_learned(pixels.meta.sha256)
    assert latents.meta.facts is None and pixels.meta.facts is None, "they are still pictures"


def test_sizes_are_those_of_the_upright_file_and_of_its_crop_after_scaling(spec_of: SpecOf, folder: Path) -> None:
    sideways = Image.Exif()
    sideways[ExifTags.Base.Orientation] = 6
    wide = Image.fromarray(np.zeros((40, 100, 3), np.uint8))
    wide.save(folder / "cats" / "1.png")
    wide.save(folder / "cats" / "2.png", exif=sideways)
    Image.fromarray(np.zeros((400, 1000, 3), np.uint8)).save(folder / "cats" / "3.jpg")  # scaled while it is decoded
    shutil.copy(folder / "dogs" / "0.txt", folder / "cats" / "3.txt")
    sizes = prepared_images(spec_of()).others["sizes"][:]
    assert sizes[1].tolist() == [40, 100, 0, 6, 8, 8], "8 x 20 pixels, of which 12 are cut off"
    assert sizes[2].tolist() == [100, 40, 6, 0, 8, 8]
    assert sizes[3].tolist() == [400, 1000, 0, 6, 8, 8]


def test_changed_captions_are_refused(spec_of: SpecOf, folder: Path) -> None:
    prepare(spec_of(), How(encode_on=CPU))
    (folder / "dogs" / "1.txt").write_text("a blue dog")
    with pytest.raises(DataError, match="has other images or captions than"):
        prepare(spec_of())


def test_text_that_is_not_encoded_is_asked_for(spec_of: SpecOf, encoders: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no encoded text at .*; make it once with: ddpm-ds prepare --encode"):
        prepare(spec_of())
    made = prepare(spec_of(), How(encode_on=CPU))
    write_encoders(tmp_path / "others", WORDS, width=32, second=16, pooled=24, seed=1)
    others = spec_of({"encoders": str(tmp_path / "others")})
    with pytest.raises(DataError, match="there is no encoded text"):
        prepare(others)
    with pytest.raises(DataError, match="there is no encoded text"):
        prepare(spec_of({"layer": "last"}))
    anew = prepare(others, How(encode_on=CPU))
    assert anew.text is not None and made.text is not None and anew.text.path != made.text.path
    assert anew.path == made.path and anew.key != made.key
    shutil.copytree(tmp_path / "others", tmp_path / "copy")
    copied = prepare(spec_of({"encoders": str(tmp_path / "copy")}))
    assert copied.text is not None and copied.text.path == anew.text.path, "encoders are known by their content"


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda path: shutil.rmtree(path / "tokenizer"), "it has no folder tokenizer; name the folder"),
        (lambda path: shutil.rmtree(path / "text_encoder_2"), "it has no folder text_encoder_2; name the folder"),
        (lambda path: (path / "text_encoder" / "model.safetensors").unlink(), "has no weights in safetensors"),
        (lambda path: (path / "text_encoder" / "config.json").write_text("{"), "config.json can't be read"),
        (
            lambda path: (path / "text_encoder" / "config.json").write_text('{"architectures": ["T5EncoderModel"]}'),
            "is of another kind (architectures",
        ),
        (lambda path: (path / "text_encoder" / "model.safetensors").write_bytes(b"x"), "text_encoder is damaged"),
        (lambda path: (path / "tokenizer" / "vocab.json").write_text("{"), "tokenizer is damaged"),
    ],
)
def test_encoders_that_cannot_be_used_are_refused_in_a_line(
    spec_of: SpecOf, encoders: Path, tmp_path: Path, broken: Callable[[Path], Any], message: str
) -> None:
    shutil.copytree(encoders, tmp_path / "broken")
    broken(tmp_path / "broken")
    with pytest.raises(DataError) as error:
        prepare(spec_of({"encoders": str(tmp_path / "broken")}), How(encode_on=CPU))
    assert message in str(error.value) and "\n" not in str(error.value) and not (tmp_path / "stores").exists()


def test_encoders_of_another_width_than_the_unet_reads_are_refused(spec_of: SpecOf) -> None:
    def checked(**changes: Any) -> None:
        spec = tiny_spec()
        read = {"context_channels": 48, "tokens": 77, "pooled_channels": 24, "blocks": (0, 1), "heads": (1, 1)}
        unet = spec.unet.model_copy(update={"text": CrossAttentionSpec.model_validate(read | changes)})
        check_text(spec_of().text, unet.text)

    checked()
    checked(pooled_channels=None)
    for key, found in (("context_channels", 48), ("tokens", 77), ("pooled_channels", 24)):
        with pytest.raises(
            SpecError, match=rf"unet\.text\.{key} = 5, .* have {found}; --set unet\.text\.{key}={found}"
        ):
            checked(**{key: 5})


@pytest.mark.parametrize(
    ("caption", "changes", "kept", "others", "last"),
    [
        ("1girl ||| a, b, c ||| best", {"keep_separator": "|||"}, ["1girl"], ["a", "b", "c"], ["best"]),
        ("1girl, solo ||| a,b ,", {"keep_separator": "|||"}, ["1girl", "solo"], ["a", "b"], []),
        ("1girl, a, b", {"keep_separator": "|||", "keep": 1}, ["1girl"], ["a", "b"], []),
        ("a, b, c", {"keep": 1, "prefix": "style"}, ["style a"], ["b", "c"], []),
        ("a. b", {"separator": "."}, [], ["a", "b"], []),
        ("", {"prefix": "style"}, [], ["style"], []),
        ("", {}, [], [], []),
    ],
)
def test_tags_are_kept_as_sd_scripts_keeps_them(
    caption: str, changes: dict[str, Any], kept: list[str], others: list[str], last: list[str]
) -> None:
    spec = TagsSpec(**changes, drop=1.0)
    tags = captions.Tags.of(caption, spec)
    assert tags == (kept, others, last)
    between = f"{spec.separator} "
    assert tags.joined(spec) == between.join([*kept, *others, *last]), "held-out images have all"
    assert tags.joined(spec, [2**32 - 1] * 2 * len(others)) == between.join(kept + last) or not others


def test_tags_are_shuffled_and_dropped_by_two_draws_of_each() -> None:
    tags = captions.Tags.of("a, b, c, d", TagsSpec(keep=1))
    draws = [5, 0, 3, 2**31, 4, 2**31 - 1]
    assert tags.joined(TagsSpec(shuffle=True), draws) == "a, c, d, b"
    assert tags.joined(TagsSpec(drop=0.5), draws) == "a, c"
    assert tags.joined(TagsSpec(shuffle=True, drop=0.5), draws) == "a, c"


def test_tags_change_by_seed_and_index_alone_whoever_reads_them(
    spec_of: SpecOf, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any micro-batch of any replica; a run with all tags has the tokens that are stored as ids."""
    for number in range(6):
        (folder / "dogs" / f"{number}.txt").write_text("a, red, dog, green, cat"[: 8 + 3 * number])
    tags = {"keep": 1, "shuffle": True, "drop": 0.25}
    cache, known = prepare(spec_of({"stored": "text", "tags": tags})), dict[str, int]()

    def numbered(self: TextEncoders, texts: Sequence[str]) -> torch.Tensor:
        return (
            torch.tensor([known.setdefault(text, len(known)) for text in texts]).int()[:, None, None].expand(-1, 2, 77)
        )

    with monkeypatch.context() as changed:
        changed.setattr(TextEncoders, "ids", numbered)
        whole = batch_of(cache, size=48, fields={"text", "images"})
        assert whole.text is not None and whole.text.shape == (48, 2, 77) and whole.text.dtype == torch.int32
        texts = [[*known][number] for number in whole.text[:, 0, 0].tolist()]
        draws = Draws(0, whole.index, {Stream.TAGS: 8}).bits(Stream.TAGS).tolist()
        for at, text, drawn in zip(_positions(cache, whole), texts, draws, strict=True):
            spec, caption = TagsSpec.model_validate(tags), captioned(cache)[at][0]
            expected = captions.Tags.of(caption, spec).joined(spec, drawn)
            assert text == expected if at else text in ("a cat", "a green cat")
        assert len(set(texts)) > 16, "five captions of two to five tags, in other orders each time"
        for replica in (0, 1):
            given: dict[str, Any] = {"fields": {"text", "sizes"}, "seed": 0, "start_images": 24}
            part = next(loaded(cache, **given, micro_batch_images=6, replicas=2, replica=replica))
            mine = slice(24 + 6 * replica, 30 + 6 * replica)
            assert part.text is not None and torch.equal(part.text, whole.text[mine])
        first = cache.fields["text"].read(np.array([11]))
        assert [*known][first[0, 0, 0]] == "a, red, dog, green, cat", "held-out images have all tags, in order"
    ids, plain = prepare(spec_of({"stored": "ids"})), prepare(spec_of({"stored": "text"}))
    assert plain.path == ids.path == cache.path
    batch, expected_ids = (batch_of(each, fields={"text"}).text for each in (plain, ids))
    assert batch is not None and expected_ids is not None and torch.equal(batch, expected_ids)
    prefixed = captions.first_captions(cache, np.array([11]), TagsSpec(prefix="b"))
    assert prefixed == ("b a, red, dog, green, cat",)


def test_captions_that_training_tokenizes_need_no_cache_and_know_their_encoders(
    spec_of: SpecOf, encoders: Path, tmp_path: Path
) -> None:
    spec = spec_of({"stored": "text"})
    cache = prepare(spec)
    assert not [*cache.path.parent.glob("text-*")] and cache.empty_text is None
    digest = TextEncoders.open(spec.text, CPU).digest  # type: ignore[arg-type]
    assert cache.meta.sha256["text/encoders"] == digest, "a resumed run, and a drawing, need these"
    os.truncate(cache.path / "captions.jsonl", 5)
    with pytest.raises(DataError, match=r"captions\.jsonl can't be read"):
        batch_of(cache, fields={"text"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"stored": "ids", "tags": {"shuffle": True}}, "data.text.tags needs data.text.stored: text; give that, or"),
        ({"tags": {}}, "data.text.tags needs data.text.stored: text; give that, or use null"),
        ({"stored": "text", "tags": {"drop": 1.5}}, "data.text.tags.drop = 1.5 should be a number from 0 to 1"),
        ({"stored": "text", "tags": {"separator": ""}}, 'data.text.tags.separator = "" should be text of 1 to 20'),
    ],
)
def test_tags_that_cannot_be_are_refused_in_a_line(text: dict[str, Any], message: str) -> None:
    from ddpm_ds.config.spec_file import load_spec

    changes = [f"data.text.{key}={json.dumps(value)}" for key, value in text.items() if key != "tags"]
    changes += [f"data.text.tags.{key}={json.dumps(value)}" for key, value in text.get("tags", {}).items()]
    with pytest.raises(SpecError) as caught:
        load_spec("tiny_text", changes if text.get("tags") else [*changes, "data.text.tags.keep=1"])
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_images_without_a_caption_are_learned_with_the_empty_text_if_a_key_says_so(
    spec_of: SpecOf, folder: Path
) -> None:
    (folder / "dogs" / "2.txt").unlink()
    with pytest.raises(DataError, match=r"1 of 12 images of .* have no caption"):
        prepared_images(spec_of())
    cache = prepared_images(spec_of({"missing": "empty"}))
    assert captioned(cache)[7:10] == [["a red dog of many"], [""], ["a red dog of many of many of many"]]
    assert prepared_images(spec_of({"missing": "empty"})).meta == cache.meta, "and its source has not changed"
