"""``ddpm-ds prepare --residual``: residuals of a trained regression, which samples and truths add up again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from ddpm_ds.cli.main import main
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.data.fields import fields_of
from ddpm_ds.data.loader import MicroBatch
from ddpm_ds.data.prepare import prepare
from ddpm_ds.errors import CheckpointError, SpecError
from ddpm_ds.evaluate.inputs import Inputs, TrainedRegression
from ddpm_ds.evaluate.trained import Trained, load_trained
from ddpm_ds.train.objective import Denoising
from tests.evaluate.conditioned import CONDITION, COUNT, Planted, arrays, field_spec, plant_fields, plant_on

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def mean(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    """A regression that nobody trained."""
    return plant_fields(tmp_path_factory.mktemp("fields"), diffusion={"objective": "regression"})


@pytest.fixture(scope="module")
def spec(mean: Planted) -> RunSpec:
    """The spec of a diffusion of its residuals."""
    return field_spec(mean.run_dir.parent, data={"residual_of": str(mean.run_dir)})


def truths() -> np.ndarray:
    """All fields, (N, 2, 8, 12)."""
    return np.stack([arrays()["t2m"], arrays()["u"]], axis=1)


def by_hand(mean: Planted, regression: Trained) -> np.ndarray:
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
    predicted = by_hand(mean, regression)
    np.testing.assert_allclose(store.images[:] + predicted, truths(), rtol=1e-5, atol=1e-3)
    assert abs(store.meta.statistics["images"].mean[0] - (truths() - predicted)[:, 0].mean()) < 1e-2

    planted = plant_on(store, tmp_path / "run", spec)
    trained = load_trained(planted.run_dir)
    inputs = Inputs.held_out(trained)
    held_out = inputs.truth(range(len(inputs)))
    assert held_out is not None
    np.testing.assert_allclose(held_out.numpy(), truths()[inputs.positions], rtol=1e-5, atol=1e-3)


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
    assert main(["prepare", "--spec", str(tmp_path / "spec.yaml"), "--residual", str(diffusion.run_dir)]) == 2
    said = capsys.readouterr().err
    assert "is no regression: its diffusion.objective is eps; name a run with diffusion.objective = regression" in said
    data = fields_of(spec.data).model_copy(update={"residual_of": tmp_path / "nowhere"})
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        TrainedRegression(data, CPU)
