"""Construction of a running engine from a list of layers and a resolved configuration, on a GPU or on a CPU."""

import contextlib
import gc
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from functools import partial

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

from ddpm_ds.config.ds_config import ResolvedDsConfig
from ddpm_ds.ground.device import DTYPES
from ddpm_ds.ground.outputs import cache_folder
from ddpm_ds.pipeline import deepspeed_insides as insides
from ddpm_ds.pipeline.adam8bit import Adam8bit
from ddpm_ds.pipeline.cuts import folds
from ddpm_ds.pipeline.engine import Objective, UnetPipelineEngine
from ddpm_ds.pipeline.gradients import gradients_of
from ddpm_ds.pipeline.graph import StepGraph
from ddpm_ds.pipeline.module import FoldedUnetModule, UnetPipelineModule
from ddpm_ds.pipeline.schedule import Program, program
from ddpm_ds.schema.layout import AcrossHosts
from ddpm_ds.unet.layers import Layer, parameter_shapes
from ddpm_ds.unet.model import choose_kernels, compile_layers
from ddpm_ds.unet.operations import use_kernels


class HostAccelerator(CPU_Accelerator):
    """CPU accelerator on which fp16 means fp16 storage with fp32 arithmetic in each layer (see ``unet/blocks.py``).

    DeepSpeed refuses fp16 on processors without native fp16 products, and at start-up builds a shared-memory
    communication extension, which takes a compiler and most of a minute. Neither is needed: a layer in fp32 between two
    casts costs as much as fp32, and gloo carries the messages.
    """

    def is_fp16_supported(self) -> bool:
        return True

    def create_op_builder(self, op_name: str) -> object | None:
        if op_name == "ShareMemCommBuilder":
            return None
        return super().create_op_builder(op_name)


class CudaAccelerator(CUDA_Accelerator):
    """CUDA accelerator that asks CUDA how much memory is free.

    DeepSpeed asks NVML, by the numbers in CUDA_VISIBLE_DEVICES, and ZeRO fails if the variable names GPUs by UUID.
    """

    def available_memory(self, device_index: int | None = None) -> int:
        return int(torch.cuda.mem_get_info(device_index)[0])


def use_host_accelerator() -> None:
    """Make DeepSpeed use :class:`HostAccelerator` if it runs on the CPU, and :class:`CudaAccelerator` on a GPU."""
    match get_accelerator().device_name():
        case "cpu":
            set_accelerator(HostAccelerator())
        case "cuda":
            set_accelerator(CudaAccelerator())


def build_engine(
    layers: Sequence[Layer],
    bounds: Sequence[int],
    resolved: ResolvedDsConfig,
    objective: Objective,
    *,
    seed: int,
    programs: Sequence[Program] | None = None,
    others: Sequence[Sequence[Layer]] = (),
    drawn: bool = True,
    verbose: bool = False,
) -> UnetPipelineEngine:
    """Build this process's share of the U-Net and its engine; collective over all processes.

    ``bounds`` come from :func:`ddpm_ds.pipeline.cuts.partition`; ``programs`` default to the schedule's own. ``others``
    are the lists of layers for images of other sizes, which :attr:`UnetPipelineEngine.size_of` numbers from 1. Unless
    first weights are ``drawn``, the caller loads all. The process group must exist. Raises DsConfigError if requested
    kernels can't run here.
    """
    gc.collect()  # else an earlier engine could be collected during a step, which waits for the device
    with quiet_deepspeed(verbose):
        across: AcrossHosts = "replicas" if resolved.layout.across_hosts == "replicas" else "stages"
        kind = FoldedUnetModule if folds(resolved.layout.schedule) else UnetPipelineModule
        sizes = resolved.layout.tensor.size, resolved.layout.space.size
        module = kind(layers, bounds, seed, across, others, sizes, DTYPES[resolved.precision][1], drawn)
        if not module.rates:
            module.register_parameter("nothing", module.placeholder)  # DeepSpeed asks for the names of all it trains
        with insides.pipeline_engine(UnetPipelineEngine):
            engine, *_ = deepspeed.initialize(
                model=module,
                model_parameters=module.in_flat_order(),
                config=resolved.for_deepspeed(),
                optimizer=partial(Adam8bit, **resolved.eight_bit_settings) if resolved.eight_bit_settings else None,
            )
    assert isinstance(engine, UnetPipelineEngine)
    vars(module)["_parameters"].pop("nothing", None)
    engine.ranks_of_image = module.space.size
    engine.objective, engine.schedule = objective, resolved.layout.schedule
    engine.gradients = gradients_of(engine, module.arriving)
    if isinstance(engine.basic_optimizer, Adam8bit):
        engine.basic_optimizer.own(engine.gradients.owned(), parameter_shapes(layers), seed)
    engine.graph = StepGraph(engine, resolved.config.graphs)
    modules = list(module.own_layers().values())
    use_kernels(modules, choose_kernels(resolved.config.kernels, engine.device, captured=not engine.graph.why_eager))
    if resolved.config.compile:
        engine.compiled = True
        compile_layers(modules, cache_folder() / "compiled")
    if programs is None:
        count, ranks = engine.micro_batches, engine.num_stages
        programs = [program(resolved.layout.schedule, count, ranks, rank) for rank in range(ranks)]
    engine.follow(programs)
    return engine


@contextlib.contextmanager
def quiet_deepspeed(verbose: bool) -> Iterator[None]:
    """Discard DeepSpeed's prints, and log only its errors from here on, unless ``verbose``."""
    logger = logging.getLogger("DeepSpeed")
    if verbose:
        logger.setLevel(logging.INFO)
        yield
        return
    # torch 2.14 renamed functions that DeepSpeed calls
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    logger.setLevel(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()):
        yield
