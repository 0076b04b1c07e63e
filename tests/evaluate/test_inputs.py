"""What images are conditioned on: drawn as a plain loop draws them, whatever is drawn at once, in physical units."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ddpm_ds import keyed
from ddpm_ds.config.spec import SamplerSpec
from ddpm_ds.data.cache import DatasetCache
from ddpm_ds.data.loader import MicroBatch, split
from ddpm_ds.diffusion.samplers import Sampler
from ddpm_ds.errors import CheckpointError, DataError, SpecError
from ddpm_ds.evaluate.inputs import Inputs
from ddpm_ds.evaluate.sampling import draw, draw_ensembles
from ddpm_ds.evaluate.trained import Trained, load_trained
from ddpm_ds.keyed import Stream
from ddpm_ds.train.objective import Denoising
from tests.evaluate.conditioned import COUNT, HELD_OUT, Planted, arrays, plant_fields
from tests.evaluate.planted import FAST_SAMPLER, trained_of
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
    found = arrays()
    mean, std = (
        torch.tensor([float(part(found[name].astype(np.float64))) for name in ("t2m", "u")])[:, None, None]
        for part in (np.mean, np.std)
    )
    return x[0] * std + mean


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


def test_an_ensemble_depends_on_its_number_and_not_on_what_is_drawn_at_once(trained: Trained, inputs: Inputs) -> None:
    def drawn(numbers: list[int], at_once: int) -> dict[int, Tensor]:
        return dict(draw_ensembles(trained, SAMPLER, inputs, numbers, MEMBERS, seed=7, batch_images=at_once))

    together, apart = drawn([0, 1, 2, 3, 4], 15), drawn([3, 0], 2)
    for number, members in apart.items():
        torch.testing.assert_close(members, together[number], rtol=1e-4, atol=1e-2)
        assert (members[0] - members[1]).abs().max() > 1.0


def test_truths_are_the_held_out_images_as_they_are_stored(inputs: Inputs) -> None:
    assert len(inputs) == HELD_OUT
    truth, found = inputs.truth(range(HELD_OUT)), arrays()
    assert truth is not None
    assert truth.equal(torch.from_numpy(np.stack([found["t2m"], found["u"]], axis=1)[held_out()]))
    assert inputs.mask([0]) is None


def test_units_are_undone_exactly_to_rounding(trained: Trained, inputs: Inputs) -> None:
    truth = inputs.truth([0, 1])
    assert truth is not None
    back = trained.finished(trained.scale.to_unit(truth))
    mean = torch.tensor([280.0, 3.0])[:, None, None]  # subtracted, divided, multiplied, added: four roundings
    assert ((back - truth).abs() <= 4 * torch.finfo(torch.float32).eps * (truth.abs() + mean)).all()


def test_a_run_samples_where_its_data_are_not(planted: Planted, tmp_path: Path) -> None:
    """What is needed of the data set is in the checkpoint and the run's folder."""
    moved = tmp_path / "elsewhere"
    shutil.copytree(planted.run_dir, moved)
    (planted.store.path.parent).rename(hidden := tmp_path / "hidden")
    try:
        trained = load_trained(moved)
        condition = torch.zeros(2, 2, 8, 12)
        torch.testing.assert_close(
            trained.finished(condition)[0, :, 0, 0], torch.tensor([280.0, -3.0]), rtol=0.1, atol=1
        )
        assert trained.conditions.at_rest(
            {"condition": torch.zeros(1, 1, 4, 6), "vector": torch.zeros(1, 1)}, torch.tensor([0]), trained.scale
        ).channels.shape == (1, 6, 8, 12)
        (moved / "constants.npy").unlink()
        with pytest.raises(CheckpointError, match=r"constants\.npy of the run's folder; copy"):
            load_trained(moved)
    finally:
        hidden.rename(planted.store.path.parent)


def test_a_regression_draws_one_image_for_each_input(tmp_path: Path) -> None:
    planted = plant_fields(tmp_path, diffusion={"objective": "regression"})
    trained = load_trained(planted.run_dir)
    inputs = Inputs.held_out(trained)
    ((_, members),) = draw_ensembles(trained, trained.sampler, inputs, [2], 2, seed=0, batch_images=8)
    assert members[0].equal(members[1])
    channels, vector = by_hand(trained, 2)
    unit = trained.unet(torch.cat((torch.zeros(1, 2, 8, 12), channels), 1), torch.zeros(1), vector)
    torch.testing.assert_close(members[0], trained.finished(unit)[0], rtol=1e-4, atol=1e-2)


def test_residuals_are_added_to_their_regression(planted: Planted, trained: Trained, tmp_path: Path) -> None:
    regression = plant_fields(tmp_path, diffusion={"objective": "regression"})
    assert trained.facts is not None
    facts = trained.facts.model_copy(update={"residual_of": str(regression.run_dir)})
    residual = replace(trained, facts=facts)
    inputs = Inputs.held_out(residual)
    ((_, members),) = draw_ensembles(residual, SAMPLER, inputs, [1], 2, seed=0, batch_images=8)
    ((_, alone),) = draw_ensembles(trained, SAMPLER, Inputs.held_out(trained), [1], 2, seed=0, batch_images=8)
    base, truth = load_trained(regression.run_dir), inputs.truth([1])
    ((_, mean),) = draw_ensembles(base, base.sampler, Inputs.held_out(base), [1], 1, seed=0, batch_images=8)
    torch.testing.assert_close(members, alone + mean, rtol=1e-5, atol=1e-3)
    stored = Inputs.held_out(trained).truth([1])
    assert truth is not None and stored is not None
    torch.testing.assert_close(truth, stored + mean, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("kind", ["reduced", "grey", "cut_out"])
def test_conditions_made_from_images_are_those_of_the_held_out_loss(kind: str) -> None:
    """A cut-out rectangle too, since both are keyed by the place among the held-out images."""
    spec = tiny_spec(
        data={"channels": 3, "condition": {"kind": kind, "drop": 0.2}},
        unet={"classes": None},
        train={"label_drop": 0.0},
    )
    trained = trained_of(spec)
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)

    class Held:
        def read(self, positions: Any) -> Any:
            return images.numpy()[positions]

    inputs = Inputs(trained, {"images": Held()}, np.arange(4), "key", are_known=True)
    objective = Denoising(spec, CPU, seed=0)
    batch = MicroBatch(images=images, labels=torch.zeros(4, dtype=torch.int64), index=torch.arange(4))
    x_t, _, vector = objective.inputs(objective.held_out(batch, 5, Stream.HELD_OUT))
    found = inputs.condition([3, 1, 1], CPU)
    assert found.channels.equal(x_t[[3, 1, 1], 3:]) and found.told[0].equal(vector[[3, 1, 1]])
    drawn = draw(trained, FAST_SAMPLER, torch.arange(4), labels=None, seed=0, inputs=inputs, members=2)
    assert drawn.dtype == torch.uint8


def test_a_run_without_held_out_images_or_condition_is_refused(tmp_path: Path) -> None:
    planted = plant_fields(tmp_path, data={"held_out_images": 0})
    with pytest.raises(SpecError, match=r"held out no image"):
        Inputs.held_out(load_trained(planted.run_dir))
    with pytest.raises(SpecError, match=r"trained without a condition"):
        Inputs.held_out(trained_of(tiny_spec()))


def test_images_that_a_run_has_not_learned_are_refused(trained: Trained, digits: DatasetCache) -> None:
    with pytest.raises(DataError, match=r"holds other images than those that .* learned"):
        Inputs.held_out(trained, digits.path)
