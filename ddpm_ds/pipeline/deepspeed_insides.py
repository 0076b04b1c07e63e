"""Access to the insides of DeepSpeed 0.19, all in one place.

Each function states the assumptions that it rests on, and ``tests/pipeline/test_deepspeed_insides.py`` tests every one
of them, so that an incompatible upgrade of DeepSpeed fails there.
"""

import contextlib
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import deepspeed
import psutil
import torch
import torch.distributed as dist
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.engine import DeepSpeedEngine, EngineTimers
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe import engine as pipe_engine
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, ProcessTopology
from deepspeed.runtime.zero import stage_1_and_2
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils.file_baton import FileBaton

from ddpm_ds.ground.errors import HostError
from ddpm_ds.schema.layout import BUCKET_ELEMENTS, AcrossHosts
from ddpm_ds.unet.shards import Shard
from ddpm_ds.unet.space import ALONE as NO_GROUP
from ddpm_ds.unet.space import SpaceGroup
from ddpm_ds.unet.tensor_group import ALONE, TensorGroup

BUILD_SECONDS = 1800.0
"""Time after which an extension's build counts as hung, or its lock as forgotten; one takes minutes on a busy host."""


class _NoStageLimit:
    """Stand-in for ``ZeroStageEnum`` in the one assertion of the pipeline engine that refuses ZeRO-2."""

    gradients = 3


def topology(across: AcrossHosts, stages: int, replicas: int, tensor: int = 1) -> ProcessTopology:
    """Return the global ranks of stages, replicas and tensor groups, numbered as by :class:`Grid` in ``placement``.

    Assumes that DeepSpeed numbers the processes row-major over a topology's axes, and that it takes all groups (stages,
    replicas, tensors, everything but replicas) and a neighbour's rank from the topology, not from its own axes.
    """
    sizes = {"pipe": stages, "data": replicas, "model": tensor}
    axes = ["pipe", "data", "model"] if across == "stages" else ["data", "pipe", "model"]
    return ProcessTopology(axes=axes, dims=[sizes[axis] for axis in axes])


def tensor_group(grid: PipelineParallelGrid) -> TensorGroup:
    """Return this rank's tensor group; assumes that DeepSpeed does not use a grid's group of the axis ``model``."""
    if grid.model_parallel_size == 1:
        return ALONE
    return TensorGroup(grid.get_slice_parallel_rank(), grid.model_parallel_size, grid.slice_proc_group)


def space_group(grid: PipelineParallelGrid, size: int) -> SpaceGroup:
    """Return this rank's space group of ``size`` neighbours among the ranks that hold its stage; collective.

    Assumes that ``dp_groups`` lists these ranks, in their order, for each stage.
    """
    own = NO_GROUP
    for ranks in grid.dp_groups if size > 1 else ():
        for start in range(0, len(ranks), size):
            members = ranks[start : start + size]
            group: Any = dist.new_group(members)
            if dist.get_rank() in members:
                own = SpaceGroup(members.index(dist.get_rank()), size, group)
    return own


def sum_scalars_in(grid: PipelineParallelGrid, make: Callable[[list[int]], Any]) -> None:
    """Let each replica sum in a group that ``make`` returns for its ranks; all ranks make all groups, in one order.

    Assumes that DeepSpeed sums only scalars in a grid's ``ds_model_proc_group``, and only after the grid is made.
    """
    for replica in range(grid.data_parallel_size):
        group = make(ranks := sorted(grid.topology().get_axis_list(axis="data", idx=replica)))
        if grid.global_rank in ranks:
            grid.ds_model_proc_group = group


def gives_first_weights(grid: PipelineParallelGrid) -> bool:
    """Return whether this rank draws its stage's weights; assumes that a new engine copies them to other replicas."""
    return bool(grid.get_data_parallel_id() == 0)


@contextlib.contextmanager
def group_timeout(timeout: timedelta) -> Iterator[None]:
    """Apply ``timeout`` to every process group that is created inside this context without a time-out.

    Assumes that DeepSpeed creates its groups without one; that a group then gets its backend's default, 10 minutes
    under NCCL, instead of its parent group's; and that torch.distributed calls
    ``distributed_c10d._get_default_timeout`` whenever a group is created or split.
    """
    with patch.object(distributed_c10d, "_get_default_timeout", lambda backend: timeout):
        yield


@contextlib.contextmanager
def pipeline_engine(engine_class: type[pipe_engine.PipelineEngine]) -> Iterator[None]:
    """Let ``deepspeed.initialize`` build ``engine_class`` for a PipelineModule, and accept ZeRO-2.

    Assumes that ``initialize`` looks the engine up as ``deepspeed.PipelineEngine``, or for a DualPipeVModule as
    ``deepspeed.DualPipeVEngine``, and that the pipeline engine uses its module's ``ZeroStageEnum`` only in the
    assertion that refuses ZeRO-2. The stock engine would reduce a partitioned gradient once per output tensor, while
    ours runs one backward per micro-batch.

    Also assumes that the stock engine's only messages during construction are a zero to each neighbour, to connect
    them: our ranks are connected by edge, and connections of the whole job's group would waste device memory.
    """
    with contextlib.ExitStack() as changed:
        for name in ("PipelineEngine", "DualPipeVEngine"):
            changed.enter_context(patch.object(deepspeed, name, engine_class))
        changed.enter_context(patch.object(pipe_engine, "ZeroStageEnum", _NoStageLimit))
        for name in ("send", "recv"):
            changed.enter_context(patch.object(pipe_engine.p2p, name, lambda tensor, stage: None))
        yield


class _LimitedBaton(FileBaton):
    """PyTorch's lock, a file that exists while it is taken, with a limit on its age."""

    def wait(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            while time.time() - os.stat(self.lock_file_path).st_mtime < BUILD_SECONDS:
                time.sleep(self.wait_seconds)
            raise TimeoutError


@contextlib.contextmanager
def _killing_late_programs() -> Iterator[list[str]]:
    """Kill programs that this block started and that still run after ``BUILD_SECONDS``; yields their command lines."""
    before, ended, killed = psutil.Process().children(recursive=True), threading.Event(), list[str]()

    def watch() -> None:
        pause = BUILD_SECONDS
        while not ended.wait(pause):
            pause = 0.1  # a build that lost one program may try another
            for program in psutil.Process().children(recursive=True):  # a program before its own children
                with contextlib.suppress(psutil.Error):
                    if program not in before:
                        killed.append(shlex.join(program.cmdline()))
                        program.kill()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield killed
    finally:
        ended.set()
        watcher.join()


@contextlib.contextmanager
def named_builds(doing: Callable[[str], contextlib.AbstractContextManager[object]]) -> Iterator[None]:
    """Show by ``doing`` which extension DeepSpeed compiles or loads, and limit the wait for another build of it.

    Assumes that ``OpBuilder.jit_load`` compiles extensions that were not installed with DeepSpeed, in
    ``cpp_extension._get_build_directory``; and that builds exclude each other there by ``cpp_extension.FileLock``,
    which the kernel unlocks, or before PyTorch 2.14 by ``FileBaton``, which a killed build leaves locked. Raises
    HostError after ``BUILD_SECONDS``: the build's programs are killed, or another build still locks it.
    """
    build = OpBuilder.jit_load

    def named_build(builder: OpBuilder, verbose: bool = True) -> object:
        from torch.utils import cpp_extension

        lock: tuple[str, object] = ("FileBaton", _LimitedBaton)
        if hasattr(cpp_extension, "FileLock"):
            lock = ("FileLock", partial(cpp_extension.FileLock, timeout=BUILD_SECONDS))
        folder = cpp_extension._get_build_directory(builder.name, False)
        what = f"compiling or loading DeepSpeed's {builder.name} in {folder}"
        with doing(what), patch.object(cpp_extension, *lock), _killing_late_programs() as killed:
            try:
                return build(builder, verbose)
            except TimeoutError:
                raise HostError(
                    f"a build of DeepSpeed's {builder.name} has had {folder}/lock for {BUILD_SECONDS:g} s; if none is "
                    "running, delete that file and start again"
                ) from None
            except Exception:  # of any kind, if its programs were killed
                if not killed:
                    raise
                raise HostError(
                    f"DeepSpeed's {builder.name} was not compiled within {BUILD_SECONDS:g} s; to see what hangs, type "
                    f"in {folder}: {killed[0]}"
                ) from None

    with patch.object(OpBuilder, "jit_load", named_build):
        yield


def leave_forward_and_timing_to_us(engine: DeepSpeedEngine) -> None:
    """Remove the stock engine's forward hooks and its forward and backward timers.

    Assumes that the two module hooks only start and stop these timers and the flops profiler (which they restart for
    every micro-batch and never print), and that under a pipeline the timers are started twice and raise AssertionError.
    Our engine times instructions where it executes the schedule.
    """
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()
    engine.engine_timers = EngineTimers(enable_micro_timers=False, enable_global_timers=False)


def offloads(engine: DeepSpeedEngine) -> bool:
    """Return whether the optimizer works on the host; assumes that only ZeRO's can, as ``cpu_offload`` says."""
    return bool(getattr(engine.optimizer, "cpu_offload", False))


@dataclass(frozen=True)
class FlatOptimizer:
    """DeepSpeed optimizer with flat tensors, and how gradients are summed over the replicas."""

    places: dict[torch.nn.Parameter, int]
    """Index of each parameter's first element in the stage's flat weights."""
    weights: Tensor
    """Flat weights, padded so that all replicas own as many."""
    master: Tensor
    """Flat weights that the basic optimizer of this rank steps, as many as other replicas', in fp32, or in the dtype of
    ``weights``; a single replica's are then the flat weights themselves."""
    group: dist.ProcessGroup
    """Process group of the replicas."""
    replicas: int
    replica: int
    partitions: bool
    """Whether a rank keeps the gradients of its own partition only: ZeRO-2."""
    accumulator: Tensor | None
    """Flat gradient that DeepSpeed allocates itself and reduces; None if it has none."""
    dtype: torch.dtype
    """Type in which gradients are added up."""
    wire: torch.dtype
    """Type in which they are reduced."""
    bucket: int
    """Largest number of elements that are reduced at a time, unless a parameter has more."""
    host_gradient: Tensor | None
    """fp32 gradient of this rank's partition in host memory; None if the optimizer steps on the device."""


def take_over_gradients(engine: DeepSpeedEngine) -> FlatOptimizer:
    """Remove the gradient hooks of an optimizer with flat tensors; its step is not used either.

    Assumes that ZeRO and BF16 optimizers have one group of parameters, which are contiguous views of one flat tensor;
    that partitions are equal slices of it, by the rank in the group of replicas; that ``_grad_acc_hooks`` are all their
    hooks on parameters; that nothing but their hooks, their backward's prologue and epilogue and their step reads
    gradients; and that ``lp_fragment`` and the BF16 optimizer's flat weights, made of the parameters by autograd, are
    only read and written as data. With ``offload_optimizer`` that the master's ``grad`` is the host's memory for the
    partition's gradient, and that only the backward uses the buffers for a gradient on its way there. With
    ``bf16_master_weights_and_grads`` that the master is a copy of the partition in bf16, which nothing else reads.
    """
    optimizer: Any = engine.optimizer
    if offloads(engine):
        optimizer.temp_grad_buffer_for_gpu_offload = None
    zero = isinstance(optimizer, stage_1_and_2.DeepSpeedZeroOptimizer)
    (parameters,) = optimizer.bit16_groups if zero else optimizer.bf16_groups
    (weights,) = optimizer.bit16_groups_flat if zero else optimizer.bf16_groups_flat
    for hook in optimizer._grad_acc_hooks:
        hook.remove()
    optimizer._grad_acc_hooks.clear()
    # Views that autograd made would tie all later backwards to the stream of now.
    for parameter in parameters:
        if (mapping := parameter._hp_mapping) is not None:
            mapping.lp_fragment = mapping.lp_fragment.detach()
    if not zero:
        optimizer.bf16_groups_flat[0] = weights.detach()
        (parts,) = optimizer.bf16_partitioned_groups
        optimizer.bf16_partitioned_groups[0] = [part.detach() for part in parts]
    ((master,),) = (group["params"] for group in engine.basic_optimizer.param_groups)
    (group,) = optimizer.real_dp_process_group
    if master.dtype == weights.dtype != torch.float32 and dist.get_world_size(group) == 1:
        master.untyped_storage().resize_(0)
        master.data = weights.detach()
    return FlatOptimizer(
        places={parameter: parameter.storage_offset() - weights.storage_offset() for parameter in parameters},
        weights=weights.detach(),
        master=master,
        group=group,
        replicas=dist.get_world_size(group),
        replica=dist.get_rank(group),
        partitions=zero and optimizer.partition_gradients,
        accumulator=None if zero else optimizer.fp32_groups_gradients_flat[0],
        dtype=optimizer.gradient_accumulation_dtype if zero else optimizer.grad_acc_dtype,
        wire=engine.communication_data_type,
        bucket=optimizer.reduce_bucket_size if zero else BUCKET_ELEMENTS,
        host_gradient=master.grad if offloads(engine) else None,
    )


def separate_masters(engine: DeepSpeedEngine, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the fp32 master of each of the parameters; none if the optimizer steps them directly.

    Assumes that the groups of the unfused fp16 optimizer have one order.
    """
    if not isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        return []
    groups = zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups, strict=True)
    wide = {id(one): master for narrow, masters in groups for one, master in zip(narrow, masters, strict=True)}
    return [wide[id(parameter)] for parameter in parameters]


def checks_gradients(engine: DeepSpeedEngine) -> bool:
    """Return whether a bad step is skipped; assumes that only bf16's optimizers may not, by ``check_grad_overflow``."""
    return not engine.bfloat16_enabled() or bool(getattr(engine.optimizer, "check_grad_overflow", True))


def count_step(engine: DeepSpeedEngine) -> None:
    """Count a step and advance the scheduler as DeepSpeed does, skipped or not: the host may not know.

    Assumes that ``_take_model_step`` advances the scheduler unless the step is skipped, prints every
    ``steps_per_print`` steps on rank 0, and counts steps, images and, which is left to the caller, skipped steps.
    """
    if engine.lr_scheduler is not None:
        engine.lr_scheduler.step()
    engine.global_steps += 1
    engine.global_samples += engine.train_batch_size()
    every = engine.steps_per_print()
    if every is not None and engine.global_steps % every == 0 and not engine.global_rank:
        engine._report_progress(engine.global_steps)


def forget_first_optimizer_step(engine: DeepSpeedEngine) -> None:
    """Undo the optimizer step with zero gradients that the unfused fp16 optimizer takes to allocate its state.

    Assumes that FP16_UnfusedOptimizer steps its inner optimizer once on construction: Adam's bias correction would
    start at 2 and weight decay would have been applied once.
    """
    if isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        engine.optimizer.optimizer.state.clear()
        engine.optimizer.refresh_fp32_params()


@dataclass(frozen=True)
class OwnedPiece:
    """Piece of one parameter whose values and optimizer state this rank owns, or a parameter that is not trained."""

    name: str
    """Global name of the parameter."""
    first: int
    """Index of the piece's first element in the flattened parameter."""
    length: int
    master: Tensor
    """Tensor that the optimizer steps: a flat partition under ZeRO, else the fp32 parameter."""
    offset: int
    """Index of the piece's first element in the flattened ``master``."""
    dimensions: int
    """Dimensions of the parameter: 1 of norms and biases."""
    shard: Shard | None = None
    """This rank's part of the whole parameter, in which ``first`` counts; None if it is whole."""
    trained: bool = True
    """Whether the optimizer steps it."""
    saved: bool = True
    """Whether this rank saves it."""

    def of(self, tensor: Tensor) -> Tensor:
        """Return this piece of a tensor shaped as ``master``, such as one of its moments: a 1-D view."""
        return tensor.detach().view(-1)[self.offset : self.offset + self.length]


def masters(engine: DeepSpeedEngine) -> list[Tensor]:
    """Return the fp32 tensors that are stepped; assumes them in the parameter groups of ``basic_optimizer``."""
    return [master for group in engine.basic_optimizer.param_groups for master in group["params"]]


def group_by_rate(engine: DeepSpeedEngine, factors: Sequence[tuple[Tensor, float]]) -> None:
    """Step these tensors instead, in one group for each factor on the learning rate; they come in its order.

    Assumes that all settings of a group of parameters but its ``lr`` are constant, and that the optimizer has no state.
    """
    (group,) = engine.basic_optimizer.param_groups
    groups = {factor: {**group, "factor": factor, "params": []} for _, factor in factors}
    for tensor, factor in factors:
        groups[factor]["params"].append(tensor)
    engine.basic_optimizer.param_groups[:] = groups.values()
    engine.basic_optimizer.state.clear()


def is_partitioned(engine: DeepSpeedEngine) -> bool:
    """Return whether replicas own different pieces; assumes that only ZeRO and BF16 optimizers partition."""
    return isinstance(engine.optimizer, ZeROOptimizer)


SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True)
class ScaleSettings:
    """How the loss scale of fp16 begins and moves."""

    first: float
    moves: bool
    floor: float
    """Lowest scale; a scale that does not move is its own floor."""
    factor: float = 2.0
    window: int = 1
    hysteresis: int = 1
    restores_at_once: bool = False
    """Whether a step without overflow restores the hysteresis, and not only one in which the scale grows."""


def scale_settings(engine: DeepSpeedEngine) -> ScaleSettings:
    """Return how the loss scale of an fp16 engine moves.

    Assumes that every fp16 optimizer has ``loss_scale``, that ZeRO's scaler calls its lowest scale ``min_scale`` and
    its hysteresis ``delayed_shift``, and that the unfused optimizer's ``loss_scale_config`` has ``min_loss_scale`` and
    no hysteresis.
    """
    first = float(engine.optimizer.loss_scale)
    if not engine.dynamic_loss_scale():
        return ScaleSettings(first, False, first)
    scaler = getattr(engine.optimizer, "loss_scaler", None) or engine.optimizer.loss_scale_config
    return ScaleSettings(
        first,
        True,
        float(scaler.min_scale if hasattr(scaler, "min_scale") else scaler.min_loss_scale),
        scaler.scale_factor,
        scaler.scale_window,
        getattr(scaler, "delayed_shift", 1),
        getattr(scaler, "consecutive_hysteresis", False),
    )
