"""Ensembles: ``ddpm-ds evaluate`` with conditions, and scores against loops, closed forms and a known posterior."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ddpm_ds.data.prepare import prepare
from ddpm_ds.diffusion.spec import SamplerSpec
from ddpm_ds.evaluate import ensembles
from ddpm_ds.evaluate.ensembles import crps, power_spectrum, rings
from ddpm_ds.evaluate.inputs import Inputs
from ddpm_ds.evaluate.trained import load_trained
from ddpm_ds.ground.errors import EvaluationError
from ddpm_ds.ground.units import aligned
from tests import gaussian_fields
from tests.evaluate.conditioned import HELD_OUT, arrays, draw_ensembles, plant_fields, plant_on
from tests.evaluate.planted import UNLABELLED, evaluate_verb, report
from tests.gaussian_fields import Array, field_scores, verdict
from tests.launching import tiny_spec

SAMPLER: dict[str, Any] = {"kind": "ddim", "steps": 2, "clip": "none"}
MEMBERS = 3
Evaluate = Callable[..., str]


@pytest.fixture(scope="module")
def fields(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of fields of two channels."""
    return plant_fields(tmp_path_factory.mktemp("fields")).run_dir


@pytest.fixture(autouse=True)
def _few_plots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spectra, which take most of an evaluation of a tiny run, are drawn where a test looks at them."""
    if request.function is not test_the_members_of_every_held_out_field_are_scored_against_it:
        monkeypatch.setattr(ensembles, "spectra_plot", lambda spectra, channels, path: path.touch())


@pytest.fixture
def evaluate(trackers: list[Any], capfd: pytest.CaptureFixture[str]) -> Evaluate:
    return evaluate_verb(capfd)


def drawn(run_dir: Path, members: int, **sampler: Any) -> tuple[Any, Any]:
    """Members (K, N, C, H, W) of all held-out inputs, and their truths (N, C, H, W)."""
    trained = load_trained(run_dir)
    inputs, how = Inputs.held_out(trained), SamplerSpec(**{**SAMPLER, **sampler})
    every = range(len(inputs))
    found = draw_ensembles(trained, how, inputs, every, members, seed=0, batch_images=64)
    return torch.stack([members for _, members in found], dim=1), inputs.truth(every)


@pytest.mark.parametrize("space", [1, 2])
def test_the_members_of_every_held_out_field_are_scored_against_it(
    fields: Path, evaluate: Evaluate, trackers: list[Any], tmp_path: Path, space: int
) -> None:
    out = evaluate(fields, "--members", MEMBERS, "--space", space, "--out", tmp_path / "here")
    expected = field_scores(*drawn(fields, MEMBERS), channels=["t2m", "u"])
    content = report(tmp_path / "here")
    scores = content["scores"]
    for found, true in ((scores["total"], expected.total), (scores["channels"]["u"], expected.channels["u"])):
        assert list(found.values()) == pytest.approx(list(vars(true).values()), rel=1e-4)
    assert expected.spectra is not None
    assert np.allclose(scores["spectra"]["members"], expected.spectra.members, rtol=1e-3)
    assert (scores["inputs"], scores["members"], content["seed"], content["count"]) == (HELD_OUT, MEMBERS, 0, 15)
    (child,) = trackers
    assert child.kind == "evaluate" and child.logged["eval/crps_channel/u"] == scores["channels"]["u"]["crps"]
    assert child.artifacts == [("scores.json", ""), ("samples.png", ""), ("spectra.png", "")]
    (plot,) = (tmp_path / "here").glob("*/spectra.png")
    assert Image.open(plot).width > 500
    lines = out.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("channel"))
    table = [line.split() for line in lines[first:] if "  " in line]
    assert table[0][:3] == ["channel", "rmse", "crps"] and [row[0] for row in table[1:]] == ["t2m", "u", "all"]
    assert table[1][-6:] == [str(HELD_OUT), str(MEMBERS), "ddim", "2", "ema", "-"]


def test_inputs_of_a_file_are_scored_if_it_has_true_images(fields: Path, evaluate: Evaluate, tmp_path: Path) -> None:
    others = {name: values[::-1] if len(values) > 8 else values for name, values in arrays().items()}
    np.savez(tmp_path / "others.npz", **others)
    evaluate(fields, "--conditions", tmp_path / "others.npz", "--count", 2, "--members", 1, "--out", tmp_path)
    (images,) = tmp_path.glob("*/drawn/images.npy")
    truths = np.stack([others["t2m"][:2], others["u"][:2]], axis=1)
    total = report(tmp_path)["scores"]["total"]
    assert total["crps"] == pytest.approx(np.abs(np.load(images) - truths).mean(), rel=1e-5)
    np.savez(tmp_path / "unknown.npz", **{name: others[name] for name in ("coarse", "lead", "land")})
    printed = evaluate(fields, "--conditions", tmp_path / "unknown.npz", code=2)
    assert "--conditions has no true images to compare with; leave it out for those held out" in printed


def test_pictures_are_scored_by_colour(evaluate: Evaluate, tmp_path: Path) -> None:
    """Pictures of 16x16 pixels, which are drawn for pictures of 4x4."""
    np.save(tmp_path / "pixels.npy", np.random.default_rng(0).integers(0, 256, (12, 16, 16, 3), dtype=np.uint8))
    data = {"source": "arrays", "path": str(tmp_path / "pixels.npy"), "image_size": 16, "channels": 3}
    data |= {"horizontal_flips": False, "held_out_images": 4, "store_root": str(tmp_path / "data")}
    unet = {"classes": None, "attention_resolutions": [8]}
    spec = tiny_spec(data={**data, "condition": {"kind": "reduced", "factor": 4}}, **{**UNLABELLED, "unet": unet})
    run_dir = plant_on(prepare(spec.data), tmp_path / "run", spec).run_dir
    evaluate(run_dir, "--members", 2, "--clip", "static", "--out", tmp_path)
    members, truths = drawn(run_dir, 2, clip="static")
    scores = report(tmp_path)["scores"]
    expected = field_scores(members.float(), truths.float()).total
    assert scores["total"]["crps"] == pytest.approx(expected.crps, rel=1e-4)
    assert list(scores["channels"]) == ["red", "green", "blue"]


def test_masked_pixels_are_not_scored(tmp_path: Path, evaluate: Evaluate) -> None:
    holed = arrays()
    holed["t2m"][:, 2:] = np.nan
    np.savez(tmp_path / "fields.npz", **holed)
    run_dir = plant_fields(tmp_path, data={"mask": "nan"}).run_dir
    evaluate(run_dir, "--members", 2, "--out", tmp_path / "here")
    members, truths = drawn(run_dir, 2)
    expected = field_scores(members[:, :, :1, :2], truths[:, :1, :2]).total
    scores = report(tmp_path / "here")["scores"]
    assert list(scores["channels"]["t2m"].values()) == pytest.approx(list(vars(expected).values()), rel=1e-4)
    assert scores["spectra"] is None and not list(tmp_path.glob("here/*/spectra.png"))


def test_a_regression_has_one_member_without_a_spread(tmp_path: Path, evaluate: Evaluate) -> None:
    planted = plant_fields(tmp_path, diffusion={"objective": "regression"})
    evaluate(planted.run_dir, "--out", tmp_path / "here", "--steps", 1)
    total = report(tmp_path / "here")["scores"]["total"]
    assert total["spread_over_skill"] is None and total["crps"] > 0
    printed = evaluate(planted.run_dir, "--members", 2, "--steps", 1, code=2)
    assert "--members 2: a regression draws one image of each input; use 1" in printed


@pytest.mark.parametrize(
    "options, message",
    [
        (("--metrics", "fid,pixel"), "--metrics fid,pixel is an option for runs without conditions, and"),
        (("--inception-weights", "file.pth"), "--inception-weights file.pth is an option for runs without conditions"),
        (("--count", HELD_OUT + 1), f"--count {HELD_OUT + 1}: --conditions has {HELD_OUT} inputs; name some of these"),
        (("--members", "0"), "'0' is not a whole number from 1 to 1,000,000"),
        (("--members", "2"), "was trained without conditions; leave it out"),
        (("--conditions", "x.npz"), "was trained without conditions; leave it out"),
    ],
)
def test_options_of_runs_with_and_without_conditions_are_refused_for_the_others(
    fields: Path, without_classes: Path, evaluate: Evaluate, options: tuple[object, ...], message: str
) -> None:
    run_dir = without_classes if "without conditions;" in message else fields
    assert message in evaluate(run_dir, *options, code=2)
    assert not (run_dir / "evaluations").exists()


K, N, C, H, W = 5, 3, 2, 6, 4
ROUNDING = 1e-12
"""Relative error of a float64 sum of a few thousand terms, with room."""


def random_fields(seed: int = 0) -> tuple[Array, Array, Array]:
    """Members, truths, and masks by channel."""
    generator = np.random.default_rng(seed)
    members, truths = generator.standard_normal((K, N, C, H, W)), generator.standard_normal((N, C, H, W))
    return members, truths, (generator.random((N, C, H, W)) < 0.7).astype(float)


def by_loops(members: Array, truths: Array, masks: Array, channels: range) -> list[float]:
    """The scores, pixel by pixel and pair by pair."""
    rows = []
    for n, c, h, w in itertools.product(range(N), channels, range(H), range(W)):
        if masks[n, c, h, w]:
            drawn, true = [float(x) for x in members[:, n, c, h, w]], float(truths[n, c, h, w])
            mean = sum(drawn) / K
            pairs = sum(abs(one - other) for one in drawn for other in drawn) / (K * (K - 1))
            score = sum(abs(one - true) for one in drawn) / K - pairs / 2
            variance = sum((one - mean) ** 2 for one in drawn) / (K - 1)
            rows.append(((mean - true) ** 2, score, variance))
    squared, score, variance = (sum(column) / len(rows) for column in zip(*rows, strict=True))
    ratio = math.sqrt(variance / squared * (K + 1) / K)
    return [math.sqrt(squared), score, ratio]


def test_scores_of_each_channel_and_of_all_equal_plain_loops() -> None:
    members, truths, masks = random_fields()
    holes = np.where(masks == 0, np.nan, truths)  # what does not count may be anything
    found = field_scores(members, holes, masks, channels=["u", "v"])
    numbers = range(2), range(1), range(1, 2)
    for scores, channels in zip((found.total, *found.channels.values()), numbers, strict=True):
        expected = by_loops(members, truths, masks, channels)
        assert list(vars(scores).values()) == pytest.approx(expected, rel=ROUNDING)
    assert (found.inputs, found.members, list(found.channels), found.spectra) == (N, K, ["u", "v"], None)


def test_float32_and_float16_are_added_up_in_float64() -> None:
    for kind in (np.float32, np.float16):
        narrow, true = ((1000.0 + values).astype(kind) for values in random_fields()[:2])
        assert field_scores(narrow, true) == field_scores(narrow.astype(float), true.astype(float))


def test_one_member_has_an_absolute_error_and_no_spread() -> None:
    members, truths, _ = random_fields()
    scores = field_scores(members[:1], truths)
    assert scores.total.crps == pytest.approx(np.abs(members[0] - truths).mean())
    assert scores.total.spread_over_skill is None
    assert "eval/spread_over_skill" not in scores.metrics() and scores.rows()[1][-1] == "-"
    exact = field_scores(np.stack([truths] * 2), truths).total
    assert (exact.rmse, exact.spread_over_skill) == (0.0, None)


@pytest.mark.parametrize("truth", [-2.0, 0.0, 0.7])
def test_crps_of_few_gaussian_draws_is_the_closed_form(truth: float) -> None:
    k, pixels = 4, 100_000
    drawn = torch.from_numpy(1.0 + 2.0 * np.random.default_rng(1).standard_normal((k, pixels)))
    true = torch.full((pixels,), truth, dtype=torch.float64)
    expected = gaussian_fields.gaussian_crps(1.0, 2.0, np.array([truth])).item()
    estimates = crps(drawn, true)
    tolerance = 5.0 * float(estimates.std()) / math.sqrt(pixels)  # of the mean of independent estimates
    assert tolerance < 0.03
    assert float(estimates.mean()) == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize(("height", "width"), [(8, 8), (6, 15), (16, 9), (1, 7)])
def test_the_power_of_all_wavenumbers_adds_up_to_the_mean_square(height: int, width: int) -> None:
    fields = 1.0 + np.random.default_rng(0).standard_normal((3, height, width))
    modes = np.bincount(rings(height, width).ravel())
    assert modes.sum() == height * width
    power = power_spectrum(torch.from_numpy(fields))
    assert power.shape == (3, len(modes))
    assert np.allclose(power @ modes, (fields**2).mean(axis=(1, 2)), rtol=ROUNDING)


@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_waves_of_one_length_have_one_wavenumber_in_either_direction_of_a_rectangle(shape: tuple[int, int]) -> None:
    places = np.indices(shape)
    waves = np.stack([np.cos(2.0 * np.pi * place / 4.0) for place in places])  # 3 cycles in 12 pixels
    modes = np.bincount(rings(*shape).ravel())
    energy = power_spectrum(torch.from_numpy(waves)) * modes
    expected = np.zeros_like(energy)
    expected[:, 3] = 0.5
    assert np.allclose(energy, expected, atol=ROUNDING)
    assert power_spectrum(torch.full((1, *shape), 2.0))[0] == pytest.approx([4.0] + [0.0] * (len(modes) - 1))


def test_spectra_are_means_over_inputs_of_members_of_their_mean_and_of_the_truth() -> None:
    members, truths, masks = random_fields()
    spectra = field_scores(members, truths).spectra
    assert spectra is not None
    mean = members.mean(axis=0)
    for found, fields in ((spectra.members, members), (spectra.mean, mean[None]), (spectra.truth, truths[None])):
        for channel in range(C):
            each = [power_spectrum(torch.from_numpy(fields[:, n, channel])).mean(axis=0) for n in range(N)]
            assert np.allclose(found[channel], np.mean(each, axis=0), rtol=ROUNDING)
    assert sum(spectra.modes) == H * W and len(spectra.modes) == len(spectra.truth[0])
    assert field_scores(members, truths, masks).spectra is None, "an input with holes has no Fourier modes"


def test_the_table_and_the_names_in_mlflow_have_each_channel() -> None:
    members, truths, _ = random_fields()
    scores = field_scores(members, truths, channels=["t2m", "wind/10m @ sea"])
    header, *rows = scores.rows()
    assert header == ("channel", "rmse", "crps", "spread over skill")
    assert [row[0] for row in rows] == ["t2m", "wind/10m @ sea", "all"]
    assert rows[0][2] == f"{scores.channels['t2m'].crps:.4g}" and len(aligned(scores.rows(), {0})) == 4
    metrics = scores.metrics()
    assert metrics["eval/crps"] == scores.total.crps and len(metrics) == 9
    assert metrics["eval/rmse_channel/wind_10m _ sea"] == scores.channels["wind/10m @ sea"].rmse
    assert len(field_scores(members[:, :, :1], truths[:, :1]).rows()) == 2, "one channel is all"


def test_a_channel_without_pixels_that_count_is_refused_by_name() -> None:
    members, truths, masks = random_fields()
    with pytest.raises(EvaluationError, match="no pixel of channel '1' counts"):
        field_scores(members, truths, masks * [[[1]], [[0]]])


@pytest.mark.parametrize("seed", range(3))
def test_exact_draws_of_a_posterior_pass_and_draws_shifted_or_scaled_by_15_percent_fail(seed: int) -> None:
    generator = np.random.default_rng(seed)
    truths = gaussian_fields.draw_fields(128, generator)
    observations = gaussian_fields.observe(truths, generator)
    members = gaussian_fields.draw_posterior(32, observations, generator)
    sd, mean = gaussian_fields.posterior_sd(), gaussian_fields.posterior_mean(observations)
    exact = verdict(members, truths, observations)
    # The square of mean_error has a standard deviation of sqrt(2 / (128 x 42)) / 32 = 0.0006, where 42 is the number
    # of independent pixels, (trace P)^2 / trace P^2. So exact draws stay below sqrt(5 x 0.0006), and a shift of 0.15
    # stays above 0.14, since its own part has 0.15^2 = 0.0225 and a mixed one 2 x 0.15 / sqrt(32 x 128 x 2).
    assert exact.passes and exact.mean_error < 0.055
    shifted = verdict(members + 0.15 * sd, truths, observations)
    assert 0.13 < shifted.mean_error < 0.17 and not shifted.passes
    assert shifted.spread == pytest.approx(exact.spread), "only the mean tells"
    for factor in (1.15, 0.85):
        scaled = verdict(mean + factor * (members - mean), truths, observations)
        assert scaled.spread == pytest.approx(factor * exact.spread, rel=0.01) and not scaled.passes
        assert scaled.mean_error < 0.1 and abs(scaled.spread_over_skill - 1.0) > 0.1
