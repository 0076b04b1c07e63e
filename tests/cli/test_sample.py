"""``ddpm-ds sample --conditions``: files in physical units, pictures, rollouts, continuation, refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray
from PIL import Image
from torch import Tensor

from ddpm_ds.data.prepare import prepare
from ddpm_ds.evaluate import sampling
from ddpm_ds.evaluate.inputs import Inputs
from ddpm_ds.evaluate.sampling import Setup, draw
from ddpm_ds.evaluate.sampling import sample as draw_from_python
from ddpm_ds.evaluate.trained import load_trained
from ddpm_ds.ground.errors import SpecError
from tests.evaluate.conditioned import HELD_OUT, Planted, arrays, draw_ensembles, field_spec, plant_fields, plant_on
from tests.evaluate.planted import FAST_SAMPLER, UNLABELLED, Sample, plant, sample_verb

SAMPLER = FAST_SAMPLER.model_copy(update={"clip": "none"})


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    return plant_fields(tmp_path_factory.mktemp("fields"))


@pytest.fixture
def sample(planted: Planted, capsys: pytest.CaptureFixture[str]) -> Sample:
    """Run the verb in this process and return its output, or its one line of error."""

    run = sample_verb(planted.run_dir, capsys)
    return lambda *arguments, **how: run(*arguments, **how).removeprefix("ddpm-ds: error: ")


def ensembles(run_dir: Path, members: int, numbers: range = range(HELD_OUT)) -> Tensor:
    trained = load_trained(run_dir)
    drawn = draw_ensembles(trained, SAMPLER, Inputs.held_out(trained), numbers, members, seed=0, batch_images=64)
    return torch.stack([found for _, found in drawn])


def close(found: Any, expected: Tensor) -> None:
    torch.testing.assert_close(torch.from_numpy(np.array(found)), expected, rtol=1e-4, atol=1e-2)


def test_an_npy_has_members_by_input_in_physical_units(planted: Planted, tmp_path: Path, sample: Sample) -> None:
    out = tmp_path / "x.npy"
    said = sample("--conditions", "held-out", "--members", 3, "--out", out)
    assert said.endswith(
        f"{out}: 15 images, 3 for each of 5 inputs, by ddim in 3 steps, seed 0, ema weights after 320 images\n"
    )
    found = np.load(out)
    assert found.shape == (HELD_OUT, 3, 2, 8, 12) and found.dtype == np.float32
    close(found, ensembles(planted.run_dir, 3))
    sample("--conditions", "held-out", "--members", 3, "--first", 3, "--count", 2, "--out", tmp_path / "y.npy")
    close(np.load(tmp_path / "y.npy"), ensembles(planted.run_dir, 3)[3:])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.npy", "y.npy"]


def test_a_zarr_keeps_names_and_coordinates(tmp_path: Path, sample: Sample) -> None:
    found = arrays()
    dims = ("time", "lat", "lon")
    variables = {name: (dims, found[name]) for name in ("t2m", "u")}
    variables |= {"coarse": (("time", "y", "x"), found["coarse"])}
    places = {"lat": ("lat", np.linspace(50, 57, 8), {"units": "degrees_north"}), "lon": np.arange(12.0)}
    file = tmp_path / "era.nc"
    xarray.Dataset(variables, places).to_netcdf(file)
    condition = {"kind": "stored", "variables": ["coarse"], "channels": 1}
    spec = field_spec(tmp_path, condition, data={"source": "netcdf", "path": str(file)})
    planted = plant_on(prepare(spec.data), tmp_path / "run", spec)
    out = tmp_path / "x.zarr"
    sample("--conditions", file, "--members", 2, "--count", 4, "--out", out, run_dir=planted.run_dir)
    opened = xarray.open_zarr(out, consolidated=False)
    assert {*opened.data_vars} == {"t2m", "u"} and opened["u"].dims == ("input", "member", "lat", "lon")
    assert opened["lat"].values.tolist() == np.linspace(50, 57, 8).tolist()
    assert opened["lat"].attrs["units"] == "degrees_north" and opened["lon"].values.tolist() == list(range(12))
    assert opened["input"].values.tolist() == [0, 1, 2, 3]
    sample("--conditions", file, "--members", 2, "--count", 4, "--out", tmp_path / "x.npy", run_dir=planted.run_dir)
    both = np.stack([opened["t2m"].values, opened["u"].values], axis=2)
    assert np.array_equal(both, np.load(tmp_path / "x.npy"))


def test_a_picture_has_a_row_for_each_input(planted: Planted, tmp_path: Path, sample: Sample) -> None:
    """Input, 3 members, mean, spread, truth."""
    for name, options in (("first", ()), ("other", ("--channel", "u"))):
        sample("--conditions", "held-out", "--members", 3, *options, "--out", tmp_path / name)
    first, other = (np.asarray(Image.open(tmp_path / name / "grid.png")) for name in ("first", "other"))
    assert first.shape == other.shape and first.shape[2] == 3 and (first != other).any()
    factor = -(-512 // max(7 * 12, 5 * 8))
    assert first.shape[1] == 2 + 7 * (12 * factor + 2)


def test_an_interrupted_run_continues(
    planted: Planted, tmp_path: Path, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, words = tmp_path / "x.npy", ("--conditions", "held-out", "--members", 3, "--batch-images", 4)
    calls: list[list[int]] = []

    def stopped(setup: Setup, index: Tensor, **how: Any) -> Tensor:
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(index.tolist())
        return draw(setup, index, **how)

    monkeypatch.setattr(sampling, "draw", stopped)
    assert "8 of 15 images are kept" in sample(*words, "--out", out, code=130)
    calls.clear()
    monkeypatch.setattr(sampling, "draw", draw)
    assert "8 of 15 images are there from before" in sample(*words, "--out", out)
    close(np.load(out), ensembles(planted.run_dir, 3))


def test_python_draws_the_same(planted: Planted) -> None:
    trained = load_trained(planted.run_dir)
    found = draw_from_python(trained, 2, conditions="held-out", members=3, first=1, sampler=SAMPLER, batch_images=4)
    assert found.shape == (2, 3, 2, 8, 12)
    close(found, ensembles(planted.run_dir, 3)[1:3])
    assert draw_from_python(trained, 1, conditions="held-out", sampler=SAMPLER).shape == (1, 8, 2, 8, 12)
    with pytest.raises(SpecError, match=r"was trained with a condition"):
        draw_from_python(trained, 2)
    with pytest.raises(SpecError, match=r"has 5 inputs; name some of these"):
        draw_from_python(trained, 6, conditions="held-out")


STATES = {"kind": "stored", "variables": ["t2m", "u"], "channels": 2, "normalise": "statistics"}
FORECAST: dict[str, Any] = {**STATES, "constants": ["land"], "constant_channels": 1}


@pytest.fixture
def forecast(tmp_path: Path) -> Planted:
    """Run that learns each state's successor in another file."""
    found = arrays()
    now, after = ({name: found[name][part] for name in ("t2m", "u")} for part in (slice(None, -1), slice(1, None)))
    np.savez(tmp_path / "now.npz", **now, land=found["land"])
    np.savez(tmp_path / "after.npz", **after)
    condition = {**FORECAST, "path": str(tmp_path / "now.npz")}
    spec = field_spec(tmp_path, condition, data={"path": str(tmp_path / "after.npz")})
    return plant_on(prepare(spec.data), tmp_path / "run", spec)


def test_a_rollout_feeds_each_state_back(forecast: Planted, tmp_path: Path, sample: Sample) -> None:
    words = ("--conditions", tmp_path / "now.npz", "--count", 2, "--members", 3)
    sample(*words, "--steps-ahead", 3, "--batch-images", 4, "--out", tmp_path / "x.npy", run_dir=forecast.run_dir)
    found = np.load(tmp_path / "x.npy")
    assert found.shape == (2, 3, 3, 2, 8, 12)
    sample(*words, "--out", tmp_path / "one.npy", run_dir=forecast.run_dir)
    np.testing.assert_allclose(found[:, :, 0], np.load(tmp_path / "one.npy"), rtol=1e-4, atol=1e-2)
    trained = load_trained(forecast.run_dir)
    for step in (1, 2):
        before = torch.from_numpy(found[1, 2, step - 1])[None]
        index = torch.tensor([5 + step * 2**49])
        setup = Setup(trained, SAMPLER, inputs=Inputs.of_states(trained, before))
        alone = draw(setup, index, labels=None, numbers=[0])
        close(found[1, 2, step], alone[0])
    sample(*words, "--steps-ahead", 3, "--out", tmp_path / "x.zarr", run_dir=forecast.run_dir)
    opened = xarray.open_zarr(tmp_path / "x.zarr", consolidated=False)
    assert opened["t2m"].dims == ("input", "member", "step", "height", "width")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "was trained with a condition (data.condition); give --conditions PATH or --conditions held-out"),
        ("--conditions OUT/no.npz", "no.npz does not exist; name a file or folder, or held-out"),
        ("--conditions held-out --count 6", "has 5 inputs; name some of these"),
        ("--conditions held-out --first 5", "has 5 inputs; name some of these"),
        ("--conditions held-out --steps-ahead 2 --out OUT/x.npy", "needs a vector for each step (data.condition.vec"),
        ("--conditions held-out --channel v", "--channel v is none of t2m, u"),
        ("--conditions held-out --out OUT/x.npz", "can't hold fields, which"),
        ("--conditions held-out --members 0", "'0' is not a number from 1 to 4,096"),
        ("--conditions held-out --size 16", "has a condition of one size (data.condition); leave it out"),
        ("--conditions held-out --labels 3", "the U-Net has no classes"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    words: str, said: str, planted: Planted, tmp_path: Path, sample: Sample
) -> None:
    arguments = words.replace("OUT", str(tmp_path)).split()
    assert said in sample(*arguments, *([] if "--out" in words else ["--out", tmp_path / "x"]), code=2)
    assert not any(tmp_path.iterdir())
    assert sorted(path.name for path in planted.run_dir.iterdir()) == ["checkpoints", "constants.npy"]


def test_a_run_without_a_condition_takes_none(tmp_path: Path, sample: Sample) -> None:
    plant(tmp_path / "plain", **UNLABELLED)
    for words, said in (
        (("--conditions", "held-out"), "was trained without a condition; leave it out"),
        (("--members", 3), "--members 3 needs --conditions; give it or leave --members out"),
        (("--out", tmp_path / "x.zarr"), "can't hold pictures, which"),
    ):
        assert said in sample(*words, run_dir=tmp_path / "plain", code=2)


def test_fields_without_a_condition_are_drawn_in_colours_and_units(tmp_path: Path, sample: Sample) -> None:
    planted = plant_fields(tmp_path, None)
    sample("--count", 3, "--out", tmp_path / "x.npy", run_dir=planted.run_dir)
    assert np.load(tmp_path / "x.npy").shape == (3, 2, 8, 12)
    sample("--count", 3, "--out", tmp_path / "x", run_dir=planted.run_dir)
    assert np.asarray(Image.open(tmp_path / "x" / "grid.png")).shape[2] == 3


def test_a_regression_draws_one_member(tmp_path: Path, sample: Sample) -> None:
    planted = plant_fields(tmp_path, diffusion={"objective": "regression"})
    words = ("--sampler", "dpm_solver", "--eta", 0, "--steps", 1, "--conditions", "held-out")
    sample(*words, "--out", tmp_path / "x.npy", run_dir=planted.run_dir)
    assert np.load(tmp_path / "x.npy").shape == (HELD_OUT, 1, 2, 8, 12)
    said = sample(*words, "--members", 2, "--out", tmp_path / "y.npy", run_dir=planted.run_dir, code=2)
    assert said == "--members 2: a regression draws one image of each input; use 1"
