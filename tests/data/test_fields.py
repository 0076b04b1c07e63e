"""Fields: every source of named arrays into the cache and out of the loader, against the arrays that a test wrote."""

import itertools
import sys
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest
import xarray
import zarr

from ddpm_ds.data import cache, fields, writing
from ddpm_ds.data.cache import StoredImages
from ddpm_ds.data.prepare import How, Recipes, prepare
from ddpm_ds.data.spec import DataSpec
from ddpm_ds.ground.errors import DataError
from tests.data.reading import loaded, refusal

SpecOf = Callable[..., DataSpec]
Arrays = Mapping[str, npt.NDArray[Any]]
COUNT, SIZE = 12, (6, 10)
RANDOM = np.random.default_rng(5)
WIND = RANDOM.normal(3.0, 2.0, (COUNT, 2, *SIZE))
ARRAYS: Arrays = {
    "t2m": RANDOM.normal(280.0, 5.0, (COUNT, *SIZE)).astype(np.float32),
    "wind": WIND,
    "coarse": RANDOM.normal(0.0, 1.0, (COUNT, 3, 3, 5)).astype(np.float32),
    "lead": np.arange(COUNT),
    "parameters": RANDOM.normal(size=(COUNT, 2)),
    "land": RANDOM.integers(0, 2, SIZE),
    "sea": (RANDOM.random((COUNT, *SIZE)) > 0.3).astype(np.uint8),
}
NAMED: dict[str, Any] = {
    "values": "float32",
    "image_size": SIZE,
    "channels": 3,
    "variables": ("t2m", "wind"),
    "condition": {
        "kind": "stored",
        "variables": ["coarse"],
        "channels": 3,
        "vector": ["lead", "parameters"],
        "vector_size": 3,
        "constants": ["land"],
        "constant_channels": 1,
    },
}


def write(source: str, path: Path, arrays: Arrays, **chunks: tuple[int, ...]) -> Path:
    """Write arrays as a source reads them; ``chunks`` by name are of HDF5 and Zarr."""
    if source == "arrays":
        np.savez(path / "a.npz", **arrays)  # type: ignore[arg-type]
        return path / "a.npz"
    if source == "hdf5":
        with h5py.File(path / "a.h5", "w") as file:
            for name, array in arrays.items():
                file.create_dataset(name, data=array, chunks=chunks.get(name))
        return path / "a.h5"
    if source == "zarr":
        group = zarr.create_group(path / "a.zarr")
        for name, array in arrays.items():
            group.create_array(name, shape=array.shape, dtype=array.dtype, chunks=chunks.get(name, "auto"))[:] = array
        return path / "a.zarr"
    variables = {}
    for name, array in arrays.items():
        names = [f"{name}{axis}" for axis in range(array.ndim)]
        if array.ndim > 2 and (len(array), *array.shape[-2:]) == (COUNT, *SIZE):
            names[0], names[-2], names[-1] = "time", "y", "x"
        variables[name] = (names, array)
    coordinates = {
        "time": xarray.date_range("2026-01-01", periods=COUNT, freq="6h"),
        "y": ("y", np.linspace(50.0, 55.0, SIZE[0]), {"units": "degrees_north"}),
        "wind1": ("wind1", np.array([850.0, 500.0])),
    }
    xarray.Dataset(variables, coordinates).to_netcdf(path / "a.nc", engine="h5netcdf")
    return path / "a.nc"


@pytest.mark.parametrize("source", ["arrays", "hdf5", "zarr", "netcdf"])
def test_a_source_gives_the_arrays_that_were_written(source: str, tmp_path: Path, spec_of: SpecOf) -> None:
    path = write(source, tmp_path, ARRAYS)
    store = prepare(spec_of(source=source, path=path, mask="sea", **NAMED))
    wanted = np.concatenate([ARRAYS["t2m"][:, None], WIND], axis=1).astype(np.float32)
    sea = ARRAYS["sea"][:, None].astype(bool)
    images = store.images[:]
    assert (images.dtype, store.images.shape) == (np.float32, (COUNT, 3, *SIZE))
    everywhere = np.broadcast_to(sea, images.shape)
    assert (images[everywhere] == wanted[everywhere]).all()
    assert (store.fields["mask"][:] == ARRAYS["sea"][:, None]).all()
    assert (store.fields["condition"][:] == ARRAYS["coarse"]).all()
    vector = np.concatenate([ARRAYS["lead"][:, None], ARRAYS["parameters"]], axis=1).astype(np.float32)
    assert (store.fields["vector"][:] == vector).all()
    assert store.constants is not None and (store.constants == ARRAYS["land"]).all()
    found = store.meta.statistics["images"]
    for channel in range(3):
        counted = wanted[:, channel][sea[:, 0]].astype(np.float64)
        assert found.mean[channel] == pytest.approx(counted.mean(), rel=1e-12)
        assert found.std[channel] == pytest.approx(counted.std(), rel=1e-12)
        assert (found.low[channel], found.high[channel]) == (counted.min(), counted.max())
        assert (images[:, channel][~sea[:, 0]] == np.float32(found.mean[channel])).all(), "masked values are the mean"
    levels = ("wind.850", "wind.500") if source == "netcdf" else ("wind.0", "wind.1")
    assert store.meta.fields["images"].channels == ("t2m", *levels)
    if source == "netcdf":
        time, y, x = store.meta.coordinates
        assert (time.along, time.name, time.values[1]) == ("image", "time", 6.0)
        assert time.units.startswith("hours since 2026-01-01")
        assert (y.along, y.name, y.units, y.values[-1]) == ("height", "y", "degrees_north", 55.0)
        assert (x.along, x.name, x.values) == ("width", "x", ())
    assert len(store.key) == 64 and prepare(spec_of(source=source, path=path, mask="sea", **NAMED)).key == store.key


def test_float16_and_whole_numbers_and_other_byte_orders_are_converted(tmp_path: Path, spec_of: SpecOf) -> None:
    for number, kind in enumerate((">f4", "<i2", "<f8", "|b1", "<f2")):
        array = (RANDOM.normal(0.0, 9.0, (3, 2, 8, 8))).astype(kind)
        np.save(tmp_path / f"{number}.npy", array)
        store = prepare(spec_of(source="arrays", path=tmp_path / f"{number}.npy", values="float16", channels=2))
        assert store.images.dtype == np.float16 and (store.images[:] == array.astype(np.float16)).all()


@pytest.mark.parametrize("masked", [False, True])
def test_float16_is_rounded_after_the_mean_is_subtracted_and_says_what_that_costs(
    tmp_path: Path, spec_of: SpecOf, masked: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By channel: far from 0, around it, of whole numbers, and so small that float16 has few steps there."""
    arrays: dict[str, npt.NDArray[Any]] = {
        "t2m": RANDOM.normal(280.0, 0.5, (COUNT, *SIZE)),
        "wind": RANDOM.normal(0.0, 2.0, (COUNT, *SIZE)).astype(np.float32),
        "number": RANDOM.integers(1990, 2010, (COUNT, *SIZE)),
        "rain": RANDOM.normal(0.0, 1e-8, (COUNT, *SIZE)),
        "coarse": RANDOM.normal(1e4, 3.0, (COUNT, 3, 5)).astype(np.float32),
        "sea": (RANDOM.random((COUNT, *SIZE)) > 0.3).astype(np.uint8),
    }
    if masked:
        arrays["t2m"][arrays["sea"] == 0] = 1e20
    monkeypatch.setattr("ddpm_ds.data.writing.SHARD_BYTES", 3 * 1000)
    names = ("t2m", "wind", "number", "rain")
    condition = {"kind": "stored", "variables": ["coarse"], "channels": 1}
    asked: dict[str, Any] = {"image_size": SIZE, "channels": 4, "variables": names, "condition": condition}
    spec = spec_of(source="arrays", path=write("arrays", tmp_path, arrays), values="float16", **asked)
    spec = spec.model_copy(update={"mask": "sea" if masked else None})
    store = prepare(spec, How(progress=True))
    message = capsys.readouterr().err
    assert "RMS of the rounding of images to float16, as a share of their spread: rain " in message
    assert message.count("; --set data.values=float32 keeps more") == 1 and "of condition to float16" in message
    assert store.images.dtype == store.others["condition"].dtype == np.float32 and len(store.meta.shards) > 1
    for field, channels in (("images", names), ("condition", ("coarse",))):
        offset, found = store.meta.stored[field].offset, store.fields[field][:].astype(np.float64)
        far = {name for name, number in zip(channels, offset, strict=True) if number}
        assert far == {"t2m", "number", "coarse"} & {*channels}
        for channel, name in enumerate(channels):
            counts = arrays["sea"] > 0 if masked and field == "images" else np.ones(arrays[name].shape, bool)
            values, read = arrays[name][counts], found[:, channel][counts]
            # Half a step of float16, and a rounding of the difference, the sum and the values themselves to float32.
            bound = np.maximum(2.0**-11 * np.abs(values - offset[channel]), 2.0**-25) + 3 * 2.0**-24 * np.abs(values)
            assert (np.abs(read - values) <= bound).all()
            assert store.meta.statistics[field].mean[channel] == pytest.approx(read.mean(), rel=1e-6)
            errors = np.sqrt(np.mean((read - values.astype(np.float32)) ** 2)) / read.std()
            assert store.meta.rounding[field][channel] == pytest.approx(errors, rel=1e-3, abs=1e-6)
            assert (errors > 0.01) == (name == "rain") and (name != "number" or not errors)
    batch = next(loaded(store, micro_batch_images=COUNT))
    assert sorted(batch.images[:, 1].amax((1, 2)).tolist()) == sorted(store.images[:][:, 1].max((1, 2)).tolist())
    assert (store.centre((4, 6)).images[:] == store.images[:][:, :, 1:5, 2:8]).all()


def test_a_pair_of_files_has_images_and_condition_by_place(tmp_path: Path, spec_of: SpecOf) -> None:
    images = RANDOM.integers(0, 256, (4, 3, 8, 8), np.uint8)
    np.save(tmp_path / "x.npy", images)
    np.save(tmp_path / "c.npy", RANDOM.integers(0, 256, (4, 2, 2), np.uint8))
    condition = {"kind": "stored", "channels": 1, "path": tmp_path / "c.npy"}
    spec = spec_of(source="arrays", path=tmp_path / "x.npy", channels=3, condition=condition)
    store = prepare(spec)
    assert store.meta.kind == "pixels" and store.fields["condition"].dtype == store.images.dtype == np.uint8
    assert (store.images[:] == images).all()
    assert (store.fields["condition"][:] == np.load(tmp_path / "c.npy")[:, None]).all()
    np.save(tmp_path / "c.npy", RANDOM.normal(size=(4, 2, 3)))
    with pytest.raises(DataError, match="has other images than"):
        prepare(spec)


def test_the_variance_of_values_far_from_zero_is_that_of_the_values(
    tmp_path: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1e6 with a variance of 1e-4, over files, chunks and blocks: sums of squares in float64 would lose all digits."""
    values = 1e6 + RANDOM.normal(0.0, 1e-2, (9, 1, 8, 8))
    monkeypatch.setattr("ddpm_ds.data.writing.SHARD_BYTES", 4 * 64 * 2)
    monkeypatch.setattr(fields, "TOGETHER_BYTES", 4 * 64)
    monkeypatch.setattr("ddpm_ds.data.statistics.BLOCK_VALUES", 10)
    np.save(tmp_path / "a.npy", (values - 1e6).astype(np.float32) + np.float32(2**20))
    stored = np.load(tmp_path / "a.npy").astype(np.float64)
    store = prepare(spec_of(source="arrays", path=tmp_path / "a.npy", values="float32"))
    assert store.meta.counts == (2, 2, 2, 2, 1)
    found = store.meta.statistics["images"]
    assert found.mean == pytest.approx((stored.mean(),), rel=1e-15)
    assert found.std == pytest.approx((stored.std(),), rel=1e-6)
    assert (found.low, found.high) == ((stored.min(),), (stored.max(),))


def test_nan_is_masked_where_the_spec_says_so_and_is_the_mean_of_its_channel(tmp_path: Path, spec_of: SpecOf) -> None:
    values = RANDOM.normal(5.0, 1.0, (4, 2, 8, 8)).astype(np.float32)
    values[:, 0, :3] = np.nan
    condition = values[:, :1, ::2, ::2].copy()
    np.savez(tmp_path / "a.npz", images=values, condition=condition)
    changes: dict[str, Any] = {"values": "float32", "channels": 2, "condition": {"kind": "stored", "channels": 1}}
    spec = spec_of(source="arrays", path=tmp_path / "a.npz", **changes)
    line = refusal(spec)
    assert "images of data.path" in line and "NaN in image 0, channel 0; --set data.mask=nan masks" in line
    store = prepare(spec.model_copy(update={"mask": "nan"}))
    known = np.isfinite(values)
    assert (store.fields["mask"][:] == known).all() and store.fields["mask"].dtype == np.uint8
    images, found = store.images[:], store.meta.statistics["images"]
    assert (images[known] == values[known]).all() and (images[:, 0, :3] == np.float32(found.mean[0])).all()
    assert found.mean[0] == pytest.approx(np.nanmean(values[:, 0], dtype=np.float64), rel=1e-12)
    assert np.isfinite(store.fields["condition"][:]).all()
    assert (store.centre((4, 4)).images[:] == images[:, :, 2:6, 2:6]).all()


@pytest.mark.parametrize("source", ["arrays", "hdf5", "zarr", "netcdf"])
def test_bad_input_is_one_line_that_names_the_fix(source: str, tmp_path: Path, spec_of: SpecOf) -> None:
    path = write(source, tmp_path, {**ARRAYS, "short": ARRAYS["t2m"][:5], "complex": WIND[:, 0].astype(np.int64)})

    def refused(**changes: Any) -> str:
        condition = NAMED["condition"] | changes.pop("condition", {})
        return refusal(spec_of(source=source, path=path, **NAMED | {"condition": condition} | changes))

    assert "data.variables has t2n, which is no array of data.path" in (line := refused(variables=("t2n",), channels=1))
    assert "; it holds t2m, " in line
    assert "--set data.channels=3" in (line := refused(channels=4)) and "t2m, wind" in line
    assert "data.image_size = 8, but t2m of data.path" in (line := refused(image_size=8))
    assert "--set data.image_size=[6,10]" in line
    assert "12 images and short of data.path" in refused(variables=("t2m", "short"), channels=2)
    assert "--set data.condition.channels=3" in refused(condition={"channels": 2})
    assert "--set data.condition.vector_size=3" in refused(condition={"vector_size": 1})
    assert "--set data.condition.constant_channels=1" in refused(condition={"constant_channels": 2})
    assert "should be (N,) or (N, K)" in refused(condition={"vector": ["t2m"]})
    assert "data.crop_from = [6,10] crops images and condition" in refused(crop_from=SIZE, image_size=(4, 8))
    assert "data.values = bytes, but t2m" in (line := refused(values="bytes"))
    assert "--set data.values=float32" in line
    assert "data.mask: t2m" in (line := refused(mask="t2m")) and "other values than 0 and 1 in image 0" in line
    assert "data.variables is empty" in (line := refused(variables=()))
    assert "t2m 12x6x10" in line and "coarse" not in line
    assert {each.suffix for each in (tmp_path / "stores").iterdir()} <= {".lock"}, "nothing is left"


def test_values_that_can_t_be_stored_are_named_by_variable_image_and_channel(tmp_path: Path, spec_of: SpecOf) -> None:
    values = np.zeros((40, 2, 8, 8))
    values[33, 1, 4, 4] = 7e4
    np.savez(tmp_path / "a.npz", u=values[:, 0], v=values[:, 1], nan=np.where(values == 7e4, np.inf, values))
    spec = spec_of(source="arrays", path=tmp_path / "a.npz", variables=("u", "v"), channels=2, values="float16")
    line = refusal(spec)
    assert "v of data.path" in line and "70000 in image 33, channel 1, and float16 ends at 65504" in line
    assert "--set data.values=float32" in line
    line = refusal(spec.model_copy(update={"variables": ("nan",), "mask": "nan"}))
    assert "infinity in image 33, channel 1; replace it" in line
    for name, kind in (("complex", np.complex64), ("text", "S3")):
        np.save(tmp_path / f"{name}.npy", np.ones((2, 8, 8), kind))
        line = refusal(spec_of(source="arrays", path=tmp_path / f"{name}.npy", values="float32"))
        assert "should hold floats or whole numbers" in line


def test_a_constant_channel_is_refused_where_it_would_be_divided_by(tmp_path: Path, spec_of: SpecOf) -> None:
    values = RANDOM.normal(size=(4, 2, 8, 8))
    values[:, 1] = 3.0
    np.savez(tmp_path / "a.npz", images=values, condition=values[:, :, ::2, ::2])
    spec = spec_of(source="arrays", path=tmp_path / "a.npz", values="float32", channels=2)
    for way in ("statistics", "range"):
        for _ in range(2):  # while it is made, and of a cache that is there
            with pytest.raises(
                DataError, match=rf"data\.normalise = {way}, but channel 1 \(images\.1\) .* 3 everywhere"
            ):
                prepare(spec.model_copy(update={"normalise": way}))
    assert (prepare(spec).images[:] == values.astype(np.float32)).all()
    condition = {"kind": "stored", "channels": 2, "normalise": "statistics"}
    with pytest.raises(DataError, match=r"data\.condition\.normalise = statistics, but channel 1 \(condition\.1\)"):
        prepare(spec_of(source="arrays", path=tmp_path / "a.npz", values="float32", channels=2, condition=condition))


@pytest.mark.parametrize("source", ["hdf5", "zarr"])
def test_chunks_of_which_an_image_wastes_a_gigabyte_are_refused_with_better_ones(
    source: str, tmp_path: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(source, tmp_path, {"images": np.ones((200, 8, 8), np.float32)}, images=(100, 8, 8))
    spec = spec_of(source=source, path=path, values="float32")
    monkeypatch.setattr("ddpm_ds.data.sources.variables.WASTE_BYTES", 100 * 256)
    line = refusal(spec)
    assert "chunks of 100x8x8, so reading one image of 0.000256 MB reads 0 MB" in line
    assert "write it again in chunks of 1x8x8" in line
    monkeypatch.setattr("ddpm_ds.data.sources.variables.MOST_WASTE", 100)
    assert len(prepare(spec)) == 200


@pytest.mark.parametrize("source", ["hdf5", "zarr"])
def test_each_chunk_of_a_file_is_read_once(
    source: str, tmp_path: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 4 images are read in their order, although an image is asked for at a time."""
    values = RANDOM.normal(size=(18, 2, 8, 8))
    path = write(source, tmp_path, {"images": values}, images=(4, 1, 8, 8))
    opened, reads = fields.FIELD_OPENERS[source], list[slice]()

    def counting(path: Path, spec: DataSpec) -> Any:
        def read(part: slice) -> Any:
            reads.append(part)
            return found["images"].read(part)

        found = opened(path, spec)
        return {"images": fields.replace(found["images"], read=read)}

    monkeypatch.setitem(fields.FIELD_OPENERS, source, counting)
    monkeypatch.setattr("ddpm_ds.data.sources.variables.SMALL_BYTES", 1)
    store = prepare(spec_of(source=source, path=path, values="float32", channels=2))
    assert [(part.start, part.stop) for part in reads] == [(first, first + 4) for first in range(0, 18, 4)]
    assert (store.images[:] == values.astype(np.float32)).all()


def test_preparation_holds_few_images_at_a_time(
    tmp_path: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never more than two images of 8 MB, which are 16 MB in the file, are held, so that 200 MB fit in 1 GiB."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("images", (8, 8, 512, 512), "f8", chunks=(1, 8, 512, 512))
        for i in range(8):
            file["images"][i] = RANDOM.normal(size=(8, 512, 512))
    spec = spec_of(source="hdf5", path=tmp_path / "a.h5", values="float32", channels=8, image_size=512)
    monkeypatch.setattr(cache, "MOST_META_BYTES", 2**20)  # what is read of a text counts as if it were so long
    monkeypatch.setattr(writing, "MOST_RECORD_BYTES", 2**20)
    tracemalloc.start()
    prepare(spec)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 5 * 8 * 2**20


def test_a_rank_reads_no_file_of_a_field_that_it_does_not_ask_for(
    tmp_path: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = prepare(spec_of(source="arrays", path=write("arrays", tmp_path, ARRAYS), mask="sea", **NAMED))
    given: dict[str, Any] = {"seed": 3, "micro_batch_images": 4}
    whole = list(itertools.islice(loaded(store, fields=store.fields.keys(), **given), 5))
    reads, read = list[str](), StoredImages.read

    def counting(self: StoredImages, *arguments: Any, **options: Any) -> Any:
        reads.append(self.name)
        return read(self, *arguments, **options)

    monkeypatch.setattr(StoredImages, "read", counting)
    cases: list[tuple[str, ...]] = [("mask",), ("images", "condition", "vector"), ("condition",), ()]
    for asked in cases:
        reads.clear()
        batches = loaded(store, fields=frozenset(asked), **given)
        taken = list(itertools.islice(batches, 5))
        del batches  # ends its threads
        assert set(reads) == set(asked)
        for batch, other in zip(taken, whole, strict=True):
            assert (batch.index == other.index).all() and (batch.labels == other.labels).all()
            for name in ("images", "condition", "mask", "vector"):
                found, wanted = getattr(batch, name), getattr(other, name)
                assert (found == wanted).all() if name in asked else found is None or found.shape == (4, 0)
    with pytest.raises(KeyError, match="depth"):
        loaded(store, fields={"depth"}, **given)


def test_every_key_that_decides_the_fields_is_in_the_name(tmp_path: Path, spec_of: SpecOf) -> None:
    spec = spec_of(source="hdf5", path=tmp_path / "a.h5", **NAMED)
    condition = NAMED["condition"]
    others: list[dict[str, Any]] = [
        {"values": "float16"},
        {"variables": ["wind", "t2m"]},
        {"mask": "nan"},
        {"condition": None},
        *({"condition": condition | change} for change in ({"path": tmp_path / "b.h5"}, {"variables": ["other"]})),
        *({"condition": condition | change} for change in ({"constants": ["sea"]}, {"vector": ["lead"]})),
    ]
    names = {Recipes(spec_of(source="hdf5", path=tmp_path / "a.h5", **NAMED | change)).of().path for change in others}
    assert len({*names, Recipes(spec).of().path}) == 1 + len(others)
    drop = spec_of(source="hdf5", path=tmp_path / "a.h5", **NAMED | {"condition": condition | {"drop": 0.5}})
    assert Recipes(drop).of().path == Recipes(spec).of().path, "what is done while training needs no other cache"


def test_a_missing_library_is_named_with_its_extra(
    tmp_path: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"no such format")
    spec = spec_of(source="netcdf", path=tmp_path / "a", values="float32")
    assert "can't be read by source netcdf" in refusal(spec)
    monkeypatch.setitem(sys.modules, "h5py", None)
    assert "pip install 'ddpm_ds[fields]'" in refusal(spec)
    zarr.create_group(tmp_path / "a.zarr")
    monkeypatch.setitem(sys.modules, "zarr", None)
    assert "pip install 'ddpm_ds[fields]'" in refusal(spec.model_copy(update={"path": tmp_path / "a.zarr"}))
    line = refusal(spec.model_copy(update={"path": tmp_path / "b"}))
    assert "does not exist; give it with --set data.path=" in line


def test_an_image_that_can_t_be_read_is_left_out_of_every_field_and_named(
    tmp_path: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = write("hdf5", tmp_path, ARRAYS), fields.FIELD_OPENERS["hdf5"]

    def damaged(path: Path, spec: DataSpec) -> Any:
        def read(part: slice) -> Any:
            if part.start <= 5 < part.stop:
                raise OSError(5, "wrong checksum")
            return coarse.read(part)

        found = opened(path, spec)
        coarse = found["coarse"]
        return found | {"coarse": fields.replace(coarse, read=read, chunks=(1, 3, 3, 5))}

    monkeypatch.setitem(fields.FIELD_OPENERS, "hdf5", damaged)
    monkeypatch.setattr("ddpm_ds.data.sources.variables.SMALL_BYTES", 1)
    spec = spec_of(source="hdf5", path=path, **NAMED)
    assert "data.max_bad_fraction = 0.01, but 1 of 12 images" in refusal(spec)
    store = prepare(spec.model_copy(update={"max_bad_fraction": 0.1}))
    kept = np.delete(np.arange(COUNT), 5)
    assert (store.path / "skipped.txt").read_text() == "image 5\twrong checksum\n"
    assert (store.fields["vector"][:][:, 0] == kept).all() and (
        store.fields["condition"][:] == ARRAYS["coarse"][kept]
    ).all()
