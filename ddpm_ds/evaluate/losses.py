"""The held-out loss of trained weights, measured as training measures it: a table, JSON and metrics for MLflow."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from ddpm_ds.command_line import aligned
from ddpm_ds.data.held_out import Part
from ddpm_ds.evaluate.outputs import record_child, writing
from ddpm_ds.evaluate.sampling import ALONE, fitting
from ddpm_ds.evaluate.scores import rounded
from ddpm_ds.evaluate.trained import Trained
from ddpm_ds.files import write_file
from ddpm_ds.pipeline.staged import Pipelines
from ddpm_ds.train.held_out_loss import HeldOutLoss
from ddpm_ds.train.objective import encoders_of
from ddpm_ds.version import __version__


@dataclass(frozen=True)
class Losses:
    """Held-out loss of some weights."""

    weights: str
    """Kind of weights, as in :class:`Trained`."""
    values: Mapping[str, float]
    """Values by their names in MLflow, those of training."""


def evaluate_losses(
    trained: Trained, held_out: Part, out: Path | None, batch_images: int, pipelines: Pipelines = ALONE
) -> Losses | None:
    """Measure and record the held-out loss of a run's weights, ``batch_images`` at a time, in a folder of its own.

    It is in ``out``, by default among the run's evaluations. Of several ``pipelines`` all measure and only the first
    does the rest; the others return None.

    Raises:
        LayoutError: the device has no memory for so many images.
        OutputError: the file system refuses.
        PeerLostError: another process has died.
    """
    spec, (store, positions) = trained.spec, held_out
    assert spec is not None, "an export has held out nothing"
    device, origin = next(trained.unet.parameters()).device, Path(trained.origin).resolve().name
    decisive = f"{trained.digest} {trained.precision} {store.key} {positions.tolist()}"
    folder = out or (trained.run_dir or Path()) / "evaluations"
    folder /= f"{origin}-{trained.weights}-loss-{hashlib.sha256(decisive.encode()).hexdigest()[:8]}"
    if pipelines.is_first:
        print(
            f"weights    {trained.weights} of {trained.origin}, {trained.precision} on {device.type}\n"
            f"held out   {len(positions):,} images of {store.path}\n"
            f"outputs    {folder}",
            flush=True,
        )
    loss = HeldOutLoss(spec, device, store, positions, encoders_of(spec, device), images=batch_images)
    sums, mine = loss.zeros(), range(pipelines.number, loss.calls, pipelines.count)
    with torch.inference_mode(), fitting(batch_images):
        for call in tqdm(mine, "measuring", unit=" batches", disable=None if pipelines.is_first else True):
            loss.add(sums, call, trained.unet(*loss.inputs(call), context=loss.context(call)).float())
    found = Losses(trained.weights, loss.values(pipelines.total(sums)))
    if not pipelines.is_first:
        return None
    facts = {
        **{name: getattr(trained, name) for name in ("origin", "weights", "images_seen", "digest", "precision")},
        "reference": {"store": str(store.path), "images": len(positions), "sha256": store.meta.sha256},
        "version": {"ddpm_ds": __version__, "torch": torch.__version__},
    }
    path = folder / "scores.json"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_file(path, (json.dumps({**facts, "scores": found.values}, indent=2) + "\n").encode())
    record_child(trained, "evaluate", facts, metrics=found.values, artifacts={path: ""})
    return found


def loss_table(results: Sequence[Losses]) -> str:
    """Return a table with a line for each value, and a column for each kind of weights."""
    rows = [("held-out loss", *(found.weights for found in results))]
    rows += [(name, *(rounded(found.values[name]) for found in results)) for name in results[0].values]
    return "\n".join(aligned(rows, {0}))
