"""Exports as models of MLflow, from which ``mlflow.pyfunc.load_model`` samples.

A model is the folder of an export, the run's sampler, and the name of this module, which MLflow imports to load it:
nothing is pickled, and no code is read from MLflow.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from ddpm_ds.config.spec import SamplerSpec
from ddpm_ds.device import choose_device
from ddpm_ds.errors import OutputError, SpecError
from ddpm_ds.evaluate.diffusers.text_pipeline import encoders_of
from ddpm_ds.evaluate.sampling import sample
from ddpm_ds.evaluate.trained import Trained, load_trained
from ddpm_ds.secret import public_address
from ddpm_ds.tracking.address import reason, resolve_uri
from ddpm_ds.version import __version__

if TYPE_CHECKING:
    from pandas import DataFrame


def check_register(name: str, trained: Trained) -> None:
    """Raise SpecError unless the export of ``trained`` can become a version of the model ``name``."""
    fault = None
    if trained.run_dir is None:
        fault = f"{trained.origin} is not in the folder of a run, whose MLflow run would hold the model"
    elif trained.is_conditioned:
        fault = f"{trained.origin} draws for conditions, and a model for the rows of a table"
    elif trained.unet_spec.text is not None and not encoders_of(trained):
        fault = f"the text encoders of {trained.origin} are not on this host"
    if fault is not None:
        raise SpecError(f"--register {name}: {fault}; leave it out")


def register(name: str, trained: Trained, folder: Path, run_id: str | None) -> str:
    """Log the export of ``trained`` in ``folder`` as a model of a run, and return its address as a version of ``name``.

    Raises:
        OutputError: MLflow does not answer, or refuses.
    """
    import mlflow

    if run_id is None or trained.run_dir is None:
        raise OutputError(f"--register {name} needs a run in MLflow, which has none; {folder} is whole")
    uri = resolve_uri(trained.run_dir.parent.resolve())
    for talkative in ("mlflow", "alembic"):
        logging.getLogger(talkative).setLevel(logging.ERROR)
    try:
        mlflow.set_tracking_uri(uri)
        with warnings.catch_warnings(action="ignore"), mlflow.start_run(run_id, log_system_metrics=False):
            made = mlflow.pyfunc.log_model(
                name=name.replace(" ", "_"),
                data_path=str(folder),
                registered_model_name=name,
                await_registration_for=0,
                **_described(trained),
            )
    except Exception as error:  # MLflow raises what its stores raise
        raise OutputError(
            f"--register {name}: MLflow at {public_address(uri)} fails ({reason(error)}); {folder} is whole"
        ) from None
    return f"models:/{name}/{made.registered_model_version}"


def _described(trained: Trained) -> dict[str, Any]:
    """Return what MLflow keeps of a model besides its files: how it is loaded, and what it takes and returns."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema, TensorSpec

    columns = {"count": "long", "seed": "long"}
    extras = [] if trained.autoencoder is None else ["latents"]
    if trained.unet_spec.classes is not None:
        columns["label"] = "long"
    if trained.unet_spec.text is not None:
        columns["prompt"] = "string"
        extras.append("text")
    colours, height, width = trained.picture_shape
    drawn = TensorSpec(np.dtype(np.float32 if trained.are_fields else np.uint8), (-1, height, width, colours))
    sampler = trained.sampler.model_copy(update={"steps": trained.sampler.steps_of(trained.diffusion)})
    needs = ",".join(extras)
    numbers = [ParamSpec("steps", "long", sampler.steps), ParamSpec("guidance", "double", sampler.guidance)]
    return {
        "loader_module": __name__,
        "model_config": {"sampler": sampler.model_dump(mode="json")},
        "signature": ModelSignature(
            Schema([ColSpec(kind, name, required=False) for name, kind in columns.items()]),
            Schema([drawn]),
            ParamSchema(numbers),
        ),
        "pip_requirements": [f"ddpm_ds[{needs}]=={__version__}" if needs else f"ddpm_ds=={__version__}"],
    }


def _load_pyfunc(path: str, model_config: Mapping[str, Any]) -> Drawer:
    """Load a model for MLflow."""
    trained = load_trained(path, device=choose_device("auto"))
    return Drawer(trained, SamplerSpec.model_validate(model_config["sampler"], strict=False))


class Drawer:
    """Model that draws images for the rows of a table."""

    def __init__(self, trained: Trained, sampler: SamplerSpec) -> None:
        self._trained, self._sampler = trained, sampler

    def predict(self, table: DataFrame, params: Mapping[str, Any] | None = None) -> npt.NDArray[Any]:
        """Return images (N, H, W, C), uint8 or, in physical units for fields, float32.

        Each row of ``table`` draws the first ``count`` (1) images of a ``seed`` (0), of a ``label`` or for a
        ``prompt``; without these of none. ``params`` may have ``steps`` and ``guidance`` of the sampler.

        Raises:
            SpecError: there is no such label, or the sampler can't take so many steps or such a guidance.
        """
        sampler = SamplerSpec.model_validate({**self._sampler.model_dump(), **(params or {})})
        drawn = []
        for row in table.to_dict("records"):
            how: dict[str, Any] = {"seed": int(row.get("seed", 0)), "sampler": sampler, "labels": None}
            if "label" in row:
                how["labels"] = [int(row["label"])]
            if self._trained.unet_spec.text is not None:
                how["prompts"] = row.get("prompt", "")
            drawn.append(sample(self._trained, int(row.get("count", 1)), **how))
        return torch.cat(drawn).permute(0, 2, 3, 1).numpy()
