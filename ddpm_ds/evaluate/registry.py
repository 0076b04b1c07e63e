"""Exports as models of MLflow's registry, from which ``mlflow.pyfunc.load_model`` samples.

A model is the folder of an export, the run's sampler, and the name of this module, which MLflow imports to load it:
nothing is pickled, and no code is read from the registry.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import torch

from ddpm_ds.config.spec import SamplerSpec
from ddpm_ds.device import choose_device
from ddpm_ds.errors import OutputError, SpecError, print_to_stderr
from ddpm_ds.evaluate.diffusers.text_pipeline import encoders_of
from ddpm_ds.evaluate.sampling import sample
from ddpm_ds.evaluate.trained import Trained, load_trained
from ddpm_ds.secret import public_address
from ddpm_ds.tracking.address import MLFLOW, page_of, reason, resolve_uri
from ddpm_ds.tracking.runs import ExperimentError, find_run
from ddpm_ds.tracking.sender import opened_store
from ddpm_ds.version import __version__

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from pandas import DataFrame

LONGEST_NAME = 256
"""Most characters of a model's name that MLflow's stores keep."""


class Registry:
    """Registry of the runs in a folder, for one model.

    Raises:
        OutputError: by all: MLflow does not answer, or refuses. The message says what is left.
    """

    def __init__(self, name: str, trained: Trained) -> None:
        """Check that the export of ``trained`` can become a version of the model ``name``; change nothing.

        Raises:
            SpecError: there can't be such a model.
        """
        self.name = name
        fault = None
        if trained.run_dir is None:
            fault = f"{trained.origin} is not in the folder of a run, whose MLflow run would hold the model"
        elif trained.is_conditioned:
            fault = f"{trained.origin} draws for conditions, and a model for the rows of a table"
        elif trained.unet_spec.text is not None and not encoders_of(trained):
            fault = f"the text encoders of {trained.origin} are not on this host"
        if fault is not None or trained.run_dir is None:
            raise SpecError(f"--register {name}: {fault}; leave it out")
        if not name.strip() or len(name) > LONGEST_NAME or "/" in name or ":" in name:
            raise SpecError(f"--register {name} should have 1 to {LONGEST_NAME} characters, and no / or :")
        self._root = trained.run_dir.parent.resolve()
        with self._asked("can't be looked up") as client:
            client.search_registered_models(max_results=1)  # what follows says None of a registry that is down
            taken = client.get_prompt(name) is not None  # of which it would make a version
        if taken:
            raise SpecError(f"--register {name} is the name of a prompt of MLflow's; take another")

    def add(self, trained: Trained, folder: Path, run_id: str | None) -> tuple[str, str]:
        """Log the export of ``trained`` in ``folder`` as a model of a run, and register that.

        Returns the version's address in MLflow, and that of its page.
        """
        import mlflow
        from mlflow.entities import LoggedModelOutput
        from mlflow.exceptions import MlflowException
        from mlflow.models import Model

        left = f"{folder} is whole"
        if run_id is None:
            raise OutputError(f"--register {self.name} needs a run in MLflow, which has none; {left}")
        with self._asked(f"can't be logged ({left})") as client:
            experiment = client.get_run(run_id).info.experiment_id
            logged = client.create_logged_model(experiment, self.name, run_id)
        source = f"models:/{logged.model_id}"
        left += f", and {source} of the run {run_id} is left"
        beside = tempfile.TemporaryDirectory(dir=folder.absolute().parent, prefix=f".{folder.name}.")
        with self._asked(f"can't be logged ({left}, unfinished)") as client, beside:
            about = Model(artifact_path=logged.artifact_location, run_id=run_id, model_id=logged.model_id)
            path = f"{beside.name}/model"
            mlflow.pyfunc.save_model(path, mlflow_model=about, data_path=folder, **_described(trained))
            client.log_model_artifacts(logged.model_id, path)
            client.finalize_logged_model(logged.model_id, "READY")
            client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, trained.images_seen or 0)])
        with self._asked(f"can't be registered ({left})") as client:
            try:
                client.create_registered_model(self.name)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            made = client.create_model_version(
                self.name, source, run_id, await_creation_for=0, model_id=logged.model_id
            )
        page, _ = page_of(resolve_uri(self._root), f"/#/models/{quote(self.name)}/versions/{made.version}")
        return f"models:/{self.name}/{made.version}", page

    @contextlib.contextmanager
    def _asked(self, what: str) -> Iterator[MlflowClient]:
        """Yield MLflow's client; its errors become one line."""
        for name, value in MLFLOW.items():
            os.environ.setdefault(name, value)
        for talkative in ("mlflow", "alembic"):
            logging.getLogger(talkative).setLevel(logging.ERROR)
        try:
            with opened_store(self._root) as client:
                yield client
        except Exception as error:  # MLflow raises what its stores raise
            where = f"MLflow at {public_address(resolve_uri(self._root))}"
            raise OutputError(f"--register {self.name} {what}: {where} fails ({reason(error)})") from None


def _described(trained: Trained) -> dict[str, Any]:
    """Return what MLflow keeps of a model besides its files: how it is loaded, and what it takes and returns."""
    import pandas
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema, TensorSpec

    columns = {"count": "long", "seed": "long"}
    example: dict[str, Any] = {"count": [2], "seed": [0]}
    extras = [] if trained.autoencoder is None else ["latents"]
    if trained.unet_spec.classes is not None:
        columns["label"], example["label"] = "long", [0]
    if trained.unet_spec.text is not None:
        columns["prompt"], example["prompt"] = "string", ["a prompt"]
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
        "input_example": pandas.DataFrame(example),
        "pip_requirements": [f"ddpm_ds[{needs}]=={__version__}" if needs else f"ddpm_ds=={__version__}"],
    }


def note_links(run_dir: Path, links: Mapping[str, str]) -> None:
    """Add pages by their names to the note of a run, which MLflow shows as its description, or say why not."""
    try:
        find_run(str(run_dir)).add_note(
            "exported as " + " and ".join(f"[{name}]({page})" for name, page in links.items())
        )
    except ExperimentError as error:
        print_to_stderr(f"the note of the run in MLflow has no link to {' and '.join(links)}: {error}")


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
