"""From a list of layers and a filled DeepSpeed configuration to a running engine."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import deepspeed

from ddpm_ds.pipeline import deepspeed_insides as insides
from ddpm_ds.pipeline.engine import Objective, UnetPipelineEngine
from ddpm_ds.pipeline.folded import FoldedEngine
from ddpm_ds.pipeline.module import FoldedUnetModule, UnetPipelineModule
from ddpm_ds.pipeline.partition import Schedule
from ddpm_ds.unet.layers import Layer


def build_engine(
    layers: Sequence[Layer],
    bounds: Sequence[int],
    config: dict[str, Any],
    objective: Objective,
    *,
    seed: int,
    schedule: Schedule = "1f1b",
    verbose: bool = False,
) -> UnetPipelineEngine:
    """Build this process's share of the U-Net and its engine; collective over all processes.

    ``config`` is a legal DeepSpeed configuration with every ``auto`` filled (:func:`ddpm_ds.ds_config.resolve`), and
    says which axis of the layout is split over hosts; ``bounds`` come from
    :func:`ddpm_ds.pipeline.partition.partition`. The process group must exist.
    """
    with quiet_deepspeed(verbose):
        folded = schedule == "folded"
        across = config["pipeline"].get("across_hosts", "stages")
        module = (FoldedUnetModule if folded else UnetPipelineModule)(layers, bounds, seed, across)
        with insides.pipeline_engine(FoldedEngine if folded else UnetPipelineEngine):
            engine, *_ = deepspeed.initialize(model=module, config=_for_deepspeed(config))
    assert isinstance(engine, UnetPipelineEngine)
    engine.objective = objective
    return engine


def _for_deepspeed(config: dict[str, Any]) -> dict[str, Any]:
    """Without the flops profiler, which would start timers that crash a pipeline (see :mod:`ddpm_ds.observe.flops`)."""
    return {name: block for name, block in config.items() if name != "flops_profiler"}


@contextlib.contextmanager
def quiet_deepspeed(verbose: bool) -> Iterator[None]:
    """While it is being built, drop what DeepSpeed prints and log only its errors; afterwards log its warnings.

    With ``verbose`` it says all it has to say.
    """
    logger = logging.getLogger("DeepSpeed")
    if verbose:
        logger.setLevel(logging.INFO)
        yield
        return
    # torch 2.14 renamed what DeepSpeed calls
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    logger.setLevel(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()):
        yield
    logger.setLevel(logging.WARNING)
