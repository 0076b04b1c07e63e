"""From a list of layers and a filled DeepSpeed configuration to a running engine."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import deepspeed

from ddpm_ds.command_line import cache_folder
from ddpm_ds.ds_config import for_deepspeed
from ddpm_ds.pipeline import deepspeed_insides as insides
from ddpm_ds.pipeline.collectives import said_by_all
from ddpm_ds.pipeline.engine import Objective, UnetPipelineEngine
from ddpm_ds.pipeline.folded import FoldedEngine
from ddpm_ds.pipeline.module import FoldedUnetModule, UnetPipelineModule
from ddpm_ds.pipeline.partition import Schedule
from ddpm_ds.unet.compiled import compile_layers
from ddpm_ds.unet.kernel_choice import choose_kernels
from ddpm_ds.unet.layers import Layer
from ddpm_ds.unet.operations import use_kernels


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

    Raises:
        DsConfigError: the fused kernels were asked for and fail, or have broken a GPU; on all ranks alike.
    """
    gc.collect()  # an engine of before waits for the device when it is collected, be it in the middle of a step
    with quiet_deepspeed(verbose):
        folded = schedule == "folded"
        across = config["pipeline"].get("across_hosts", "stages")
        module = (FoldedUnetModule if folded else UnetPipelineModule)(layers, bounds, seed, across)
        with insides.pipeline_engine(FoldedEngine if folded else UnetPipelineEngine):
            engine, *_ = deepspeed.initialize(model=module, config=for_deepspeed(config))
    assert isinstance(engine, UnetPipelineEngine)
    engine.objective = objective
    asked, dtype = config.get("kernels", "reference"), next(engine.module.parameters()).dtype
    engine.kernels, engine.why_kernels = choose_kernels(
        asked, layers, engine.device, dtype, engine.micro_batch_size, said_by_all
    )
    modules = list(engine.own_layers().values())
    use_kernels(modules, engine.kernels)
    if config.get("compile", False):
        engine.compiled = True
        compile_layers(modules, cache_folder() / "compiled")
    return engine


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
