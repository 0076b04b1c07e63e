"""Buckets of aspect: their sizes, the bucket of an image, their caches, and the order of training."""

import io
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from make_text import write_encoders
from PIL import ExifTags, Image, ImageFile

from ddpm_ds.data.buckets import (
    AREAS,
    bucket_sizes,
    cropped,
    filled_buckets,
    kept_sizes,
    numbers_of,
    own_sizes,
    shares_of,
    sizes_of,
)
from ddpm_ds.data.cache import Subset
from ddpm_ds.data.captions import texts_of
from ddpm_ds.data.decoding import upright_size
from ddpm_ds.data.held_out import parts, prepare_all
from ddpm_ds.data.latents import check_steps, pixels_learned
from ddpm_ds.data.loader import Order
from ddpm_ds.data.prepare import How, Recipes, class_names, images_of, prepare
from ddpm_ds.data.spec import BucketsSpec, DataSpec
from ddpm_ds.evaluate import inputs
from ddpm_ds.ground.errors import DataError
from tests.autoencoders import save_autoencoder
from tests.data.reading import loaded

SpecOf = Callable[..., DataSpec]
ORDER = Order(counts=(37, 100, 16), seed=3, group=8)


@pytest.mark.parametrize("kind", ["nearest", "sdxl"])
@pytest.mark.parametrize(("size", "step"), [((1024, 1024), 64), ((512, 512), 64), ((768, 512), 8), ((8, 8), 8)])
def test_sizes_have_about_the_pixels_that_were_asked_for_and_can_be_turned(
    size: tuple[int, int], step: int, kind: Literal["nearest", "sdxl"]
) -> None:
    sizes = bucket_sizes(size, BucketsSpec(step=step, sizes=kind))
    assert size in sizes and len({*sizes}) == len(sizes)
    assert {(width, height) for height, width in sizes} == {*sizes}
    assert [height / width for height, width in sizes] == sorted((h / w for h, w in sizes), reverse=True)
    for height, width in sizes:
        assert height % step == width % step == 0
        assert max(height, width) <= 2 * min(height, width)
        share = height * width / (size[0] * size[1])
        assert 1 - AREAS <= share <= 1 + AREAS if kind == "nearest" else 0.9 <= share <= 1


def test_sizes_of_sdxl_are_the_published_ones() -> None:
    """Heights of the upright sizes by width, as in the table of its paper, and all of them turned."""
    sizes = bucket_sizes((1024, 1024), BucketsSpec(sizes="sdxl", widest=4))
    upright = {512: (1856, 1920, 1984, 2048), 576: (1664, 1728, 1792), 640: (1536, 1600), 704: (1344, 1408, 1472)}
    upright |= {768: (1280, 1344), 832: (1152, 1216), 896: (1088, 1152), 960: (1024, 1088)}
    published = [(height, width) for width, heights in upright.items() for height in heights]
    assert [*sizes[:20]] == sorted(published, key=lambda size: -size[0] / size[1])
    assert len(sizes) == 41 and len(bucket_sizes((1024, 1024), BucketsSpec(sizes="sdxl"))) == 21
    assert {(832, 1216), (1216, 832)} <= {*bucket_sizes((1024, 1024), BucketsSpec())}


def test_sizes_of_sd_scripts_are_its_own() -> None:
    """For each width the largest height below the area; images go where they are cropped least."""
    spec = BucketsSpec(sizes="sd_scripts")
    sizes = bucket_sizes((1024, 1024), spec)
    assert len(sizes) == 41 and (256, 2048) in sizes and (704, 1408) in sizes and (1280, 832) not in sizes
    for most, count in ((1024, 25), (2048, 41), (4096, 97)):
        assert len(bucket_sizes((1024, 1024), spec.model_copy(update={"minimum": 256, "maximum": most}))) == count
    shapes = np.array([(1500, 1000), (1000, 2000)], np.int32)
    assert [sizes[number] for number in numbers_of(shapes, sizes)] == [(1216, 832), (704, 1408)]
    ours = bucket_sizes((1024, 1024), BucketsSpec())
    assert [ours[number] for number in numbers_of(shapes, ours)] == [(1280, 832), (768, 1408)]
    assert cropped(shapes[1:], [(704, 1408), (768, 1344)]).tolist() == [[0.0, 0.125]]
    assert sizes_of(DataSpec(source="folder", image_size=1024, channels=3, buckets=spec), 1)[0] == (1024, 1024)


def test_small_images_keep_their_size_in_buckets_of_their_own(spec_of: SpecOf) -> None:
    """Cut to steps, as in sd-scripts; images of a rare size go to the bucket that keeps most, and enlarges none."""
    spec = BucketsSpec(sizes="sd_scripts", no_upscale=True)
    standard = bucket_sizes((1024, 1024), spec)
    shapes = np.array([(600, 800), (600, 800), (2000, 3000), (590, 700), (100, 90), (0, 0)], np.int32)
    own = own_sizes(shapes, (1024, 1024), spec, 2)
    assert own == [(576, 768)] and own_sizes(shapes, (1024, 1024), spec, 1) == [(64, 64), (576, 640), (576, 768)]
    assert own_sizes(shapes, (1024, 1024), spec.model_copy(update={"minimum": 128}), 1) == [(576, 640), (576, 768)]
    sizes = (*standard, *own, (512, 512))
    found = [sizes[number] for number in numbers_of(shapes, sizes, True)]
    assert found[:4] == [(576, 768), (576, 768), (832, 1216), (512, 512)], "1248 x 832 in sd-scripts before it is cut"
    larger = spec_of(image_size=64, buckets={"step": 8, "no_upscale": True})
    store = prepare(larger, group=4)
    assert {each.images.shape[2:] for each in store.caches} == {(48, 48), (64, 48), (48, 64)}
    enlarged = prepare(spec_of(image_size=64), group=4)
    assert {each.images.shape[2:] for each in enlarged.caches} == {(64, 64), (72, 56), (56, 72)}
    other = prepare_all(
        spec_of(image_size=64, buckets={"step": 8, "no_upscale": True}, held_out_images=8), How(), group=4
    )
    assert sum(other[0].counts) == 40


def test_sides_have_bounds_and_the_asked_size_is_within_them(spec_of: SpecOf) -> None:
    sizes = bucket_sizes((1024, 1024), BucketsSpec(minimum=832, maximum=1216))
    assert {side for size in sizes for side in size} == {832, 896, 960, 1024, 1088, 1152, 1216}
    spec = spec_of(buckets={"step": 8, "minimum": 64})
    with pytest.raises(
        DataError, match=r"data\.buckets has no 48 pixels, .* minimum = 64, maximum = None; change these"
    ):
        prepare(spec)


def test_each_image_comes_once_in_each_pass_of_its_bucket() -> None:
    seen: dict[int, list[int]] = {bucket: [] for bucket in range(len(ORDER.counts))}
    for group in range(400):
        bucket, positions = ORDER.images_at(np.arange(8 * group, 8 * group + 8))
        seen[bucket] += positions.tolist()
    for bucket, count in enumerate(ORDER.counts):
        passes = [seen[bucket][first : first + count] for first in range(0, len(seen[bucket]), count)]
        assert all(sorted(one) == list(range(count)) for one in passes if len(one) == count)
        share, groups = count / sum(ORDER.counts), len(seen[bucket]) / 8
        assert abs(groups - 400 * share) <= 1 + count / 8, "a bucket is seen as often as it has images"


SHAPES = ((48, 48), (70, 50), (50, 70), (50, 48))
"""Heights and widths of pictures; all but the second and third are in the first bucket."""
SIZES = ((48, 48), (56, 40), (40, 56))


@pytest.fixture
def spec_of(tmp_path: Path) -> SpecOf:
    """Specs of 40 pictures of four shapes, each of one value, its number."""
    (tmp_path / "pictures").mkdir()
    for number in range(40):
        pixels = np.full((*SHAPES[number % 4], 3), number, np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{number:02}.png")

    def make(**changes: Any) -> DataSpec:
        given = {"source": "folder", "path": tmp_path / "pictures", "image_size": 48, "channels": 3}
        given |= {"store_root": tmp_path / "stores", "buckets": {"step": 8}}
        return DataSpec.model_validate(given | changes)

    return make


def values_of(images: torch.Tensor) -> list[int]:
    """The numbers of pictures (n, 3, H, W) of one value each."""
    assert (images == images[:, :1, :1, :1]).all()
    found: list[int] = images[:, 0, 0, 0].tolist()
    return found


def test_each_bucket_has_a_cache_of_its_images_and_its_size(
    spec_of: SpecOf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = prepare(spec_of(), How(progress=True))
    caches = (store, *store.buckets)
    assert [cache.images.shape[2:] for cache in caches] == [*SIZES]
    assert store.counts == (20, 10, 10)
    numbers = [values_of(torch.from_numpy(cache.images[:])) for cache in caches]
    assert numbers[0] == [number for number in range(40) if number % 4 in (0, 3)]
    assert numbers[1:] == [[*range(1, 40, 4)], [*range(2, 40, 4)]]
    assert store.with_others(None, store.buckets[:1]).key != store.key
    assert images_of(Recipes(spec_of()).all()[0], How()).path == store.path
    assert any(name.startswith("bucket/56x40/") for name in store.meta.sha256)
    shutil.rmtree(tmp_path / "pictures")
    assert prepare(spec_of(), learned=store.meta.sha256).meta == store.meta, "the source may be gone"
    assert class_names(spec_of(), 8, len(store.meta.classes)) == store.meta.classes


def test_too_many_sizes_are_refused(spec_of: SpecOf) -> None:
    with pytest.raises(DataError, match=r"data\.buckets\.step = 8 makes [0-9,]+ buckets, above 512; use a larger one"):
        sizes_of(spec_of(image_size=1024, buckets={"step": 8, "sizes": "sdxl"}), 1)


def test_other_buckets_have_other_caches(spec_of: SpecOf) -> None:
    paths = [prepare(spec_of(buckets={"step": 8, "widest": widest})).path for widest in (2.0, 1.2)]
    assert prepare(spec_of(buckets={"step": 8, "widest": 2.5})).counts == (20, 10, 10), "others have no images"
    alone = Recipes(spec_of(buckets=None)).of().path
    assert len({*paths, alone}) == 3, "who is in a bucket depends on all buckets"
    assert {len(prepare(spec_of(buckets={"step": 8, "widest": 1.2}))), len(prepare(spec_of()))} == {40, 20}


@pytest.mark.parametrize(("kind", "turned"), [("png", True), ("png", False), ("jpeg", True), ("webp", True)])
def test_the_size_of_an_image_is_that_of_its_header_and_nothing_is_decoded(
    kind: str, turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    exif, content = Image.Exif(), io.BytesIO()
    exif[ExifTags.Base.Orientation] = 8
    Image.fromarray(np.zeros((30, 20, 3), np.uint8)).save(content, kind, **({"exif": exif} if turned else {}))
    decoded = list[object]()
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: decoded.append(image))
    assert upright_size(content.getvalue()) == ((20, 30) if turned else (30, 20))
    assert upright_size(np.zeros((30, 20), np.uint8)) == (30, 20)
    assert not decoded


def test_images_that_are_turned_or_broken_are_in_a_bucket_too(spec_of: SpecOf, tmp_path: Path) -> None:
    sideways = Image.Exif()
    sideways[ExifTags.Base.Orientation] = 6
    Image.fromarray(np.full((70, 50, 3), 99, np.uint8)).save(tmp_path / "pictures" / "turned.png", exif=sideways)
    (tmp_path / "pictures" / "broken.png").write_bytes(b"no picture")
    store = prepare(spec_of(max_bad_fraction=0.1))
    assert store.counts == (20, 10, 11) and 99 in values_of(torch.from_numpy(store.buckets[1].images[:]))
    assert store.meta.skipped == 1


def test_latents_text_and_sizes_agree_with_the_pixels_of_each_bucket(spec_of: SpecOf, tmp_path: Path) -> None:
    write_encoders(tmp_path / "encoders", ("a", "cat"), width=32, second=16, pooled=24)
    save_autoencoder(tmp_path / "autoencoder")
    for number in range(40):
        (tmp_path / "pictures" / f"{number:02}.txt").write_text("a" if number % 2 else "a cat")
    latent = {"autoencoder": tmp_path / "autoencoder", "image_size": 24, "channels": 4}
    spec = spec_of(**latent, text={"encoders": str(tmp_path / "encoders"), "layer": "penultimate"})
    store = prepare(spec, How(encode_on=torch.device("cpu")))
    assert prepare(spec).meta == store.meta
    pixels = Recipes(spec).all()[0].base
    assert pixels is not None
    assert images_of(pixels, How(), pixels_learned(store.meta.sha256)).counts == (20,)
    originals = [{(48, 48), (50, 48)}, {(70, 50)}, {(50, 70)}]
    for cache, (height, width), shapes in zip((store, *store.buckets), SIZES, originals, strict=True):
        assert cache.meta.kind == "latents" and cache.images.shape[1:] == (4, height // 2, width // 2)
        sizes = cache.others["sizes"][:]
        assert {tuple(row) for row in sizes[:, :2].tolist()} == shapes
        assert (sizes[:, 4:] == (height, width)).all()
        assert cache.text is not None and store.text is not None and cache.text.path == store.text.path
        assert cache.text is store.text, "text that all buckets share is opened, and compared with its checksums, once"
    for cache, caption in zip(store.buckets, ("a", "a cat"), strict=True):  # of odd numbers, and of even ones
        texts = texts_of(cache)
        assert {texts[number] for number in cache.others["captions"][:][:, 0].tolist()} == {caption}
    of_others = Subset(store, np.array([store.counts[0], sum(store.counts[:2])]))
    with patch.object(inputs, "held_out_images", lambda *_: of_others):
        assert inputs.held_out_captions(Mock(text=None)) == ["a", "a cat"]
    for batch in islice(loaded(store, 4, group=4, fields={"images", "text", "pooled", "sizes"}), 10):
        assert batch.sizes is not None and batch.text is not None
        assert (batch.sizes[:, 4:] == torch.tensor(batch.images.shape[2:]) * 2).all()
    uneven = spec.model_copy(update={"buckets": BucketsSpec(step=24)})
    with pytest.raises(DataError, match=r"data\.buckets\.step = 24 should be a multiple of 16 pixels"):
        check_steps(uneven, levels=4)
    with pytest.raises(DataError, match=r"data\.buckets\.step = 32 .* latent's 2 pixels, .* use 48 or a divisor"):
        prepare(spec.model_copy(update={"buckets": BucketsSpec(step=32)}))


def test_images_of_small_buckets_are_in_the_next_best_ones(
    spec_of: SpecOf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Portraits and landscapes are ten each: with twelve images in a group none of them has a bucket of its own."""
    store = prepare(spec_of(), group=10)
    assert store.counts == (20, 10, 10)
    for number in range(10):
        Image.fromarray(np.full((50, 72, 3), 60 + number, np.uint8)).save(tmp_path / "pictures" / f"{60 + number}.png")
    shutil.rmtree(tmp_path / "stores")
    wide = prepare(spec_of(), group=10)
    assert wide.counts == (20, 10, 20)
    capsys.readouterr()
    merged = prepare(spec_of(), How(progress=True), group=12)
    line = "fewer images than the 12 that share a bucket are in [56,40] (10); these 10 of 50 images"
    assert line in capsys.readouterr().err
    assert [cache.size for cache in merged.caches] == [(48, 48), (40, 56)] and merged.counts == (30, 20)
    assert {*range(1, 40, 4)} <= {*values_of(torch.from_numpy(merged.images[:]))}
    assert merged.path != wide.path, "it has more images than the bucket of that size had"
    assert merged.buckets[0].path == wide.buckets[1].path, "and this one has the same as before"
    assert prepare(spec_of(), group=31).counts == (50,), "all images are in one"
    with pytest.raises(DataError, match=r"there are 50 images, fewer than the 51 .* at most 50"):
        prepare(spec_of(), group=51)


def test_the_smallest_bucket_is_left_out_first() -> None:
    """So that few images are cropped more: with the three of the portraits the squares are seven."""
    shapes = np.array([(48, 48)] * 4 + [(56, 40)] * 3 + [(40, 56)] * 10, np.int32)
    assert kept_sizes(SIZES, shapes, 5, 0) == ((48, 48), (40, 56))
    assert kept_sizes(SIZES, shapes, 3, 0) == kept_sizes(SIZES, shapes[::-1], 3, 0) == SIZES


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 99), st.integers(1, 99)), min_size=4, max_size=60),
    st.integers(1, 30),
    st.integers(0, 10),
)
def test_every_bucket_has_enough_to_train_on(shapes: list[tuple[int, int]], group: int, held_out: int) -> None:
    given_shapes = np.array(shapes, np.int32)
    sizes = bucket_sizes((48, 48), BucketsSpec(step=8))
    if len(shapes) - held_out < group:
        with pytest.raises(DataError, match="share a bucket"):
            kept_sizes(sizes, given_shapes, group, held_out)
        return
    kept = kept_sizes(sizes, given_shapes, group, held_out)
    found = filled_buckets(sizes, kept, given_shapes)
    members = [bucket.members_of(given_shapes) for bucket in found]
    assert sorted(np.concatenate(members).tolist()) == [*range(len(shapes))], "each image is in one"
    counts = np.bincount(numbers_of(given_shapes, kept), minlength=len(kept)).tolist()
    shares = shares_of(counts, held_out)
    assert sum(shares) == held_out
    assert all(not count or count - share >= group for count, share in zip(counts, shares, strict=True))
    lost = cropped(given_shapes, [bucket.pixels for bucket in found])
    for number, own in enumerate(members):
        assert (lost[own, number] <= lost[own].min(axis=1)).all(), "each is in the one that crops it least"


def test_held_out_images_are_a_share_of_each_bucket_and_never_trained_on(spec_of: SpecOf) -> None:
    data = spec_of(held_out_images=9)
    trained, held_out = parts(data, *prepare_all(data, How(), group=7))
    store = trained.cache
    assert held_out.cache is store and store.counts == (20, 10, 10)
    of_buckets = store.by_bucket(held_out.positions)
    assert [len(at) for at in of_buckets] == [4, 2, 3]
    found = [cache.images.read(at) for cache, at in zip(store.caches, of_buckets, strict=True)]
    kept = {value for images in found for value in values_of(torch.from_numpy(images))}
    batches = loaded(store, among=trained.positions, group=4, micro_batch_images=4)
    seen = [value for _ in range(40) for value in values_of(next(batches).images)]
    assert {*seen} == {*range(40)} - kept and len(kept) == 9
    other = parts(spec_of(held_out_images=9, held_out="last"), store, store)[1]
    assert other.positions.tolist() == [*range(16, 20), 28, 29, *range(37, 40)], "the last of each"
    assert prepare(data, group=8).counts == (40,), "those to train on count: seven of ten in a bucket"


def test_held_out_images_of_their_own_source_are_in_the_buckets_that_are_trained(
    spec_of: SpecOf, tmp_path: Path
) -> None:
    """With a group of eleven, portraits have no bucket; a source without squares has another first bucket."""
    for number, shape in enumerate([(70, 50), (50, 70), (50, 70)]):
        (tmp_path / "val").mkdir(exist_ok=True)
        Image.fromarray(np.full((*shape, 3), 200 + number, np.uint8)).save(tmp_path / "val" / f"{number}.png")
    Image.fromarray(np.full((50, 70, 3), 77, np.uint8)).save(tmp_path / "pictures" / "77.png")
    data = spec_of(held_out_path=tmp_path / "val")
    trained, held_out = parts(data, *prepare_all(data, How(), group=11))
    assert [cache.size for cache in trained.cache.caches] == [(48, 48), (40, 56)]
    assert len(trained.positions) == 41 and len(held_out.positions) == 3
    assert [(cache.size, len(cache)) for cache in held_out.cache.caches] == [((48, 48), 1), ((40, 56), 2)]
    (tmp_path / "val" / "0.png").unlink()
    shutil.rmtree(tmp_path / "stores")
    store, other = prepare_all(data, How(), group=11)
    assert [cache.size for cache in other.caches] == [(40, 56)] and store.size == (48, 48)


def test_the_shares_of_buckets_are_those_of_counted_images_or_equal(spec_of: SpecOf) -> None:
    data = spec_of()
    recipes = Recipes(data)
    equal = recipes.shares(12, counted=True)
    assert equal[0] == ((48, 48), pytest.approx(1 / len(equal))) and len({share for _, share in equal}) == 1
    prepare(data, group=10)
    assert recipes.shares(12, counted=False) == equal
    assert dict(recipes.shares(12, counted=True)) == {(48, 48): 1.0}, "twelve in a group: all are in one"
    assert dict(recipes.shares(10, counted=True)) == {(48, 48): 0.5, (56, 40): 0.25, (40, 56): 0.25}


def test_images_that_change_are_refused_and_prepared_again(spec_of: SpecOf, tmp_path: Path) -> None:
    store = prepare(spec_of())
    Image.fromarray(np.full((70, 50, 3), 77, np.uint8)).save(tmp_path / "pictures" / "77.png")
    with pytest.raises(DataError, match="other images") as caught:
        prepare(spec_of())
    assert str(caught.value).isprintable()
    assert prepare(spec_of(), learned=store.meta.sha256).meta == store.meta, "a run that has begun goes on"
    for cache in (store, *store.buckets):
        shutil.rmtree(cache.path)
    assert prepare(spec_of()).counts == (20, 11, 10)


def test_micro_batches_of_all_replicas_have_one_size_and_go_on_after_a_stop(spec_of: SpecOf) -> None:
    store = prepare(spec_of())
    asked: dict[str, Any] = {"seed": 5, "group": 8, "micro_batch_images": 2, "replicas": 2}
    order = Order(store.counts, seed=5, group=8)
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    streams = [loaded(store, replica=replica, **asked) for replica in range(2)]
    for turn in range(20):
        batches = [next(stream) for stream in streams]
        bucket = order.bucket_at(4 * turn)
        assert {tuple(batch.images.shape[2:]) for batch in batches} == {SIZES[bucket]}
        for replica, batch in enumerate(batches):
            assert batch.index.tolist() == [4 * turn + 2 * replica, 4 * turn + 2 * replica + 1]
            seen[bucket] += values_of(batch.images)
    assert all(len({*found}) == min(len(found), store.counts[bucket]) for bucket, found in seen.items()), "an epoch"
    resumed, whole = (loaded(store, replica=1, start_images=first, **asked) for first in (24, 0))
    for found, expected in zip(islice(resumed, 8), islice(whole, 6, 14), strict=True):
        assert torch.equal(found.index, expected.index) and torch.equal(found.images, expected.images)
