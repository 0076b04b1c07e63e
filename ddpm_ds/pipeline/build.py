"""From a list of layers and a filled DeepSpeed configuration to a running engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import deepspeed

from ddpm_ds.pipeline import deepspeed_insides as insides
from ddpm_ds.pipeline.engine import Objective, UnetPipelineEngine
from ddpm_ds.pipeline.module import UnetPipelineModule
from ddpm_ds.unet.layers import Layer


def build_engine(
    layers: Sequence[Layer],
    bounds: Sequence[int],
    config: dict[str, Any],
    objective: Objective,
    *,
    seed: int,
    verbose: bool = False,
) -> UnetPipelineEngine:
    """Build this process's stage and its engine; collective over all processes.

    ``config`` is a legal DeepSpeed configuration with every ``auto`` filled (:func:`ddpm_ds.ds_config.resolve`);
    ``bounds`` come from :func:`ddpm_ds.pipeline.partition.partition`. The process group must exist.
    """
    quiet_deepspeed(verbose)
    module = UnetPipelineModule(layers, bounds, seed)
    with insides.pipeline_engine(UnetPipelineEngine):
        engine, *_ = deepspeed.initialize(model=module, config=config)
    assert isinstance(engine, UnetPipelineEngine)
    engine.objective = objective
    return engine


def quiet_deepspeed(verbose: bool) -> None:
    """Keep DeepSpeed's own log to warnings unless ``verbose``."""
    logging.getLogger("DeepSpeed").setLevel(logging.INFO if verbose else logging.WARNING)
