"""MLflow's registry of models: a version is a folder of a run's artifacts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpm_ds.train.tracking import Record

if TYPE_CHECKING:
    from mlflow import MlflowClient


def register(client: MlflowClient, run_id: str, record: Record) -> str:
    """Make the folder of a register record a new version; returns a line that says which. Safe to repeat."""
    from mlflow.exceptions import MlflowException

    name = record["register"]
    source = f"{client.get_run(run_id).info.artifact_uri}/{record['folder']}".rstrip("/")
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    known = client.search_model_versions(f"run_id = '{run_id}'")
    same = [version for version in known if (version.name, version.source) == (name, source)]
    version = same[0] if same else client.create_model_version(name, source, run_id, await_creation_for=0)
    return f"MLflow has version {version.version} of the model {name}: models:/{name}/{version.version}"
