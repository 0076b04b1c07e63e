"""A run of fields with everything that a condition can have, that nobody trained: data, cache and checkpoint."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddpm_ds.config.spec import RunSpec
from ddpm_ds.data.cache import CONSTANTS, DatasetCache
from ddpm_ds.data.held_out import checksums_of
from ddpm_ds.data.prepare import prepare
from ddpm_ds.diffusion.spec import SamplerSpec
from ddpm_ds.evaluate.inputs import Inputs
from ddpm_ds.evaluate.sampling import Setup, draw
from ddpm_ds.evaluate.trained import Trained
from tests.evaluate.planted import plant
from tests.launching import tiny_spec

COUNT, HELD_OUT = 24, 5
UNLABELLED_UNET: dict[str, Any] = {"classes": None, "attention_resolutions": [], "attention_levels": [1]}
FIELDS: dict[str, Any] = {
    **{"source": "arrays", "values": "float32", "normalise": "statistics", "image_size": [8, 12], "channels": 2},
    **{"variables": ["t2m", "u"], "horizontal_flips": False, "held_out_images": HELD_OUT},
}
CONDITION: dict[str, Any] = {
    **{"kind": "stored", "variables": ["coarse"], "channels": 1, "normalise": "range", "vector": ["lead"]},
    **{"vector_size": 1, "constants": ["land"], "constant_channels": 1, "grid_channels": 4, "drop": 0.1},
}


def arrays() -> dict[str, Any]:
    """Fields of 8x12 pixels with a condition of 4x6, in units far from those of a U-Net."""
    draws = np.random.default_rng(3)
    found = {
        "t2m": draws.normal(280.0, 12.0, (COUNT, 8, 12)),
        "u": draws.normal(-3.0, 5.0, (COUNT, 8, 12)),
        "coarse": draws.normal(1e4, 300.0, (COUNT, 4, 6)),
        "lead": draws.integers(0, 5, COUNT),
        "land": draws.random((8, 12)),
    }
    return {name: values.astype(np.float32) for name, values in found.items()}


def field_spec(folder: Path, condition: dict[str, Any] | None = CONDITION, **sections: dict[str, Any]) -> RunSpec:
    """The spec of a run on these arrays, which are written into ``folder``."""
    file = folder / "fields.npz"
    if not file.exists():
        np.savez(file, **arrays())
    data = {**FIELDS, "path": str(file), "store_root": str(folder / "data"), "condition": condition}
    return tiny_spec(
        data={**data, **sections.pop("data", {})},
        unet={**UNLABELLED_UNET, **sections.pop("unet", {})},
        train={"label_drop": 0.0, **sections.pop("train", {})},
        sampler={"clip": "none", **sections.pop("sampler", {})},
        **sections,
    )


@dataclass(frozen=True)
class Planted:
    """A planted run."""

    run_dir: Path
    spec: RunSpec
    store: DatasetCache


def plant_fields(folder: Path, condition: dict[str, Any] | None = CONDITION, **sections: dict[str, Any]) -> Planted:
    """Prepare the arrays, and save a checkpoint of a run on them in ``folder``/run."""
    spec = field_spec(folder, condition, **sections)
    store = prepare(spec.data)
    return plant_on(store, folder / "run", spec)


def plant_on(store: DatasetCache, run_dir: Path, spec: RunSpec, held_out: DatasetCache | None = None) -> Planted:
    """Save a checkpoint of a run on prepared images, and on ``held_out`` images of a data set of their own."""
    plant(run_dir, data_sha256=checksums_of(store, held_out or store), facts=store.meta.facts, **sections_of(spec))
    if store.constants is not None:
        shutil.copy(store.path / CONSTANTS, run_dir / CONSTANTS)
    return Planted(run_dir, spec, store)


def sections_of(spec: RunSpec) -> dict[str, Any]:
    """The sections of a spec, by name."""
    return {name: value for name, value in spec.model_dump(mode="json").items() if name != "name"}


def draw_ensembles(
    trained: Trained,
    sampler: SamplerSpec,
    inputs: Inputs,
    numbers: Sequence[int],
    members: int,
    *,
    seed: int,
    batch_images: int,
) -> Iterator[tuple[int, Tensor]]:
    """Yield the number of each input in turn with its members, (K, C, H, W) float32, drawn in batches of any size."""
    wanted = torch.tensor([number * members + member for number in numbers for member in range(members)])
    setup, parts = Setup(trained, sampler, inputs=inputs), []
    for index in wanted.split(batch_images):
        labels = None if inputs.labels is None else torch.from_numpy(inputs.labels[(index // members).numpy()])
        parts.append(draw(setup, index, labels=labels, seed=seed, members=members).float())
    yield from zip(numbers, torch.cat(parts).unflatten(0, (-1, members)), strict=True)
