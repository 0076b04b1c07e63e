"""DeepSpeed JSONs of tests, checked and resolved as training does it."""

from pathlib import Path
from typing import Any

from ddpm_ds.config.ds_config import ResolvedDsConfig, check_ds_config, resolve
from ddpm_ds.config.ds_model import DS_CONFIG, DsConfig
from ddpm_ds.config.spec import RunSpec


def config_of(**blocks: Any) -> DsConfig:
    """The model of a JSON with these blocks, of which some may be missing."""
    return DS_CONFIG.read(blocks)


def laid_out(
    config: dict[str, Any], spec: RunSpec, *, world_size: int, stages: int | None, path: Path | str = "ds.json"
) -> ResolvedDsConfig:
    """A JSON, checked beside a spec and laid out on so many processes."""
    return resolve(check_ds_config(config, path, spec), spec, world_size=world_size, stages=stages, path=path)
