"""What images are conditioned on: drawn as a plain loop draws them, whatever is drawn at once, in physical units."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
import zarr
from PIL import Image
from torch import Tensor

from ddpm_ds.cli.main import main
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.data.fields import REGRESSION, fields_of
from ddpm_ds.data.held_out import checksums_of, prepare_all, split
from ddpm_ds.data.inputs import Reading
from ddpm_ds.data.loader import MicroBatch
from ddpm_ds.data.prepare import How, prepare
from ddpm_ds.diffusion.samplers import Sampler
from ddpm_ds.diffusion.spec import SamplerSpec
from ddpm_ds.evaluate.inputs import Inputs, TrainedRegression
from ddpm_ds.evaluate.sampling import Setup, SpaceRanks, check_guide, draw
from ddpm_ds.evaluate.trained import Trained, load_trained
from ddpm_ds.ground import keyed
from ddpm_ds.ground.errors import CheckpointError, DataError, SpecError
from ddpm_ds.ground.keyed import Stream
from ddpm_ds.training.objective import Denoising
from tests.evaluate.conditioned import (
    CONDITION,
    COUNT,
    HELD_OUT,
    Planted,
    arrays,
    draw_ensembles,
    field_spec,
    plant_fields,
    plant_on,
    sections_of,
)
from tests.evaluate.planted import FAST_SAMPLER, UNLABELLED, plant, refusal, trained_of
from tests.launching import tiny_spec

CPU = torch.device("cpu")
SAMPLER = FAST_SAMPLER.model_copy(update={"clip": "none"})
MEMBERS = 3


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    return plant_fields(tmp_path_factory.mktemp("fields"))


@pytest.fixture(scope="module")
def trained(planted: Planted) -> Trained:
    return load_trained(planted.run_dir)


@pytest.fixture(scope="module")
def inputs(trained: Trained) -> Inputs:
    return Inputs.held_out(trained)


def held_out() -> Any:
    return split(COUNT, HELD_OUT)[1]


def by_hand(trained: Trained, number: int, dropped: bool = False) -> tuple[Tensor, Tensor]:
    """Condition (1, 6, 8, 12) and vector (1, 2) of an input, from the arrays alone."""
    found = arrays()
    coarse, land = torch.from_numpy(found["coarse"]).double(), torch.from_numpy(found["land"]).double()
    low, high = coarse.min(), coarse.max()
    unit = ((coarse[held_out()[number]] - (high + low) / 2) / ((high - low) / 2))[None, None].float()
    channels = [torch.nn.functional.interpolate(unit, (8, 12), mode="bilinear", align_corners=False)]
    channels.append((2 * (land - land.min()) / (land.max() - land.min()) - 1)[None, None].float())
    for axis, pixels in enumerate((8, 12)):
        angle = 2 * np.pi * (torch.arange(pixels) + 0.5) / pixels
        waves = [wave[:, None] if axis == 0 else wave[None] for wave in (angle.sin(), angle.cos())]
        channels += [wave.expand(8, 12)[None, None].float() for wave in waves]
    vector = torch.tensor([[float(found["lead"][held_out()[number]]), 0.0]])
    condition = torch.cat(channels, dim=1)
    return (torch.zeros_like(condition), torch.tensor([[0.0, 1.0]])) if dropped else (condition, vector)


def plain_loop(trained: Trained, sampler: SamplerSpec, number: int, image: int) -> Tensor:
    """Member of an input, drawn alone in plain PyTorch: (2, 8, 12) in physical units."""
    steps = Sampler(sampler, trained.diffusion)
    index, shape = torch.tensor([image]), (2, 8, 12)
    x, x0 = keyed.normal(0, Stream.SAMPLE, index, 192).view(1, *shape), None
    given, without = by_hand(trained, number), by_hand(trained, number, dropped=True)
    for step, visit in enumerate(steps.visits):
        t = torch.tensor([visit.t])
        prediction, other = (trained.unet(torch.cat((x, channels), 1), t, told) for channels, told in (given, without))
        prediction = other + sampler.guidance * (prediction - other)
        noise = keyed.normal(0, visit.stream, index, 192).view(1, *shape) if steps.needs_noise(step) else None
        x, x0 = steps.step(step, x, prediction, noise=noise, previous_x0=x0)
    assert trained.facts is not None
    known = trained.facts.statistics["images"]
    return x[0] * torch.tensor(known.std)[:, None, None] + torch.tensor(known.mean)[:, None, None]


@pytest.mark.parametrize("guidance", [1.0, 0.0, 2.5])
def test_ensembles_are_those_of_a_plain_loop_over_each_member(
    trained: Trained, inputs: Inputs, guidance: float
) -> None:
    sampler = SAMPLER.model_copy(update={"guidance": guidance})
    drawn = dict(draw_ensembles(trained, sampler, inputs, [4, 1], MEMBERS, seed=0, batch_images=4))
    assert list(drawn) == [4, 1]
    for number, members in drawn.items():
        assert members.shape == (MEMBERS, 2, 8, 12) and members.dtype == torch.float32
        for member in range(MEMBERS):
            alone = plain_loop(trained, sampler, number, number * MEMBERS + member)
            torch.testing.assert_close(members[member], alone, rtol=1e-4, atol=1e-2)


def test_truths_are_the_held_out_images_as_they_are_stored(inputs: Inputs) -> None:
    assert len(inputs) == HELD_OUT
    truth, found = inputs.truth(range(HELD_OUT)), arrays()
    assert truth is not None
    assert truth.equal(torch.from_numpy(np.stack([found["t2m"], found["u"]], axis=1)[held_out()]))
    assert inputs.mask([0]) is None


def test_a_run_samples_where_its_data_are_not(planted: Planted, tmp_path: Path) -> None:
    """All that it needs of the data set is in the checkpoint and the run's folder."""
    moved = shutil.copytree(planted.run_dir, tmp_path / "elsewhere")
    planted.store.path.parent.rename(hidden := tmp_path / "hidden")
    try:
        trained = load_trained(moved)
        drawn = trained.finished(torch.zeros(2, 2, 8, 12))[0, :, 0, 0]
        torch.testing.assert_close(drawn, torch.tensor([280.0, -3.0]), rtol=0.1, atol=1)
        read = {"condition": torch.zeros(1, 1, 4, 6), "vector": torch.zeros(1, 1)}
        made = trained.conditions.at_rest(read, torch.tensor([0]), trained.scale)
        assert made.channels is not None and made.channels.shape == (1, 6, 8, 12)
        (moved / "constants.npy").unlink()
        with pytest.raises(CheckpointError, match=r"constants\.npy of the run's folder; copy that file there$"):
            load_trained(moved)
    finally:
        hidden.rename(planted.store.path.parent)


def test_an_export_draws_what_the_run_draws(tmp_path: Path, trackers: list[Any]) -> None:
    condition = {name: value for name, value in CONDITION.items() if name not in ("vector", "vector_size", "drop")}
    planted = plant_fields(tmp_path, condition)
    assert main(["export", str(planted.run_dir), str(tmp_path / "export")]) == 0
    run, export = load_trained(planted.run_dir), load_trained(tmp_path / "export")
    path, how = write_given("arrays", tmp_path), {"seed": 0, "batch_images": 4}
    drawn, again = (dict(draw_ensembles(one, SAMPLER, Inputs.at(path, one), [0, 3], 2, **how)) for one in (run, export))
    for number in (0, 3):
        torch.testing.assert_close(again[number], drawn[number], rtol=1e-4, atol=1e-2)
    assert export.channels == ("t2m", "u") and export.sampler.clip == "none"
    with pytest.raises(SpecError, match=r"is an export; name a file or folder$"):
        Inputs.held_out(export)


def test_a_regression_draws_one_image_for_each_input(mean: Planted) -> None:
    trained = load_trained(mean.run_dir)
    ((_, members),) = draw_ensembles(trained, trained.sampler, Inputs.held_out(trained), [2], 2, seed=0, batch_images=8)
    assert members[0].equal(members[1])
    channels, vector = by_hand(trained, 2)
    unit = trained.unet(torch.cat((torch.zeros(1, 2, 8, 12), channels), 1), torch.zeros(1), vector)
    torch.testing.assert_close(members[0], trained.finished(unit)[0], rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("kind", ["reduced", "grey", "cut_out"])
def test_conditions_made_from_images_are_those_of_the_held_out_loss(kind: str) -> None:
    """A cut-out rectangle too, since both are keyed by the place among the held-out images."""
    spec = tiny_spec(data={"channels": 3, "condition": {"kind": kind, "drop": 0.2}}, **UNLABELLED)
    trained, images = trained_of(spec), torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    inputs = Inputs(trained, {"images": Reading(lambda positions: images.numpy()[positions])}, np.arange(4), "key")
    objective = Denoising(spec, CPU, seed=0)
    batch = MicroBatch(images=images, labels=torch.zeros(4, dtype=torch.int64), index=torch.arange(4))
    x_t, _, vector = objective.inputs(objective.held_out(batch, 5, Stream.HELD_OUT))
    found = inputs.condition([3, 1, 1], CPU)
    assert found.channels.equal(x_t[[3, 1, 1], 3:]) and found.others[0].equal(vector[[3, 1, 1]])
    drawn = draw(Setup(trained, FAST_SAMPLER, inputs=inputs), torch.arange(4), labels=None, members=2)
    assert drawn.dtype == torch.uint8


def test_held_out_images_of_another_file_come_to_the_scale_of_the_training_images(tmp_path: Path) -> None:
    """Masked values of the condition too. They are those that the run knew, and are found without the others."""
    others = {name: values[3:10] if name != "land" else values for name, values in arrays().items()}
    others["t2m"], others["coarse"] = others["t2m"] + 30.0, others["coarse"] + 1000.0
    others["coarse"][2, 0, 0] = np.nan
    np.savez(tmp_path / "val.npz", **others)
    data = {"held_out_path": str(tmp_path / "val.npz"), "held_out_images": 0, "mask": "nan"}
    spec = field_spec(tmp_path, data=data)
    store, others_held_out = prepare_all(spec.data, How())
    trained = load_trained(plant_on(store, tmp_path / "run", spec, others_held_out).run_dir)
    shutil.copytree(store.path, tmp_path / "copy")
    shutil.rmtree(store.path)
    coarse = torch.from_numpy(arrays()["coarse"])
    low, high, known = coarse.min(), coarse.max(), torch.from_numpy(others["coarse"][2]).clone()
    known[0, 0] = coarse.double().mean()
    unit = ((known - (high + low) / 2) / ((high - low) / 2))[None, None]
    unit = torch.nn.functional.interpolate(unit, (8, 12), mode="bilinear", align_corners=False)
    for dataset in (None, others_held_out.path):
        inputs = Inputs.held_out(trained, dataset)
        truth = inputs.truth(range(len(inputs)))
        assert truth is not None and np.array_equal(truth[:, 0].numpy(), others["t2m"])
        torch.testing.assert_close(inputs.condition([2], CPU).channels[:, :1], unit, rtol=1e-5, atol=1e-5)
    with pytest.raises(DataError, match=r"copy is not the held-out data set of \S+; name that one"):
        Inputs.held_out(trained, tmp_path / "copy")


def test_a_run_without_held_out_images_or_condition_is_refused(tmp_path: Path) -> None:
    planted = plant_fields(tmp_path, data={"held_out_images": 0})
    with pytest.raises(SpecError, match=r"held out no image"):
        Inputs.held_out(load_trained(planted.run_dir))
    with pytest.raises(SpecError, match=r"trained without a condition"):
        Inputs.held_out(trained_of(tiny_spec()))


def write_given(kind: str, folder: Path, **changes: Any) -> Path:
    """Write the held-out conditions, with truths, as an ``.npz`` (arrays) or a Zarr folder without a suffix."""
    found = {name: values if name == "land" else values[held_out()] for name, values in arrays().items()} | changes
    found = {name: values for name, values in found.items() if values is not None}
    path = folder / ("given.npz" if kind == "arrays" else "given")
    if kind == "arrays":
        np.savez(path, **found)
        return path
    group = zarr.open_group(path, mode="w")
    for name, values in found.items():
        group.create_array(name, data=values)
    return path


@pytest.mark.parametrize("kind", ["arrays", "zarr"])
def test_a_file_of_conditions_draws_what_the_held_out_images_draw(
    kind: str, trained: Trained, inputs: Inputs, tmp_path: Path
) -> None:
    found = Inputs.at(write_given(kind, tmp_path), trained)
    assert len(found) == HELD_OUT and found.key != inputs.key
    numbers = [4, 0, 0, 2]
    for one, other in zip(found.condition(numbers, CPU), inputs.condition(numbers, CPU), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    truth, expected = found.truth(numbers), inputs.truth(numbers)
    assert truth is not None and expected is not None and truth.equal(expected)
    (tmp_path / "without").mkdir()
    assert Inputs.at(write_given(kind, tmp_path / "without", t2m=None), trained).truth(numbers) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"coarse": np.zeros((5, 4, 7))}, r"coarse is 1x4x7 for each image, and the run learned 1x4x6$"),
        ({"coarse": np.zeros((5, 2, 4, 6))}, r"coarse is 2x4x6 for each image, and the run learned 1x4x6$"),
        ({"coarse": np.float32(1.0)}, r"coarse, which is no array of --conditions = \S+; it holds"),
        ({"lead": np.zeros(3)}, r"each image needs its own"),
        ({"coarse": np.full((5, 4, 6), np.nan)}, r"coarse is not finite in input 0; replace"),
        ({"lead": np.full(5, np.inf)}, r"lead is not finite in input 0; replace"),
    ],
)
def test_conditions_of_another_kind_are_refused_in_a_line(
    changes: dict[str, Any], message: str, trained: Trained, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        Inputs.at(write_given("arrays", tmp_path, **changes), trained).condition([0], CPU)
    assert "\n" not in str(caught.value)


def test_files_without_arrays_are_refused(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"does not exist; name a file or folder, or held-out$"):
        Inputs.at(tmp_path / "nothing", trained)
    for suffix in ("", ".npy", ".npz", ".h5", ".nc", ".zarr"):
        os.mkfifo(pipe := tmp_path / f"pipe{suffix}")
        with pytest.raises(DataError, match=r"it is a named pipe, not a file"):
            Inputs.at(pipe, trained)
    np.save(tmp_path / "scalar.npy", np.float32(3))
    with pytest.raises(DataError, match=r"is no array of --conditions = \S+scalar\.npy; it holds no array$"):
        Inputs.at(tmp_path / "scalar.npy", trained)


def picture_run(kind: str, **condition: Any) -> Trained:
    data = {"channels": 3, "source": "folder", "path": "x", "condition": {"kind": kind, **condition}}
    return trained_of(tiny_spec(data=data, **UNLABELLED))


def write_pictures(folder: Path, size: tuple[int, int], grey: bool = False) -> Tensor:
    """Write three pictures of a size; return their pixels (3, 3, H, W) in [-1, 1]."""
    pixels = np.random.default_rng(2).integers(0, 256, (3, *size, 1 if grey else 3), np.uint8).repeat(2 * grey + 1, -1)
    folder.mkdir()
    for number, each in enumerate(pixels):
        Image.fromarray(each).save(folder / f"{number}.png")
    return torch.from_numpy(pixels.transpose(0, 3, 1, 2).astype(np.float32)) / 127.5 - 1


def test_small_pictures_are_enlarged_and_whole_ones_reduced_first(tmp_path: Path) -> None:
    trained = picture_run("reduced", factor=4)
    small, whole = write_pictures(tmp_path / "small", (2, 2)), write_pictures(tmp_path / "whole", (8, 8))
    found = {name: Inputs.at(tmp_path / name, trained) for name in ("small", "whole", "whole/1.png")}
    for name, unit in (("small", small), ("whole", torch.nn.functional.avg_pool2d(whole, 4))):
        enlarged = torch.nn.functional.interpolate(unit, (8, 8), mode="bilinear", align_corners=False)
        torch.testing.assert_close(found[name].condition(range(3), CPU).channels, enlarged)
    truth = found["whole"].truth(range(3))
    assert truth is not None and found["small"].truth([0]) is None
    torch.testing.assert_close(truth, (whole + 1) * 127.5)
    one, of_folder = (found[name].condition([number], CPU) for name, number in (("whole/1.png", 0), ("whole", 1)))
    assert len(found["whole/1.png"]) == 1 and one.channels.equal(of_folder.channels)


def test_grey_pictures_are_coloured_and_coloured_ones_greyed_first(tmp_path: Path) -> None:
    trained, luma = picture_run("grey"), torch.tensor([0.299, 0.587, 0.114])[:, None, None]
    for name, grey in (("grey", True), ("rgb", False)):
        pixels = write_pictures(tmp_path / name, (8, 8), grey)
        found = Inputs.at(tmp_path / name, trained)
        torch.testing.assert_close(found.condition(range(3), CPU).channels, (pixels * luma).sum(dim=1, keepdim=True))
        assert (found.truth([0]) is None) == grey


def test_a_given_mask_decides_the_cut_out(tmp_path: Path) -> None:
    trained, draws = picture_run("cut_out"), np.random.default_rng(4)
    images, mask = draws.integers(0, 256, (3, 3, 8, 8), np.uint8), draws.integers(0, 2, (3, 8, 8))
    np.savez(tmp_path / "holes.npz", images=images, mask=mask)
    found = Inputs.at(tmp_path / "holes.npz", trained)
    channels, hole = found.condition([2, 0], CPU).channels, torch.from_numpy(mask[[2, 0]])[:, None]
    torch.testing.assert_close(channels[:, :3], (torch.from_numpy(images[[2, 0]]).float() / 127.5 - 1) * (1 - hole))
    assert channels[:, 3:].equal(hole.float()) and found.truth([0]) is None
    np.savez(tmp_path / "wrong.npz", images=images, mask=mask[:, :5])
    with pytest.raises(DataError, match=r"mask should be 0 or 1"):
        Inputs.at(tmp_path / "wrong.npz", trained)


def test_a_guide_without_the_condition_is_refused(trained: Trained, tmp_path: Path) -> None:
    plain = load_trained(plant_fields(tmp_path, None).run_dir)
    with pytest.raises(SpecError, match=r"has channels and numbers of data.condition = \(0, 0\), and .* \(6, 2\)"):
        check_guide(plain, trained, [SAMPLER.model_copy(update={"guidance": 2.0})])


@pytest.fixture(scope="module")
def mean(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    """A regression that nobody trained."""
    return plant_fields(tmp_path_factory.mktemp("fields"), diffusion={"objective": "regression"})


@pytest.fixture(scope="module")
def spec(mean: Planted) -> RunSpec:
    """The spec of a diffusion of its residuals."""
    return field_spec(mean.run_dir.parent, data={"residual_of": str(mean.run_dir)})


def predictions_by_hand(mean: Planted, regression: Trained) -> np.ndarray:
    """What the regression predicts of all fields: x_t is zeros, and the prediction is on the scale of the fields."""
    denoising = Denoising(mean.spec, CPU, mean.store.meta.statistics, mean.store.constants)
    every = np.arange(COUNT)
    read = {name: torch.from_numpy(mean.store.fields[name].read(every)) for name in ("images", "condition", "vector")}
    index = torch.from_numpy(every)
    prepared = denoising.held_out(MicroBatch(labels=torch.zeros_like(index), index=index, **read), 0, 0)
    x_t, *others = denoising.inputs(prepared)
    assert not x_t[:, :2].any()
    statistics = mean.store.meta.statistics["images"]
    low, size = (torch.tensor(numbers)[:, None, None] for numbers in (statistics.mean, statistics.std))
    found: np.ndarray = (regression.unet(x_t, *others) * size + low).numpy()
    return found


def test_the_verb_stores_fields_minus_predictions_which_samples_add_again(
    mean: Planted, spec: RunSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = spec.model_dump(mode="json")
    values["data"]["residual_of"] = None
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(values))
    assert main(["prepare", "--spec", str(tmp_path / "spec.yaml"), "--residual", str(mean.run_dir)]) == 0
    store = prepare(spec.data)
    assert f"{store.path}: {COUNT} residuals" in capsys.readouterr().out
    regression = load_trained(mean.run_dir)
    predicted, fields = predictions_by_hand(mean, regression), np.stack([arrays()["t2m"], arrays()["u"]], axis=1)
    np.testing.assert_allclose(store.images[:] + predicted, fields, rtol=1e-5, atol=1e-3)
    assert abs(store.meta.statistics["images"].mean[0] - (fields - predicted)[:, 0].mean()) < 1e-2

    planted = plant_on(store, tmp_path / "run", spec)
    trained = load_trained(planted.run_dir)
    inputs = Inputs.held_out(trained)
    found = inputs.truth(range(len(inputs)))
    assert found is not None
    np.testing.assert_allclose(found.numpy(), fields[inputs.positions], rtol=1e-5, atol=1e-3)
    ((_, members),) = draw_ensembles(trained, SAMPLER, inputs, [1], 2, seed=0, batch_images=8)
    alone = torch.stack([plain_loop(trained, SAMPLER, 1, image) for image in (2, 3)])
    torch.testing.assert_close(members, alone + torch.from_numpy(predicted[inputs.positions[1]]), rtol=1e-4, atol=1e-2)
    with SpaceRanks(2, CPU) as ranks:
        shared = replace(trained, ranks=ranks).shared()
        assert shared.regression is not None and shared.regression.ranks is ranks
        ((_, together),) = draw_ensembles(shared, SAMPLER, Inputs.held_out(shared), [1], 2, seed=0, batch_images=8)
    torch.testing.assert_close(together, members, rtol=1e-4, atol=1e-2)

    other = {**checksums_of(store, store), REGRESSION: "0" * 64}
    plant(planted.run_dir, 640, data_sha256=other, facts=store.meta.facts, **sections_of(spec))
    with pytest.raises(CheckpointError, match=r"has other weights than the residuals"):
        assert load_trained(planted.run_dir).regression is None


def test_masked_conditions_of_other_fields_are_read_as_in_the_training_of_the_regression(tmp_path: Path) -> None:
    planted = plant_fields(tmp_path, diffusion={"objective": "regression"}, data={"mask": "nan"})
    regression = TrainedRegression(planted.spec.data.model_copy(update={"residual_of": planted.run_dir}), CPU)
    predicted = []
    for name, missing in (("masked", np.nan), ("filled", arrays()["coarse"].mean(dtype=np.float64))):
        others = arrays()
        others["coarse"] += 500.0
        others["coarse"][3] = missing
        np.savez(tmp_path / f"{name}.npz", **others)
        fields = prepare(planted.spec.data.model_copy(update={"path": tmp_path / f"{name}.npz"}))
        predicted.append(regression.predict(fields, np.array([3])))
    np.testing.assert_allclose(predicted[0], predicted[1], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"image_size": [8, 8]}, r"has data.image_size = \[8,12\], and this spec 8; name a regression of the same"),
        ({"variables": ["u", "t2m"]}, r"has data.variables = \[t2m, u\], and this spec \[u, t2m\]"),
        ({"condition": {**CONDITION, "vector": [], "vector_size": 0}}, r"has data.condition.vector = \[lead\], and"),
    ],
)
def test_a_regression_of_other_fields_is_refused_by_name(mean: Planted, changes: dict[str, Any], message: str) -> None:
    data = field_spec(mean.run_dir.parent, data={"residual_of": str(mean.run_dir), **changes}).data
    with pytest.raises(SpecError, match=message):
        TrainedRegression(data, CPU)


def test_a_run_that_is_no_regression_is_refused(
    tmp_path: Path, mean: Planted, spec: RunSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    diffusion = plant_on(mean.store, tmp_path / "run", field_spec(mean.run_dir.parent))
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec.model_dump(mode="json")))
    line = refusal(capsys, "prepare", "--spec", tmp_path / "spec.yaml", "--residual", diffusion.run_dir)
    assert "is no regression: its diffusion.objective is eps; name a run with diffusion.objective = regression" in line
    data = fields_of(spec.data).model_copy(update={"residual_of": tmp_path / "nowhere"})
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        TrainedRegression(data, CPU)
