"""A source, a noise schedule, an objective and a sampler that the package does not have, registered as theirs are.

As a script: trains with all four, draws and exports. python tests/extended.py RUN_DIR PICTURES.npz
"""

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddpm_ds.cli import main as verbs
from ddpm_ds.cli import train
from ddpm_ds.data.sources import OPENERS
from ddpm_ds.data.sources.arrays import ArraySource
from ddpm_ds.data.spec import DataSpec
from ddpm_ds.diffusion.choices import NOISE, STEPS, TARGETS, NoiseSchedule, Steps, Target, ddim
from ddpm_ds.diffusion.spec import DiffusionSpec
from ddpm_ds.schema.choices import (
    OBJECTIVES,
    SAMPLERS,
    SCHEDULES,
    SOURCES,
    ObjectiveChoice,
    SamplerChoice,
    ScheduleChoice,
    SourceChoice,
)

KEYS = ("data.source", "diffusion.schedule", "diffusion.objective", "sampler.kind")
REGISTRIES: dict[str, dict[str, Any]] = dict(zip(KEYS, (SOURCES, SCHEDULES, OBJECTIVES, SAMPLERS), strict=True))
"""All names, by the key of the spec that takes them."""
DOING: dict[str, dict[str, Any]] = dict(zip(KEYS, (OPENERS, NOISE, TARGETS, STEPS), strict=True))
"""What is behind the names."""
NEW = {"data.source": "npz", "diffusion.schedule": "flat", "diffusion.objective": "minus_eps", "sampler.kind": "jump"}
"""The names that :func:`register` adds."""


def _npz(spec: DataSpec, progress: bool) -> ArraySource:
    assert spec.path is not None
    with np.load(spec.path) as file:
        images, labels = file["images"], file["labels"].astype(np.int64)
    return ArraySource(("dark", "bright"), labels, images)


def _flat(spec: DiffusionSpec) -> Tensor:
    return torch.full((spec.timesteps,), 0.01, dtype=torch.float64)


def register() -> None:
    SOURCES["npz"] = SourceChoice("arrays of numpy", path="FILE.npz")
    OPENERS["npz"] = _npz
    SCHEDULES["flat"] = ScheduleChoice("equal betas")
    NOISE["flat"] = NoiseSchedule(_flat, diffusers=None)
    OBJECTIVES["minus_eps"] = ObjectiveChoice("the noise to take away")
    TARGETS["minus_eps"] = Target(
        target=lambda x0, eps, level: -eps,
        to_x0=lambda prediction, x_t, level: (x_t + level.noise * prediction) / level.signal,
        error=TARGETS["eps"].error,
        diffusers=None,
    )
    SAMPLERS["jump"] = SamplerChoice("ddim in few steps", steps=3)
    STEPS["jump"] = Steps(lambda spec, alpha_bar: [ddim(*pair, eta=0.0) for pair in pairwise(alpha_bar)])


def main(run_dir: Path, pictures: str) -> None:
    register()
    changes = [f"{key}={name}" for key, name in NEW.items()]
    changes += [f"data.path={pictures}", f"data.store_root={run_dir.parent}", "unet.channels=8", "unet.norm_groups=4"]
    changes += ["train.batch_images=8", "train.images=64", "logging.log_every_images=16", "samples.every_images=32"]
    changes += ["samples.count=4", "data.held_out_images=4", "evaluation.every_images=32", "optimizer.warmup_images=0"]
    options = ["--deepspeed_config", "ds_configs/zero0_fp32.json", "--run-dir", str(run_dir)]
    trained = train.main([*options, *(word for change in changes for word in ("--set", change))])
    drawn = verbs.main(["sample", str(run_dir), "--sampler", "jump", "--count", "4", "--device", "cpu"])
    exported = verbs.main(["export", str(run_dir), str(run_dir.parent / "hub"), "--device", "cpu"])
    print(f"exit codes {trained} {drawn} {exported}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
