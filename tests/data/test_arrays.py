"""What files of arrays say of themselves is applied or refused: attributes, dimensions, gaps, codecs, changes."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import xarray
import zarr

from ddpm_ds.data import fields
from ddpm_ds.data.fields import open_fields
from ddpm_ds.data.prepare import How, prepare
from ddpm_ds.data.spec import DataSpec
from ddpm_ds.ground.errors import DataError
from tests.data.reading import refusal

SpecOf = Callable[..., DataSpec]
VALUES = np.random.default_rng(3).normal(280.0, 5.0, (6, 8, 9))
DIMS = ("time", "lat", "lon")
GIVEN: dict[str, Any] = {"values": "float32", "image_size": (8, 9)}
KINDS = ("hdf5", "zarr2", "zarr3")


def stored(kind: str, folder: Path, data: xarray.Dataset, **encoding: Any) -> Path:
    """Write a data set as xarray does."""
    path = folder / ("a.nc" if kind == "hdf5" else "a")
    if kind.startswith("zarr"):
        version: Any = int(kind[-1])
        data.to_zarr(path, encoding=encoding, zarr_format=version, consolidated=version == 2)
    else:
        data.to_netcdf(path, encoding=encoding, engine="h5netcdf")
    return path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "encoding",
    [
        {"dtype": "int16", "scale_factor": 0.01, "add_offset": 280.0, "_FillValue": -9999},
        {"dtype": "int16", "scale_factor": 0.01, "add_offset": 280.0, "_FillValue": 255, "_Unsigned": "true"},
        {"dtype": "float32", "_FillValue": 1e20},
        {"dtype": "int32", "missing_value": -1, "_FillValue": -1},
        {"dtype": "float32"},
        {"dtype": "int16", "scale_factor": 2.0},
    ],
)
def test_numbers_are_what_their_attributes_say(
    kind: str, encoding: dict[str, Any], tmp_path: Path, spec_of: SpecOf
) -> None:
    """As xarray reads them."""
    holes = encoding["dtype"] == "float32" or "_FillValue" in encoding
    values = np.where(VALUES > 288, np.nan if holes else 0, VALUES)
    path = stored(kind, tmp_path, xarray.Dataset({"t": (DIMS, values)}), t=encoding)
    opened = xarray.open_zarr(path) if kind.startswith("zarr") else xarray.open_dataset(path)
    wanted = opened["t"].values
    assert (np.isnan(wanted) == np.isnan(values)).all()
    source = "zarr" if kind.startswith("zarr") else "netcdf"
    store = prepare(spec_of(source=source, path=path, mask="nan", **GIVEN))
    known = np.isfinite(wanted)
    assert (store.fields["mask"][:][:, 0] == known).all()
    np.testing.assert_allclose(store.images[:][:, 0][known], wanted[known], rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", [("lat", "lon", "time"), ("lat", "time", "lon"), ("time", "lon", "lat"), DIMS])
def test_the_dimension_of_time_counts_images(
    kind: str, order: tuple[str, ...], tmp_path: Path, spec_of: SpecOf
) -> None:
    array = xarray.DataArray(VALUES, dims=DIMS).transpose(*order)
    kept = [name for name in order if name != "time"]
    path = stored(kind, tmp_path, xarray.Dataset({"t": array}))
    size = tuple(array.sizes[name] for name in kept)
    store = prepare(spec_of(source="hdf5", path=path, **GIVEN | {"image_size": size}))
    assert (store.images[:][:, 0] == array.transpose("time", *kept).values.astype(np.float32)).all()
    assert [each.name for each in store.meta.coordinates] == ["time", *kept]


def test_an_array_of_places_counts_images_by_its_other_dimension(tmp_path: Path, spec_of: SpecOf) -> None:
    array = xarray.DataArray(VALUES, dims=("sample", "south_north", "west_east"))
    path = stored("hdf5", tmp_path, xarray.Dataset({"t": array.transpose("south_north", "west_east", "sample")}))
    assert (prepare(spec_of(source="hdf5", path=path, **GIVEN)).images[:][:, 0] == VALUES.astype(np.float32)).all()


def test_arrays_of_one_number_each_name_dimensions_that_have_no_names(tmp_path: Path, spec_of: SpecOf) -> None:
    beside = {"time": np.arange(6), "lat": np.arange(8.0), "longitude": np.arange(9.0)}
    np.savez(tmp_path / "a.npz", t=VALUES.transpose(1, 2, 0), **beside)  # type: ignore[arg-type]
    store = prepare(spec_of(source="arrays", path=tmp_path / "a.npz", **GIVEN, variables=["t"]))
    assert (store.images[:][:, 0] == VALUES.astype(np.float32)).all()
    stored("hdf5", tmp_path, xarray.Dataset({"t": (("lat", "lon", "member", "level"), np.zeros((8, 9, 2, 3)))}))
    line = refusal(spec_of(source="netcdf", path=tmp_path / "a.nc", **GIVEN, variables=["t"]))
    assert "its dimensions are lat, lon, member, level; write it again with the one first that counts images" in line


def test_what_nobody_asks_for_may_be_anything(tmp_path: Path, spec_of: SpecOf) -> None:
    for kind in KINDS:
        (folder := tmp_path / kind).mkdir()
        time = ("time", np.arange(6.0), {"units": "months since 0001-01-31", "calendar": "noleap"})
        other = ("other", np.arange(3), {"scale_factor": "text", "units": "days since 9999-01-01"})
        path = stored(kind, folder, xarray.Dataset({"t": (DIMS, VALUES), "other": other, "time": time}))
        if kind.startswith("zarr"):
            shutil.copytree(path / "t", path / "broken")
            for file in ("zarr.json", ".zarray"):
                if (path / "broken" / file).exists():
                    (path / "broken" / file).write_text('{"node_type": "array", "zarr_format": 2}')
        spec = spec_of(source="netcdf", path=path, variables=["t"], store_root=folder / "stores", **GIVEN)
        store = prepare(spec)
        assert store.meta.coordinates[0].units == "months since 0001-01-31" and len(store) == 6


class Runs:
    """Its pickle makes a folder when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def forge(path: Path, name: str, shape: list[int], codecs: str, code: bytes) -> None:
    """Make the array of a Zarr folder hold a pickle, which a chunk of one of the ``codecs`` reads."""
    shutil.rmtree(path / name)
    (path / name / "c").mkdir(parents=True)
    pickled = {"id": "pickle", "protocol": 5}
    two = {"zarr_format": 2, "shape": shape, "chunks": shape, "order": "C", "fill_value": None}
    three = {"name": "numcodecs.pickle", "configuration": {"protocol": 5}}
    inner = {"chunk_shape": shape, "codecs": [three], "index_codecs": [{"name": "bytes"}]}
    listed: dict[str, dict[str, Any]] = {
        "objects": {**two, "dtype": "|O", "filters": [{"id": "vlen-utf8"}, pickled], "compressor": None},
        "compressor": {**two, "dtype": "<f4", "filters": None, "compressor": pickled},
        "codecs": {"codecs": [{"name": "bytes"}, three]},
        "shards": {"codecs": [{"name": "sharding_indexed", "configuration": inner}]},
    }
    metadata = listed[codecs]
    if "zarr_format" not in metadata:
        metadata |= {"zarr_format": 3, "node_type": "array", "shape": shape, "data_type": "float32", "fill_value": 0}
        metadata["chunk_grid"] = {"name": "regular", "configuration": {"chunk_shape": shape}}
        metadata["chunk_key_encoding"] = {"name": "default"}
        metadata["attributes"] = {}
    is_two = metadata["zarr_format"] == 2
    (path / name / (".zarray" if is_two else "zarr.json")).write_text(json.dumps(metadata))
    place = path / name / (".".join("0" * len(shape)) if is_two else "/".join("c" + "0" * len(shape)))
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(code)


@pytest.mark.parametrize("source", ["zarr", "netcdf"])
@pytest.mark.parametrize("codecs", ["objects", "compressor", "codecs", "shards"])
@pytest.mark.parametrize("name, shape", [("t", [6, 8, 9]), ("lat", [8]), ("land", [8, 9])])
def test_a_zarr_folder_runs_no_code(
    name: str, shape: list[int], codecs: str, source: str, tmp_path: Path, spec_of: SpecOf
) -> None:
    data = xarray.Dataset({"t": (DIMS, VALUES), "land": (DIMS[1:], VALUES[0]), "lat": ("lat", np.arange(8.0))})
    path = stored("zarr2" if codecs in ("objects", "compressor") else "zarr3", tmp_path, data)
    forge(path, name, shape, codecs, pickle.dumps(Runs(tmp_path / "ran")))
    condition = {"kind": "stored", "variables": ["t"], "channels": 1, "constants": ["land"], "constant_channels": 1}
    line = refusal(spec_of(source=source, path=path, variables=["t"], condition=condition, **GIVEN))
    assert f"{name} of data.path" in line and "pickle, which may run code; write it again with blosc or zstd" in line
    assert not (tmp_path / "ran").exists()


def zarr_of(path: Path, **more: Any) -> Path:
    zarr.create_array(path, shape=(6, 8, 9), chunks=(1, 8, 9), dtype="f4", **more)[:] = VALUES
    return path


def hdf5_of(folder: Path, make: Callable[[h5py.File], object]) -> Path:
    with h5py.File(folder / "a.h5", "w") as file:
        make(file)
    return folder / "a.h5"


def virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((6, 8, 9), "f4")
    layout[:] = h5py.VirtualSource("b.h5", "images", (6, 8, 9))
    file.create_virtual_dataset("images", layout)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda folder: hdf5_of(folder, virtual), "its values are in other files; write it again into one file"),
        (
            lambda folder: hdf5_of(
                folder, lambda file: file.create_dataset("images", (6, 8, 9), "u1", external=[("/etc/passwd", 0, 432)])
            ),
            "its values are in other files; write it again into one file",
        ),
    ],
)
def test_values_in_other_files_are_not_read(
    make: Callable[[Path], Path], message: str, tmp_path: Path, spec_of: SpecOf
) -> None:
    assert message in refusal(spec_of(source="hdf5", path=make(tmp_path), **GIVEN))


@pytest.mark.parametrize("suffix", [".h5", ".npy"])
def test_a_file_that_is_cut_while_it_is_read_gives_no_zeros(suffix: str, tmp_path: Path, spec_of: SpecOf) -> None:
    path = tmp_path / f"a{suffix}"
    if suffix == ".npy":
        np.save(path, VALUES)
    else:
        hdf5_of(tmp_path, lambda file: file.create_dataset("images", data=VALUES))
    source = open_fields(spec_of(source="arrays" if suffix == ".npy" else "hdf5", path=path, **GIVEN))
    os.truncate(path, path.stat().st_size - 5 * 8 * 9 * 8)
    with pytest.raises(DataError, match="was cut from"):
        [*source.chunks(range(6))]


@pytest.mark.parametrize("kind", ["arrays", *KINDS])
@pytest.mark.parametrize("changed", ["t", "land"])
@pytest.mark.parametrize("whole", [True, False])
def test_any_change_is_noticed_and_a_copy_is_none(
    kind: str, changed: str, whole: bool, tmp_path: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """One field of 400 has another value; of large files that is found by some images, or a line is printed."""
    if not whole:
        monkeypatch.setattr(fields, "WHOLE_BYTES", 0)
    values, land = np.zeros((400, 8, 9), np.float32) + np.arange(1, 401)[:, None, None], np.ones((8, 9))

    def write() -> Path:
        path = tmp_path / "a.npz"
        data = xarray.Dataset({"t": (DIMS, values), "land": (DIMS[1:], land)})
        if kind == "arrays":
            np.savez(path, t=values, land=land)
        else:
            path = stored(kind, tmp_path, data, t={"compressors": None} if kind.startswith("zarr") else {})
        return path

    path = write()
    source = "arrays" if kind == "arrays" else "zarr" if kind.startswith("zarr") else "hdf5"
    condition = {"kind": "stored", "variables": ["t"], "channels": 1, "constants": ["land"], "constant_channels": 1}
    spec = spec_of(source=source, path=path, variables=["t"], condition=condition, **GIVEN)
    before = prepare(spec)
    (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / "copy")
    (shutil.rmtree if path.is_dir() else os.remove)(path)
    (tmp_path / "copy").rename(path)
    assert prepare(spec, How(progress=True)).meta == before.meta
    note = "some of its images were compared: if others have changed delete" in capsys.readouterr().err
    assert note == (not whole and path.is_file()), "a copied file has another time"
    which = (201 if whole else 0, 3, 3) if changed == "t" else (2, 2)
    if path.is_dir():
        array: Any = zarr.open_array(path / changed, mode="r+")
        array[which] = 7.5
    else:
        (values if changed == "t" else land)[which] = 7.5
        write()
    with pytest.raises(DataError, match="has other images than"):
        prepare(spec)


def forged(folder: Path, **changes: Any) -> Path:
    path = zarr_of(folder / "a")
    metadata = json.loads((path / "zarr.json").read_text()) | changes
    (path / "zarr.json").write_text(json.dumps(metadata))
    return path


def pipe_in(path: Path, *names: str) -> Path:
    for name in names:
        os.remove(path / name)
        os.mkfifo(path / name)
    return path


def grid(*sides: int) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": sides}}


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def days(folder: Path) -> Path:
    (folder / "days").mkdir()
    for day in range(3):
        (folder / "days" / f"{day}.nc").touch()
    return folder / "days"


def needing(file: h5py.File) -> None:
    """A data set of a filter that nobody has."""
    made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    made.set_chunk((1, 8, 9))
    made.set_filter(54321, h5py.h5z.FLAG_OPTIONAL)
    h5py.h5d.create(file.id, b"images", h5py.h5t.NATIVE_FLOAT, h5py.h5s.create_simple((6, 8, 9)), made)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda folder: pipe_in(zarr_of(folder / "a"), "c/3/0/0"), "c/3/0/0 is no file"),
        (lambda folder: pipe_in(zarr_of(folder / "a"), "zarr.json"), "zarr.json is no file"),
        (lambda folder: forged(folder, shape=[2**40, 8, 9]), "has 1,099,511,627,776 images, more than 1,000,"),
        (lambda folder: forged(folder, shape=[6, 2**20, 9]), "is 6x1048576x9, and a side of an image may have"),
        (lambda folder: forged(folder, chunk_grid=grid(0, 8, 9)), "can't be read"),
        (lambda folder: forged(folder, attributes={"scale_factor": "a"}), "scale_factor is 'a' and no number"),
        (lambda folder: forged(folder, attributes={"_FillValue": "abc"}), "_FillValue is 'abc' and no number"),
        (lambda folder: forged(folder, data_type="nothing"), "can't be read"),
        (
            lambda folder: written(folder / "a.nc", b"<!DOCTYPE html><html>"),
            "DOCTYPE html><', as web pages do; download the",
        ),
        (lambda folder: written(folder / "a.nc", b"CDF\x01" + bytes(40)), "as NetCDF 3: nccopy -k nc4 OLD NEW"),
        (lambda folder: written(folder / "a.nc", b"\x89HDF\r\n\x1a\n" + bytes(40)), "can't be read"),
        (days, "it is a folder of 3 files, no Zarr; join them into one file"),
        (lambda folder: hdf5_of(folder, needing), "it needs HDF5's filter 54321, without a name: pip install hdf5plu"),
        (lambda folder: Path("/dev/zero"), "it is a device, not a file"),
    ],
)
def test_a_bad_file_is_one_line(make: Callable[[Path], Path], message: str, tmp_path: Path, spec_of: SpecOf) -> None:
    path = make(tmp_path)
    for source in ("hdf5", "zarr", "netcdf"):
        line = refusal(spec_of(source=source, path=path, **GIVEN))
        assert message in line and str(path) in line


@pytest.mark.parametrize("source", ["arrays", "hdf5", "zarr", "netcdf"])
@pytest.mark.parametrize("suffix", ["", ".npy", ".npz", ".nc"])
@pytest.mark.parametrize("key", ["path", "condition"])
def test_no_source_waits_for_a_pipe(source: str, suffix: str, key: str, tmp_path: Path, spec_of: SpecOf) -> None:
    pipe = tmp_path / f"pipe{suffix}"
    os.mkfifo(pipe)
    path = pipe
    if key == "condition":
        path = tmp_path / "a.npz"
        np.savez(path, images=VALUES)
        if source != "arrays":
            path = hdf5_of(tmp_path, lambda file: file.create_dataset("images", data=VALUES))
    condition = {"kind": "stored", "channels": 1, "path": pipe} if key == "condition" else None
    line = refusal(spec_of(source=source, path=path, condition=condition, **GIVEN))
    assert f"= {pipe} can't be read by source {source} (it is a named pipe, not a file)" in line


def test_names_that_are_no_text_are_kept_as_escapes(tmp_path: Path, spec_of: SpecOf) -> None:
    path = forged(tmp_path, dimension_names=["\ud800", "lat", "lon"])
    assert prepare(spec_of(source="zarr", path=path, **GIVEN)).meta.coordinates[0].name == r"\ud800"


def test_an_array_in_a_group_of_hdf5_is_named_by_its_path(tmp_path: Path, spec_of: SpecOf) -> None:
    path = hdf5_of(tmp_path, lambda file: file.create_dataset("era5/t", data=VALUES))
    assert len(prepare(spec_of(source="netcdf", path=path, variables=["era5/t"], **GIVEN))) == 6
