"""Masks and conditions in files beside pictures: cropped like them, stored with latents, and drawn by key."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from ddpm_ds.data.cache import DatasetCache, Subset
from ddpm_ds.data.latents import CUT_SEED, Coder, autoencoder_of, condition_pixels, rectangles
from ddpm_ds.data.loader import MicroBatch, Share, micro_batches
from ddpm_ds.data.prepare import How, Recipes, prepare, prepared
from ddpm_ds.data.spec import DataSpec
from ddpm_ds.diffusion.process import mean_error
from ddpm_ds.ground.errors import DataError
from ddpm_ds.ground.keyed import Draws, Stream
from tests.autoencoders import save_autoencoder

CPU = torch.device("cpu")
SpecOf = Callable[..., DataSpec]
COUNT = 6


def save(path: Path, pixels: npt.NDArray[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(path)


@pytest.fixture
def spec_of(tmp_path: Path) -> SpecOf:
    """Specs of six pictures of 16x24 pixels in two folders, with masks and second pictures, whose latents have 8x8."""
    random = np.random.default_rng(0)
    for number in range(COUNT):
        name = f"{'a' if number < 3 else 'b'}/{number}.png"
        colours = random.integers(0, 255, (16, 24, 4))
        colours[..., 3] = 255 if number == 0 else np.arange(24) * 10
        save(tmp_path / "pictures" / name, colours[..., :3] if number == 0 else colours)
        save((tmp_path / "masks" / name).with_suffix(".bmp"), random.integers(0, 2, (16, 24)) * 255)
        save((tmp_path / "second" / name).with_suffix(".bmp"), random.integers(0, 255, (16, 24, 3)))
    save_autoencoder(tmp_path / "autoencoder")

    def make(**changes: Any) -> DataSpec:
        given = {"source": "folder", "path": tmp_path / "pictures", "image_size": 8, "channels": 4}
        given |= {"autoencoder": tmp_path / "autoencoder", "store_root": tmp_path / "stores"}
        return DataSpec.model_validate(given | changes)

    return make


def pixels(path: Path, channels: str = "RGB") -> npt.NDArray[np.uint8]:
    """The centre 16x16 pixels of a picture, (C, 16, 16); white is behind transparent ones."""
    with Image.open(path) as file:
        image = file.convert(channels if channels != "RGB" else "RGBA")
    if channels == "RGB":
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    found = np.array(image)[:, 4:20]
    return found.reshape(16, 16, -1).transpose(2, 0, 1)


def seen(cache: DatasetCache, fields: set[str], count: int = 60, start: int = 0, seed: int = 3) -> list[MicroBatch]:
    """Micro-batches of one image each."""
    found = micro_batches(Subset.of(cache), Share(1), fields=fields, seed=seed, start_images=start)
    return list(islice(found, count))


def place_of(cache: DatasetCache, batch: MicroBatch, mirrored: bool) -> int:
    """The position of an image, which is mirrored or not."""
    stored = cache.others["images-mirrored"] if mirrored else cache.images
    (place,) = (place for place in range(len(cache)) if np.array_equal(stored[place], batch.images[0]))
    return place


@pytest.mark.parametrize("given", ["folder", "alpha", "beside"])
def test_masks_are_cropped_like_their_pictures_and_are_means_in_latents(
    given: str, spec_of: SpecOf, tmp_path: Path
) -> None:
    if given == "beside":
        for path in sorted(tmp_path.glob("masks/*/*"))[1:]:
            there = tmp_path / "pictures" / path.relative_to(tmp_path / "masks")
            path.rename(there.with_name(f"{path.stem}-masklabel.png"))
    files = sorted(tmp_path.glob("masks/*/*" if given == "folder" else "pictures/*/*"))
    expected = [pixels(file, "RGBA")[3:] if given == "alpha" else pixels(file, "L") for file in files]
    if given == "beside":
        expected = [np.full((1, 16, 16), 255), *(pixels(file, "L") for file in files if "label" in file.name)]
    spec = spec_of(mask=str(tmp_path / "masks") if given == "folder" else given, horizontal_flips=True)
    latents = prepare(spec, How(encode_on=CPU))
    assert len(latents) == COUNT and latents.meta.stored["mask"].shape == (1, 8, 8)
    mine = prepare(spec.model_copy(update={"autoencoder": None, "channels": 3, "image_size": 16}))
    np.testing.assert_array_equal(mine.others["mask"][:], np.stack(expected))
    means = np.stack(expected).astype(float).reshape(COUNT, 1, 8, 2, 8, 2).mean(axis=(3, 5))
    np.testing.assert_allclose(latents.others["mask"][:], means, atol=0.5 + 1e-9)
    assert np.array_equal(latents.others["mask-mirrored"][:], latents.others["mask"][:][..., ::-1])
    assert latents.meta.facts is None and mine.meta.facts is None, "neither has fields of arrays"
    assert prepare(spec).meta == latents.meta


def test_a_loss_is_normalised_by_its_grey_mask_and_a_black_one_counts_nothing() -> None:
    errors = torch.tensor([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 4, 1).repeat(3, 1, 1, 1)
    masks = torch.tensor([[255, 255, 0, 0], [0, 0, 0, 0], [51, 102, 0, 51]], dtype=torch.uint8).reshape(3, 1, 1, 4)
    assert mean_error(errors, masks).tolist() == [1.5, 0.0, 2.25]


@pytest.mark.parametrize("scaled", [True, False])
def test_a_second_picture_is_encoded_like_the_first(scaled: bool, spec_of: SpecOf, tmp_path: Path) -> None:
    condition = {"kind": "stored", "path": tmp_path / "second", "scaled": scaled}
    spec = spec_of(condition=condition, horizontal_flips=True)
    cache, autoencoder = prepare(spec, How(encode_on=CPU)), autoencoder_of(spec)
    assert autoencoder is not None and spec.condition is not None and spec.interface.condition_channels == 4
    coder, second = Coder(autoencoder, CPU), torch.tensor(np.stack([*map(pixels, sorted(tmp_path.glob("second/*/*")))]))
    for end, images in (("", second), ("-mirrored", second.flip(-1))):
        found = torch.from_numpy(cache.others[f"condition{end}"][:]).float()
        means = coder.model.encode(images.float() / 127.5 - 1).latent_dist.mean
        torch.testing.assert_close(found, (means - 0.25) * 0.7 if scaled else means, rtol=1e-3, atol=1e-3)
    shown = condition_pixels(coder, spec.condition, found)
    torch.testing.assert_close(shown, coder.decode(coder.encode(second.flip(-1))), atol=1, rtol=0)
    batches = seen(cache, {"images", "condition"})
    for batch in batches:
        mirrored = bool(Draws(3, batch.index, {Stream.FLIP: 1}).coins(Stream.FLIP))
        name, place = "condition" + "-mirrored" * mirrored, place_of(cache, batch, mirrored)
        assert batch.condition is not None and np.array_equal(batch.condition[0], cache.others[name][place])
    later = seen(cache, {"images", "condition"}, 10, start=50)
    assert all(torch.equal(now.images, then.images) for now, then in zip(later, batches[50:], strict=True))


def test_each_cut_is_drawn_encoded_and_read_by_key(spec_of: SpecOf, tmp_path: Path) -> None:
    spec = spec_of(mask="alpha", condition={"kind": "cut_out", "variants": 3, "unmasked": 0.4}, horizontal_flips=True)
    cache, autoencoder = prepare(spec, How(encode_on=CPU)), autoencoder_of(spec)
    assert autoencoder is not None and spec.interface.condition_channels == 5 and spec.interface.numbers == 0
    coder, images = (
        Coder(autoencoder, CPU),
        torch.tensor(np.stack([*map(pixels, sorted(tmp_path.glob("pictures/*/*")))])),
    )
    whole = 0
    for number in range(3):
        drawn = Draws(CUT_SEED, torch.arange(COUNT) * 3 + number, {Stream.CUT: 5}).uniform(Stream.CUT)
        holes = rectangles(drawn, (0.25, 0.75), (16, 16))
        holes[drawn[:, 4] < 0.4] = True
        whole += int(holes.flatten(1).all(dim=1).sum())
        for flips in (False, True):
            name = "condition" + f"-{number}" * (number > 0) + "-mirrored" * flips
            found = torch.from_numpy(cache.others[name][:]).float()
            unit, cut = images.float() / 127.5 - 1, holes
            if flips:
                unit, cut = unit.flip(-1), cut.flip(-1)
            means = coder.model.encode(unit * ~cut).latent_dist.mean
            torch.testing.assert_close(found[:, :4], (means - 0.25) * 0.7, rtol=1e-3, atol=1e-3)
            assert torch.equal(found[:, 4:], cut[:, :, ::2, ::2].float())
    assert 0 < whole < 3 * COUNT
    used = set[str]()
    for batch in seen(cache, {"images", "condition"}):
        draws = Draws(3, batch.index, {Stream.FLIP: 1, Stream.CUT: 1})
        number, mirrored = int(draws.integers(Stream.CUT, 3)), bool(draws.coins(Stream.FLIP))
        name, place = (
            "condition" + f"-{number}" * (number > 0) + "-mirrored" * mirrored,
            place_of(cache, batch, mirrored),
        )
        assert batch.condition is not None and np.array_equal(batch.condition[0], cache.others[name][place])
        used.add(name)
    assert len(used) == 6
    assert np.array_equal(cache.fields["condition"].read(np.arange(COUNT)), cache.others["condition"][:])
    fields = {"images", "condition", "mask"}
    for every, part in zip(seen(cache, fields, 9), seen(cache.rows(2, 5), fields, 9), strict=True):
        for one, other in ((every.images, part.images), (every.condition, part.condition)):
            assert one is not None and other is not None and torch.equal(one[:, :, 2:5], other)
        assert every.mask is not None and part.mask is not None and torch.equal(every.mask, part.mask), "whole"


def test_given_masks_are_cut_out(spec_of: SpecOf, tmp_path: Path) -> None:
    condition = {"kind": "cut_out", "path": tmp_path / "masks", "unmasked": 0.0}
    cache = prepare(spec_of(condition=condition), How(encode_on=CPU))
    masks = np.stack([pixels(file, "L") for file in sorted(tmp_path.glob("masks/*/*"))]) >= 128
    assert {*cache.others} == {"condition"}, "one is enough"
    np.testing.assert_array_equal(cache.others["condition"][:][:, 4:], masks[:, :, ::2, ::2])


def test_buckets_and_several_folders_have_theirs(spec_of: SpecOf, tmp_path: Path) -> None:
    for path in (each for each in tmp_path.glob("*/?/*.*") if each.stem in "04"):  # taller than wide
        with Image.open(path) as image:
            image.rotate(90, expand=True).save(path)
    sources: list[dict[str, Any]] = [
        {"path": tmp_path / "pictures" / name, "condition": tmp_path / "second" / name} for name in "ab"
    ]
    sources[0]["mask"] = str(tmp_path / "masks" / "a")
    changes = {"buckets": {"step": 8, "widest": 2.0}, "image_size": (8, 12)}
    spec = spec_of(path=None, sources=sources, condition={"kind": "stored"}, **changes)
    cache = prepared(Recipes(spec).all(1), How(encode_on=CPU))
    assert [each.size for each in cache.caches] == [(8, 12), (12, 8)] and [*cache.counts] == [4, 2]
    white = [(each.others["mask"][:] == 255).all((1, 2, 3)).tolist() for each in cache.caches]
    assert white == [[False, False, True, True], [False, True]]
    assert [each.others["condition"].shape for each in cache.caches] == [(4, 4, 8, 12), (2, 4, 12, 8)]


@pytest.mark.parametrize("kind", ["mask", "condition"])
def test_what_is_missing_or_of_another_size_is_one_line(kind: str, spec_of: SpecOf, tmp_path: Path) -> None:
    folder, key = (tmp_path / "masks", "data.mask") if kind == "mask" else (tmp_path / "second", "data.condition.path")
    file = folder / "a" / "1.bmp"

    def made(path: Path, encode_on: torch.device | None = CPU) -> DatasetCache:
        given = {"mask": str(path)} if kind == "mask" else {"condition": {"kind": "stored", "path": path}}
        return prepare(spec_of(**given), How(encode_on=encode_on))

    made(folder)
    save(file, 255 - np.asarray(Image.open(file)))  # as many bytes
    with pytest.raises(DataError, match=r"data\.path = \S+ has other images than"):
        made(folder, None)
    save(file, np.zeros((16, 23)))
    (tmp_path / "stores").rename(tmp_path / "before")
    fault = rf"data\.{kind}: \S+1.bmp has \[16,23\] pixels, and a/1.png has \[16,24\]; give"
    with pytest.raises(DataError, match=fault):
        made(folder)
    file.unlink()
    with pytest.raises(DataError, match=rf"{key} = \S+ has no picture for 1 of 6 images, first a/1.png; add one of"):
        made(folder)
    with pytest.raises(DataError, match=rf"{key} = nowhere is no folder; name one with a picture for each image"):
        made(Path("nowhere"))
