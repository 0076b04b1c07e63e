"""Several folders are one data set; each comes in proportion to its images and repeats, with captions of its own."""

import json
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from make_text import write_encoders
from PIL import Image

from ddpm_ds.config.spec_file import load_spec
from ddpm_ds.data.cache import DatasetCache, Subset
from ddpm_ds.data.captions import texts_of
from ddpm_ds.data.held_out import prepare_all
from ddpm_ds.data.loader import MOST_TURNS, MicroBatch, Order, Share, micro_batches
from ddpm_ds.data.prepare import How, prepare
from ddpm_ds.data.spec import DataSpec
from ddpm_ds.diffusion.process import Diffusion
from ddpm_ds.diffusion.spec import DiffusionSpec
from ddpm_ds.ground.errors import DataError, SpecError
from tests.autoencoders import save_autoencoder

SpecOf = Callable[..., DataSpec]
CPU = torch.device("cpu")


@pytest.fixture
def spec_of(tmp_path: Path) -> SpecOf:
    """Specs of captioned pictures: 5 under cats, 2 of them in 3_odd, and 4 dogs; value 10 n + k is picture k of n."""
    write_encoders(tmp_path / "encoders", ("a", "cat", "dog"), width=16, tokens=8)
    names = ("cats/0", "cats/1", "cats/2", "cats/3_odd/0", "cats/3_odd/1", *(f"dogs/{k}" for k in range(4)))
    for number, name in enumerate(names):
        (path := tmp_path / f"{name}.png").parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), 10 * number, np.uint8)).save(path)
    for k in range(3):
        (tmp_path / "cats" / f"{k}.txt").write_text(f"a cat {k}")
    lines = [json.dumps({"file_name": f"{k}.png", "tags": f"a dog {k}"}) + "\n" for k in range(3)]
    (tmp_path / "dogs" / "metadata.jsonl").write_text("".join(lines))

    def make(cats: dict[str, Any] | None = None, dogs: dict[str, Any] | None = None, **changes: Any) -> DataSpec:
        dogs = {"captions": "tags", "caption": "a dog"} | (dogs or {})
        sources = [{"path": tmp_path / "cats", **(cats or {})}, {"path": tmp_path / "dogs", **dogs}]
        text = {"encoders": str(tmp_path / "encoders"), "stored": "text"}
        given = {"source": "folder", "sources": sources, "image_size": 8, "channels": 3, "text": text}
        return DataSpec.model_validate(given | {"store_root": tmp_path / "stores"} | changes)

    return make


def batches(spec: DataSpec, cache: DatasetCache, count: int, **changes: Any) -> list[MicroBatch]:
    given: dict[str, Any] = {"fields": {"images"}, "sources": spec.folders, "seed": 3} | changes
    share = Share(*changes.pop("share", (9,)))
    given.pop("share", None)
    return list(islice(micro_batches(Subset.of(cache), share, **given), count))


def seen(found: list[MicroBatch]) -> Counter[int]:
    """How often each picture came."""
    return Counter(torch.cat([batch.images[:, 0, 0, 0] for batch in found]).div(10).int().tolist())


def test_folders_are_one_data_set_with_captions_and_repeats_of_their_own(
    spec_of: SpecOf, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = prepare(spec_of(), How(progress=True))
    texts = texts_of(cache)
    assert [texts[row[0]] for row in cache.others["captions"][:]] == [
        *("a cat 0", "a cat 1", "a cat 2", "odd", "odd"),
        *("a dog 0", "a dog 1", "a dog 2", "a dog"),
    ]
    assert cache.others["source"][:].tolist() == [[0, 0]] * 3 + [[0, 3]] * 2 + [[1, 0]] * 4
    assert cache.meta.classes == ("3_odd",) and cache.labels.tolist() == [1, 1, 1, 0, 0, 1, 1, 1, 1]
    assert "data.sources.0.path: 3_odd is read as 3 repeats" in capsys.readouterr().err
    fewer = prepare(spec_of({"repeats": 2, "caption": "a cat"}))
    assert fewer.others["source"][:].tolist() == [[0, 0]] * 5 + [[1, 0]] * 4, "what the spec says counts"
    assert texts_of(fewer)[fewer.others["captions"][3][0]] == "a cat" and fewer.path != cache.path
    assert prepare(spec_of()).meta == cache.meta, "nothing has changed"


def test_images_come_in_proportion_to_their_repeats(spec_of: SpecOf) -> None:
    """3 cats once, 2 odd ones 3 times, 4 dogs 1.5 times: 15 images a round; a folder alone has the same numbers."""
    spec = spec_of(dogs={"repeats": 1.5})
    cache = prepare(spec)
    counts = seen(batches(spec, cache, 20, share=(15,)))
    assert [counts[k] for k in range(5)] == [20, 20, 20, 60, 60] and [counts[k] for k in range(5, 9)] == [30] * 4
    alone = spec.model_copy(update={"sources": (), "path": spec.sources[0].path})
    counts = seen(batches(alone, prepare(alone), 10, share=(9,)))
    assert [counts[k] for k in range(5)] == [10, 10, 10, 30, 30]


def test_the_order_is_the_same_for_all_replicas_and_from_any_image_on(spec_of: SpecOf) -> None:
    spec = spec_of(dogs={"repeats": 0.3, "loss_weight": 0.5})
    cache = prepare(spec)
    whole = batches(spec, cache, 10, share=(8,))
    for replica in (0, 1):
        parts = batches(spec, cache, 8, share=(4, 2, replica), start_images=16)
        for number, part in enumerate(parts):
            mine = slice(4 * replica, 4 * replica + 4)
            assert torch.equal(part.images, whole[2 + number].images[mine])
            assert part.weight is not None and torch.equal(part.weight, whole[2 + number].weight[mine])  # type: ignore[index]


def test_each_image_has_the_loss_weight_of_its_source(spec_of: SpecOf) -> None:
    spec = spec_of(dogs={"loss_weight": 0.25})
    cache = prepare(spec)
    (batch,) = batches(spec, cache, 1, share=(30,))
    dogs = batch.images[:, 0, 0, 0] >= 50
    assert batch.weight is not None and batch.weight.dtype == torch.float32 and dogs.any() and not dogs.all()
    assert torch.equal(batch.weight, torch.where(dogs, 0.25, 1.0))
    assert batches(spec_of(), cache, 1)[0].weight is None, "all are 1"
    diffusion, t = Diffusion(DiffusionSpec(), 0, "cpu"), torch.zeros(3, dtype=torch.int64)
    x0, eps = torch.zeros(3, 1, 1, 1), torch.zeros(3, 1, 1, 1)
    prediction = torch.tensor([1.0, 2.0, 3.0])[:, None, None, None]
    loss = diffusion.loss(prediction, x0, eps, t, weight=torch.tensor([1.0, 0.25, 0.0]))
    assert loss.item() == pytest.approx((1 + 0.25 * 4) / 3, rel=1e-6)


parts_of_one = st.lists(
    st.tuples(st.integers(1, 40), st.sampled_from([0.01, 0.3, 1.0, 2.0, 7.5, 100.0]).map(Fraction)),
    min_size=1,
    max_size=4,
).map(tuple)


@settings(deadline=None, max_examples=60)
@given(parts=parts_of_one, seed=st.integers(0, 2**31 - 1), rounds=st.integers(1, 5))
def test_parts_have_their_shares_and_each_image_its_epochs(parts: Any, seed: int, rounds: int) -> None:
    """After R rounds of W images a part has floor(R weight) of them, and its images came equally often, by one."""
    counts = (sum(count for count, _ in parts),)
    total = sum(count * repeats for count, repeats in parts)
    scale = min(Fraction(1), MOST_TURNS / total)
    turns = [int(rounds * count * repeats * scale // 1) for count, repeats in parts]
    order = Order(counts, seed, 0, (parts,))
    bucket, images = order.images_at(np.arange(max(1, sum(turns))))
    assert bucket == 0 and images.dtype == np.int64
    start = 0
    often = np.bincount(images, minlength=counts[0])
    for (count, _), expected in zip(parts, turns, strict=True):
        own = often[start : start + count]
        assert own.sum() == expected or not any(turns)
        assert own.max() - own.min() <= 1
        start += count
    middle = len(images) // 2
    assert np.array_equal(order.images_at(np.arange(middle, len(images)))[1], images[middle:])
    if len(parts) == 1:
        assert np.array_equal(Order(counts, seed).images_at(np.arange(len(images)))[1], images), "one part is as none"


def test_buckets_of_aspect_take_turns_by_repeats() -> None:
    """A group has one bucket; buckets of 20 and 30 images, of which 10 come twice, share images as 20 to 40."""
    order = Order((20, 30), 5, 4, (((20, Fraction(1)),), ((20, Fraction(1)), (10, Fraction(2)))))
    often = [np.zeros(20, np.int64), np.zeros(30, np.int64)]
    for first in range(0, 6000, 4):
        bucket, images = order.images_at(np.arange(first, first + 4))
        assert order.bucket_at(first + 3) == bucket
        np.add.at(often[bucket], images, 1)
    assert often[0].tolist() == [100] * 20
    assert often[1].sum() == 4000 and abs(often[1][:20] - 100).max() <= 1 and abs(often[1][20:] - 200).max() <= 1


def test_latents_and_held_out_folders_know_the_sources(spec_of: SpecOf, tmp_path: Path) -> None:
    save_autoencoder(tmp_path / "autoencoder")
    spec = spec_of(autoencoder=tmp_path / "autoencoder", image_size=4, channels=4)
    pixels, latents = prepare(spec_of()), prepare(spec, How(encode_on=CPU))
    assert np.array_equal(latents.others["source"][:], pixels.others["source"][:]) and latents.meta.facts is None
    (tmp_path / "val").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "val" / "0.png")
    (tmp_path / "val" / "0.txt").write_text("a dog")
    trained, other = prepare_all(spec_of(held_out_path=tmp_path / "val"), How())
    assert (len(trained), len(other)) == (9, 1)
    with pytest.raises(DataError, match=r"data\.held_out_path = \S+/dogs and data\.sources = 2 folders overlap, so"):
        prepare_all(spec_of(held_out_path=tmp_path / "dogs"), How())


def test_changed_missing_and_overlapping_folders_are_refused_in_a_line(spec_of: SpecOf, tmp_path: Path) -> None:
    prepare(spec_of())
    (tmp_path / "dogs" / "9.png").write_bytes((tmp_path / "dogs" / "0.png").read_bytes())
    with pytest.raises(DataError, match=r"data\.sources = 2 folders has other images or captions than"):
        prepare(spec_of())
    with pytest.raises(DataError, match=r"data\.sources\.1\.path = \S+/none does not exist; give a folder of images$"):
        prepare(spec_of(dogs={"path": tmp_path / "none"}))
    with pytest.raises(
        DataError, match=r"data\.sources\.1\.path = \S+3_odd and data\.sources\.0\.path = \S+cats overlap, so images"
    ):
        prepare(spec_of(dogs={"path": tmp_path / "cats" / "3_odd"}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("sources=[{path: a}, {path: b, repeats: -1}]", "data.sources.1.repeats = -1 should be a number > 0 and <= 10"),
        ("sources=[{path: a, repeat: 2}]", "data.sources.0.repeat is unknown; did you mean data.sources.0.repeats?"),
        ("sources=[{repeats: 2}]", "data.sources.0.path is missing; it takes a path"),
        ("sources=[3]", "data.sources.0 = 3 should be a section with path, repeats, loss_weight, captions, caption"),
        ("sources=3", "data.sources = 3 should be a list"),
        ("sources=[{path: a, loss_weight: x}]", 'data.sources.0.loss_weight = "x" should be a number from 0 to'),
        ("path=c", "data.sources = "),
        ("source=digits", "data.sources = "),
    ],
)
def test_wrong_sources_are_named_by_number_and_key(change: str, message: str) -> None:
    valid = ["data.sources=[{path: a}]"] if change.startswith(("path", "source=")) else []
    with pytest.raises(SpecError) as caught:
        load_spec("tiny_text", ["data.path=null", *valid, f"data.{change}"])
    (line,) = [line for line in str(caught.value).splitlines() if message in line] or [str(caught.value)]
    assert message in line
