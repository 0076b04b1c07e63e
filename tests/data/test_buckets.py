"""Buckets of aspect: their sizes, the bucket of an image, their caches, and the order of training."""

from __future__ import annotations

import io
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make_text import write_encoders
from PIL import ExifTags, Image, ImageFile

from ddpm_ds.config.spec import DataSpec
from ddpm_ds.config.text import BucketsSpec
from ddpm_ds.data.buckets import AREAS, bucket_of, bucket_sizes, check_steps, cropped
from ddpm_ds.data.captions import texts_of
from ddpm_ds.data.decoding import upright_size
from ddpm_ds.data.latents import pixels_learned, pixels_of
from ddpm_ds.data.loader import micro_batches
from ddpm_ds.data.order import BucketOrder
from ddpm_ds.data.prepare import cache_path, class_names, prepare, prepare_images
from ddpm_ds.errors import DataError
from tests.autoencoders import save_autoencoder
from tests.launching import tiny_spec

PLAIN: dict[str, Any] = {"dropout": 0.0, "attention_resolutions": [], "classes": 1}
ORDER = BucketOrder(counts=(37, 100, 16), seed=3, group=8)


@pytest.mark.parametrize(("size", "step"), [((1024, 1024), 64), ((512, 512), 64), ((768, 512), 8)])
def test_sizes_have_about_the_pixels_that_were_asked_for(size: tuple[int, int], step: int) -> None:
    sizes = bucket_sizes(size, step, 2.0)
    assert size in sizes
    for height, width in sizes:
        assert height % step == width % step == 0
        assert max(height, width) <= 2 * min(height, width)
        assert abs(height * width / (size[0] * size[1]) - 1) <= AREAS
    assert len({height for height, _ in sizes}) == len(sizes)


def test_an_image_is_in_the_bucket_that_crops_it_least() -> None:
    sizes = bucket_sizes((1024, 1024), 64, 2.0)
    for image in ((600, 800), (800, 600), (333, 999), (5, 5)):
        lost = [cropped(image, size) for size in sizes]
        assert lost[bucket_of(image, sizes)] == min(lost)
    assert cropped((600, 800), (300, 400)) == 0.0
    assert cropped((100, 100), (100, 50)) == cropped((100, 100), (50, 100)) == 0.5


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


def test_the_order_is_a_function_of_the_image_index() -> None:
    whole = [ORDER.images_at(np.arange(8 * group, 8 * group + 8)) for group in range(60)]
    for group in reversed(range(60)):
        bucket, positions = ORDER.images_at(np.arange(8 * group + 4, 8 * group + 8))
        assert bucket == whole[group][0] == ORDER.bucket_at(8 * group + 7)
        assert positions.tolist() == whole[group][1][4:].tolist()
    other = BucketOrder(ORDER.counts, seed=4, group=8)
    assert [other.bucket_at(8 * group) for group in range(60)] != [bucket for bucket, _ in whole]


SHAPES = ((48, 48), (70, 50), (50, 70), (50, 48))
"""Heights and widths of pictures; all but the second and third are in the first bucket."""
SIZES = ((48, 48), (56, 40), (40, 56))


@pytest.fixture
def spec_of(tmp_path: Path) -> Callable[..., DataSpec]:
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
    spec_of: Callable[..., DataSpec], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = prepare(spec_of(), progress=True)
    caches = (store, *store.buckets)
    assert [cache.images.shape[2:] for cache in caches] == [*SIZES]
    assert store.counts == (20, 10, 10)
    numbers = [values_of(torch.from_numpy(cache.images[:])) for cache in caches]
    assert numbers[0] == [number for number in range(40) if number % 4 in (0, 3)]
    assert numbers[1:] == [[*range(1, 40, 4)], [*range(2, 40, 4)]]
    again = pickle.loads(pickle.dumps(store))
    assert again.meta == store.meta and again.key == store.key and again.counts == store.counts
    assert store.with_buckets(store.buckets[:1]).key != store.key
    assert prepare_images(spec_of()).path == store.path, "alone it is the first bucket"
    assert any(name.startswith("bucket/56x40/") for name in store.meta.sha256)
    shutil.rmtree(tmp_path / "pictures")
    assert prepare(spec_of(), learned=store.meta.sha256).meta == store.meta, "the source may be gone"
    assert (
        class_names(tiny_spec(data=spec_of().model_dump() | {"horizontal_flips": False}, unet=PLAIN))
        == store.meta.classes
    )


def test_other_buckets_have_other_caches(spec_of: Callable[..., DataSpec]) -> None:
    paths = [prepare(spec_of(buckets={"step": 8, "widest": widest})).path for widest in (2.0, 1.2)]
    assert prepare(spec_of(buckets={"step": 8, "widest": 2.5})).counts == (20, 10, 10), "others have no images"
    alone = cache_path(spec_of(buckets=None))
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


def test_images_that_are_turned_or_broken_are_in_a_bucket_too(spec_of: Callable[..., DataSpec], tmp_path: Path) -> None:
    sideways = Image.Exif()
    sideways[ExifTags.Base.Orientation] = 6
    Image.fromarray(np.full((70, 50, 3), 99, np.uint8)).save(tmp_path / "pictures" / "turned.png", exif=sideways)
    (tmp_path / "pictures" / "broken.png").write_bytes(b"no picture")
    store = prepare(spec_of(max_bad_fraction=0.1))
    assert store.counts == (20, 10, 11) and 99 in values_of(torch.from_numpy(store.buckets[1].images[:]))
    assert store.meta.skipped == 1


def test_latents_text_and_sizes_agree_with_the_pixels_of_each_bucket(
    spec_of: Callable[..., DataSpec], tmp_path: Path
) -> None:
    write_encoders(tmp_path / "encoders", ("a", "cat"), width=32, second=16, pooled=24)
    save_autoencoder(tmp_path / "autoencoder")
    for number in range(40):
        (tmp_path / "pictures" / f"{number:02}.txt").write_text("a" if number % 2 else "a cat")
    latent = {"autoencoder": tmp_path / "autoencoder", "image_size": 24, "channels": 4}
    spec = spec_of(**latent, text={"encoders": str(tmp_path / "encoders"), "layer": "penultimate"})
    store = prepare(spec, encode_on=torch.device("cpu"))
    assert prepare(spec).meta == store.meta
    assert prepare_images(pixels_of(spec), learned=pixels_learned(store.meta.sha256)).counts == (20,)
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
    batches = micro_batches(
        store,
        fields={"images", "text", "pooled", "sizes"},
        seed=0,
        group=4,
        batch_images=4,
        micro_batch_images=4,
        replicas=1,
        replica=0,
    )
    for _ in range(10):
        batch = next(batches)
        assert batch.sizes is not None and batch.text is not None
        assert (batch.sizes[:, 4:] == torch.tensor(batch.images.shape[2:]) * 2).all()
    deep = tiny_spec(unet=PLAIN | {"multipliers": [1, 2, 2, 2]})
    uneven = spec.model_copy(update={"buckets": BucketsSpec(step=24)})
    with pytest.raises(DataError, match=r"data\.buckets\.step = 24 should be a multiple of 16 pixels"):
        check_steps(deep.model_copy(update={"data": uneven}))
    with pytest.raises(DataError, match=r"data\.buckets\.step = 32 .* of the 2 pixels .* use 48 or a divisor"):
        prepare(spec.model_copy(update={"buckets": BucketsSpec(step=32)}))


def test_a_bucket_with_too_few_images_is_refused_before_anything_is_made(
    spec_of: Callable[..., DataSpec], tmp_path: Path
) -> None:
    wrong = r"data\.buckets: \[56,40\] has 10 images, fewer than the 12 .* at most 10, a larger data\.buckets\.step"
    with pytest.raises(DataError, match=wrong):
        prepare(spec_of(), group=12)
    assert not [path for path in (tmp_path / "stores").iterdir() if path.is_dir()]
    for number in (*range(0, 40, 4), *range(3, 40, 4)):
        (tmp_path / "pictures" / f"{number:02}.png").unlink()
    with pytest.raises(DataError, match=r"the bucket 48, in which no image falls; use that of \[56,40\], which has 10"):
        prepare(spec_of())


def test_images_that_change_are_refused_and_prepared_again(spec_of: Callable[..., DataSpec], tmp_path: Path) -> None:
    store = prepare(spec_of())
    Image.fromarray(np.full((70, 50, 3), 77, np.uint8)).save(tmp_path / "pictures" / "77.png")
    with pytest.raises(DataError, match="other images") as caught:
        prepare(spec_of())
    assert str(caught.value).isprintable()
    assert prepare(spec_of(), learned=store.meta.sha256).meta == store.meta, "a run that has begun goes on"
    for cache in (store, *store.buckets):
        shutil.rmtree(cache.path)
    assert prepare(spec_of()).counts == (20, 11, 10)


@pytest.mark.parametrize("workers", [0, 1])
def test_micro_batches_of_all_replicas_have_one_size_and_go_on_after_a_stop(
    spec_of: Callable[..., DataSpec], workers: int
) -> None:
    store = prepare(spec_of())
    asked: dict[str, Any] = {"seed": 5, "group": 8, "batch_images": 8, "micro_batch_images": 2, "replicas": 2}
    order = BucketOrder(store.counts, seed=5, group=8)
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    streams = [micro_batches(store, replica=replica, workers=workers, **asked) for replica in range(2)]
    for turn in range(20):
        batches = [next(stream) for stream in streams]
        bucket = order.bucket_at(4 * turn)
        assert {tuple(batch.images.shape[2:]) for batch in batches} == {SIZES[bucket]}
        for replica, batch in enumerate(batches):
            assert batch.index.tolist() == [4 * turn + 2 * replica, 4 * turn + 2 * replica + 1]
            seen[bucket] += values_of(batch.images)
    assert all(
        len(set(found[: store.counts[bucket]])) == min(len(found), store.counts[bucket])
        for bucket, found in seen.items()
    )
    resumed, whole = (micro_batches(store, replica=1, start_images=first, workers=0, **asked) for first in (24, 0))
    for _ in range(6):
        next(whole)
    for _ in range(8):
        found, expected = next(resumed), next(whole)
        assert torch.equal(found.index, expected.index) and torch.equal(found.images, expected.images)
    with pytest.raises(ValueError, match="group = 8"):
        micro_batches(store, replica=0, **{**asked, "replicas": 3, "batch_images": 12})
