"""A diffusion that learns fields whose posterior is known in closed form draws from that posterior.

The quick test trains 200 steps. Over five seeds its ensembles had a mean error of 0.18 to 0.21 (see
:class:`tests.gaussian_fields.Verdict`), a spread of 1.09 to 1.13, a correlation of their means with the posterior's of
0.980 to 0.981 and a CRPS of 1.025 to 1.032 of the posterior's; limits are about twice as far from the exact draws. The
long one trains for about a quarter of an hour on two idle cores, and asks for what the exact draws have, within 10 %.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from ddpm_ds.evaluate.inputs import Inputs
from ddpm_ds.evaluate.trained import load_trained
from tests.evaluate.conditioned import draw_ensembles
from tests.gaussian_fields import Array, posterior_mean, posterior_sd, verdict, write_pairs
from tests.launching import REPOSITORY, place_empty_store, run_ranks
from tests.terminal import PROGRAM

HOURS = 4 * 3600.0
SPEC: dict[str, Any] = {
    "name": "gaussian",
    "data": {
        "source": "arrays",
        "variables": ["image"],
        "values": "float32",
        "normalise": "statistics",
        "image_size": 16,
        "channels": 1,
        "held_out": "last",
        "condition": {"kind": "stored", "channels": 1, "normalise": "statistics"},
    },
    "unet": {"channels": 16, "multipliers": [1, 2], "blocks_per_level": 1, "middle_attention": False, "norm_groups": 4},
    "diffusion": {"schedule": "edm", "objective": "v", "sigma_data": 1.0, "noise_mean": 0.0, "noise_std": 1.5},
    "optimizer": {"learning_rate": 4e-3, "betas": [0.9, 0.99], "warmup_images": 160, "decay": "cosine"},
    "train": {"images": 3200, "batch_images": 16},
    "ema": {"halflife_images": 200},
    "sampler": {"kind": "dpm_solver", "steps": 12, "sigma_min": 0.01, "clip": "none"},
    "samples": {"every_images": None},
    "evaluation": {"every_images": None},
    "logging": {"log_every_images": 640, "experiment": "gaussian"},
}
FULL: dict[str, dict[str, Any]] = {
    "unet": {"multipliers": [1, 3, 3], "attention_levels": [2], "middle_attention": True, "norm_groups": 8},
    "optimizer": {"learning_rate": 2e-3, "warmup_images": 3200},
    "train": {"images": 250_000, "batch_images": 32},
    "ema": {"halflife_images": 12_500, "rampup_fraction": 0.05},
    "sampler": {"steps": 24},
    "logging": {"log_every_images": 12_800},
}
"""What the full job has instead: 0.57 M parameters."""
REGRESSION: dict[str, dict[str, Any]] = {
    "diffusion": {"schedule": "linear", "objective": "regression", "noise_mean": None, "noise_std": None},
    "sampler": {"steps": None},
    "train": {"images": 64_000},
    "ema": {"halflife_images": 3200},
}
"""What a regression has instead of the full job's."""


def write_spec(folder: Path, held_out: int, fields: int, *changes: dict[str, dict[str, Any]]) -> Path:
    """Write pairs, unless they are there, and a spec that learns all but the last of them."""
    path = folder / "pairs.npz"
    if not path.exists():
        write_pairs(path, fields + held_out, seed=0)
    values = {name: dict(section) if isinstance(section, dict) else section for name, section in SPEC.items()}
    values["data"] |= {"path": str(path), "store_root": str(folder / "data"), "held_out_images": held_out}
    for change in changes:
        for name, section in change.items():
            values[name] |= section
    file = folder / f"spec{len(changes)}.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def truths(folder: Path, held_out: int) -> tuple[Array, Array]:
    """The held-out fields (N, 16, 16) and their observations (N, 4, 4)."""
    pairs = np.load(folder / "pairs.npz")
    fields, observations = (pairs[name][-held_out:, 0].astype(np.float64) for name in ("image", "condition"))
    return fields, observations


def test_a_short_training_comes_near_the_posterior(tmp_path: Path) -> None:
    inputs_count, members = 16, 8
    spec, run_dir = write_spec(tmp_path, inputs_count, 4096), tmp_path / "run"
    place_empty_store(tmp_path)
    config = REPOSITORY / "ds_configs" / "zero0_fp32.json"
    options = ("--deepspeed_config", str(config), "--spec", str(spec), "--run-dir", str(run_dir))
    done = run_ranks(1, REPOSITORY / "launch" / "train.py", *options, MLFLOW_TRACKING_URI="")
    assert done.returncode == 0, done.stderr
    trained = load_trained(run_dir)
    inputs = Inputs.held_out(trained)
    drawn = draw_ensembles(trained, trained.sampler, inputs, range(inputs_count), members, seed=0, batch_images=128)
    ensembles = torch.stack([ensemble[:, 0] for _, ensemble in drawn], dim=1).double().numpy()  # (K, N, 16, 16)
    fields, observations = truths(tmp_path, inputs_count)
    found = verdict(ensembles, fields, observations)
    means = np.corrcoef(ensembles.mean(axis=0).ravel(), posterior_mean(observations).ravel())[0, 1]
    assert found.mean_error < 0.4 and means > 0.96, found
    assert abs(found.spread - 1.0) < 0.25 and abs(found.spread_over_skill - 1.0) < 0.25 and found.crps < 1.07, found


def ddpm_ds(folder: Path, *arguments: object) -> None:
    """Type a command, with all cores of this machine."""
    environment = {**os.environ, "MLFLOW_TRACKING_URI": "", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [*PROGRAM, *map(str, arguments)], cwd=folder, env=environment, capture_output=True, text=True, timeout=HOURS
    )
    assert done.returncode == 0, done.stderr[-6000:]


def train(folder: Path, spec: Path, name: str) -> None:
    """Train a run by the command line."""
    config = REPOSITORY / "ds_configs" / "zero0_fp32.json"
    ddpm_ds(folder, "train", "--deepspeed_config", config, "--spec", spec, "--run-dir", folder / name)


@pytest.mark.launch
@pytest.mark.long
def test_the_full_job_draws_from_the_posterior_and_a_regression_finds_its_mean(tmp_path: Path) -> None:
    inputs_count, members = 128, 32
    train(tmp_path, write_spec(tmp_path, inputs_count, 20_000, FULL), "diffusion")
    train(tmp_path, write_spec(tmp_path, inputs_count, 20_000, FULL, REGRESSION), "mean")
    ddpm_ds(tmp_path, "evaluate", tmp_path / "diffusion", "--members", members, "--batch-images", 256)
    ddpm_ds(tmp_path, "evaluate", tmp_path / "mean")
    fields, observations = truths(tmp_path, inputs_count)

    (drawn,) = tmp_path.glob("diffusion/evaluations/*/drawn/images.npy")
    ensembles = np.load(drawn).reshape(inputs_count, members, 16, 16).swapaxes(0, 1).astype(np.float64)
    found = verdict(ensembles, fields, observations)
    print(found)
    assert found.passes, found
    scores = json.loads((drawn.parent.parent / "scores.json").read_text())["scores"]["total"]
    assert scores["spread_over_skill"] == pytest.approx(found.spread_over_skill, rel=1e-4)

    (predicted,) = tmp_path.glob("mean/evaluations/*/drawn/images.npy")
    errors = np.load(predicted)[:, 0].astype(np.float64) - posterior_mean(observations)
    error = float(np.sqrt((errors**2).mean() / (posterior_sd() ** 2).mean()))
    print(f"a regression errs by {error:.4f} of the posterior's standard deviation")
    assert error <= 0.1
