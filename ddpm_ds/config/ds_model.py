"""Every key of the DeepSpeed JSON that has an effect, or no effect, in a pipelined U-Net run, as pydantic models.

A key that DeepSpeed 0.19 reads and that would break a pipeline, or would be ignored where it promises something, is not
here, and so is refused. ``docs/ds_configs.md`` prints these models.
"""

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from ddpm_ds.ground.units import MOST_IMAGES, MOST_PROCESSES
from ddpm_ds.schema.layout import Precision
from ddpm_ds.schema.section import (
    REMOVED,
    Format,
    Section,
    broken_rule,
    is_off,
    needs,
    no_number,
    no_switch,
    only_with,
    shown,
)
from ddpm_ds.schema.types import MOST_LAYERS, MOST_LEARNING_RATE, Batch, FilePath, Fraction, Small

Auto = Literal["auto"]
"""A value that follows from the spec, the processes or the device, as if the key were left out."""
No = Annotated[Literal[False], BeforeValidator(no_number)]
Yes = Annotated[Literal[True], BeforeValidator(no_number)]
# Ranges end where DeepSpeed's own arithmetic or memory would fail, or far beyond useful values.
Steps = Annotated[int, Field(ge=1, le=MOST_IMAGES)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Rate = Annotated[float, Field(ge=0.0, le=MOST_LEARNING_RATE)]
PositiveRate = Annotated[float, Field(gt=0.0, le=MOST_LEARNING_RATE)]
MOST_BUCKET = 2**31
"""Maximum elements of a bucket: 8 GiB of fp32."""
CutMethod = Literal["flops", "measured", "parameters", "uniform"]
"""Method of cutting the U-Net into stages if the JSON does not list the cuts."""


EIGHT_BIT: Literal["AdamW8bit"] = "AdamW8bit"
"""Type of the optimizer whose moments take 8 bits."""
_SPELLINGS = {name.lower(): name for name in ("AdamW", "Adam", EIGHT_BIT)}
"""Published spellings of the optimizers, which DeepSpeed reads in any case of letters."""


def _rising(cuts: tuple[int, ...]) -> tuple[int, ...]:
    if any(low >= high for low, high in pairwise(cuts)):
        raise broken_rule("should rise from cut to cut, such as [3, 7]")
    return cuts


Cuts = Annotated[tuple[Annotated[int, Field(ge=1, le=MOST_LAYERS)], ...], AfterValidator(_rising)]
WITH_ZERO = "zero_optimization.stage=1|2"
ZERO_ONLY = only_with(WITH_ZERO)
"""Mark of a field that DeepSpeed ignores without ZeRO (stage 0)."""
PYTORCHS = only_with("torch_adam or optimizer.type=AdamW8bit")
PLANNED = only_with("schedule=planned|auto or stages=1")  # which is recorded as 1F1B


def _why(reason: str) -> Any:
    """Return the annotation of a field whose other values are refused for this reason."""
    return Field(json_schema_extra={"reason": reason})


class Off(Section):
    """A block that this project does not use, and that may only be off."""

    model_config = ConfigDict(extra="allow")
    enabled: No = False


class Fp16(Section):
    """Half precision with a loss scale; not with bf16."""

    enabled: bool = False
    """On a CPU: fp16 storage, fp32 arithmetic."""
    loss_scale: Annotated[float, Field(ge=0.0, le=2.0**32)] = 0.0
    """0 is dynamic, anything else a fixed scale."""
    initial_scale_power: Annotated[int, Field(ge=0, le=32)] = 16
    """The dynamic scale starts at 2 to this power."""
    loss_scale_window: Steps = 1000
    """Steps without overflow before the scale doubles."""
    hysteresis: Steps = 2
    """Overflows before the scale halves; without ZeRO only 1."""
    consecutive_hysteresis: Annotated[bool, ZERO_ONLY] = False
    """Refill the hysteresis at every good step. Only with ZeRO 1 or 2."""
    min_loss_scale: Annotated[int, Field(ge=1, le=2**32)] = 1
    """Floor of the scale; a run that overflows there stops."""
    auto_cast: Annotated[No, _why("the engine casts its own input")] = False
    fp16_master_weights_and_grads: Annotated[No, _why("master weights are fp32")] = False


class Bf16(Section):
    """bfloat16 with fp32 master weights."""

    enabled: bool = False
    """Use bf16; without ZeRO by DeepSpeed's BF16_Optimizer."""
    check_grad_overflow: bool = True
    """Skip a step whose gradients are not finite."""


class DataTypes(Section):
    """Types other than the model's."""

    grad_accum_dtype: Annotated[Literal["fp32"] | None, only_with(WITH_ZERO, "fp16.enabled or bf16.enabled")] = None
    """Accumulate gradients of fp16 or bf16 in fp32. Only with ZeRO 1 or 2."""


class OffloadOptimizer(Section):
    """Adam's state in host memory, where PyTorch's fused AdamW steps it. Only with ZeRO 1 or 2."""

    device: Annotated[Literal["none", "cpu"], _why("NVMe is not tested here")] = "none"
    """Where the state is."""
    pin_memory: bool = True
    """Page-locked host memory."""


class Zero(Section):
    """Partitioning of optimizer state and gradients over replicas."""

    stage: Annotated[
        Literal[0, 1, 2],
        BeforeValidator(no_switch),
        _why("ZeRO-3 would gather a stage's weights anew for every micro-batch, so use 2 instead"),
    ] = 0
    """0 partitions nothing, 1 the optimizer's state, 2 also gradients."""
    reduce_bucket_size: Annotated[Annotated[int, Field(ge=1, le=MOST_BUCKET)] | Auto, ZERO_ONLY] = "auto"
    """Elements reduced at a time, for which memory is allocated; "auto" is 8388608 (2 to the 23rd), while DeepSpeed's
    default is 500 million. Only with ZeRO 1 or 2."""
    allgather_bucket_size: Annotated[Annotated[int, Field(ge=2, le=MOST_BUCKET, multiple_of=2)] | Auto, ZERO_ONLY] = (
        "auto"
    )
    """Elements gathered at a time; "auto" is 8388608 (2 to the 23rd). Only with ZeRO 1 or 2."""
    reduce_scatter: Annotated[bool, ZERO_ONLY] = True
    """false: all-reduce instead. Only with ZeRO 1 or 2."""
    use_multi_rank_bucket_allreduce: Annotated[bool, ZERO_ONLY] = True
    """One reduction for all ranks; ZeRO-1 scatters instead. Only with ZeRO 1 or 2."""
    offload_optimizer: Annotated[OffloadOptimizer, ZERO_ONLY] = OffloadOptimizer()
    """Adam's state in host memory."""
    overlap_comm: Annotated[No | None, _why("DeepSpeed turns it off under a pipeline")] = None
    contiguous_gradients: Annotated[Yes, _why("the ZeRO-2 path is tested with it on")] = True
    allgather_partitions: Annotated[Yes, _why("DeepSpeed reads it and never uses it")] = True
    compute_grad_norm: Annotated[Yes, _why("train/total_grad_norm and the finite check need it")] = True
    ignore_unused_parameters: Annotated[Yes, _why("every parameter has a gradient")] = True
    round_robin_gradients: Annotated[
        No, _why("it reorders the flat partitions and was not tested under a pipeline")
    ] = False
    load_from_fp32_weights: Annotated[Yes, _why("this project writes checkpoints of its own")] = True
    elastic_checkpoint: Annotated[No, _why("this project writes checkpoints of its own")] = False


class OptimizerParams(Section):
    """Settings of AdamW."""

    lr: PositiveRate | Auto = "auto"
    """"auto" is the spec's `optimizer.learning_rate`."""
    betas: tuple[Fraction, Fraction] | Auto = "auto"
    """"auto" is the spec's `optimizer.betas`."""
    eps: Small | Auto = "auto"
    """"auto" is the spec's `optimizer.epsilon`."""
    weight_decay: Annotated[float, Field(ge=0.0, le=1e3)] | Auto = "auto"
    """"auto" is the spec's `optimizer.weight_decay`."""
    torch_adam: bool = False
    """true: PyTorch's own. false: DeepSpeed's, which needs a compiler, and in fp16 ZeRO. AdamW8bit ignores it."""
    fused: Annotated[bool | None, PYTORCHS] = None
    """PyTorch's variant. AdamW8bit ignores it."""
    foreach: Annotated[bool | None, PYTORCHS] = None
    """PyTorch's variant. AdamW8bit ignores it."""
    adam_w_mode: Annotated[Yes, _why("the spec's weight decay is decoupled")] = True
    bias_correction: Annotated[Yes, _why("the spec means Adam as published")] = True
    amsgrad: Annotated[No, _why("its third moment is not in checkpoints")] = False


class Optimizer(Section):
    """The optimizer, which is required."""

    type: Annotated[
        Literal["AdamW", "Adam", "AdamW8bit"],
        BeforeValidator(lambda kind: _SPELLINGS.get(kind.lower(), kind) if isinstance(kind, str) else kind),
        _why("the spec's optimizer section describes AdamW"),
    ] = None  # type: ignore[assignment] # a missing type is found beside the other keys
    """Required; in any case of letters. All are AdamW, as in DeepSpeed: weight decay is decoupled. AdamW8bit, which is
    this project's, keeps the moments of weights in 8 bits (docs/performance.md)."""
    params: OptimizerParams = OptimizerParams()
    """Its settings."""


class SchedulerParams(Section):
    """Settings of a schedule of the learning rate."""

    warmup_min_lr: Rate | Auto = "auto"
    """"auto" is 0. Not for WarmupCosineLR."""
    warmup_max_lr: PositiveRate | Auto = "auto"
    """"auto" is the spec's `optimizer.learning_rate`. Not for WarmupCosineLR."""
    warmup_min_ratio: Share | Auto = "auto"
    """"auto" is 0. Only for WarmupCosineLR."""
    warmup_num_steps: Steps | Auto = "auto"
    """"auto" is the spec's `optimizer.warmup_images` / batch, rounded up."""
    warmup_type: Literal["linear", "log", "auto"] = "auto"
    """"auto" is linear; DeepSpeed's default is log."""
    total_num_steps: Steps | Auto = "auto"
    """"auto" is the spec's `train.images` / batch, rounded up. Not for WarmupLR."""
    cos_min_ratio: Share = 1e-4
    """Last share of the learning rate; only for WarmupCosineLR."""
    last_batch_iteration: Annotated[Literal[-1], _why("resuming sets it")] = -1


class Scheduler(Section):
    """Schedule of the learning rate, required with the spec's `optimizer.warmup_images`. If that is 0, or the spec's
    `optimizer.decay` decides the learning rate, a WarmupLR is dropped."""

    type: Annotated[
        Literal["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"], _why("others bring learning rates of their own")
    ] = None  # type: ignore[assignment] # likewise
    """Required in this block: constant, linear decay or cosine decay after the warm-up."""
    params: SchedulerParams = SchedulerParams()
    """Its settings."""


def _block_of_auto(value: object) -> object:
    """Return the block that "auto" stands for, and lists as the tuples that a block is strict about."""
    if not isinstance(value, dict):
        return {"size": "auto"} if value == "auto" else value
    return {name: tuple(inside) if isinstance(inside, list) else inside for name, inside in value.items()}


class TensorGroups(Section):
    """Groups of neighbouring ranks that compute layers of a stage together, each with a part of their weights
    (docs/tensor.md)."""

    size: Annotated[int, Field(ge=1, le=MOST_PROCESSES)] | Auto = 1
    """Number of ranks of a group; 1 splits nothing. "auto" leaves the whole block to the planner."""
    levels: tuple[Annotated[int, Field(ge=0, le=MOST_LAYERS)], ...] | Literal["all", "auto"] = "all"
    """Levels of the U-Net whose layers are split: 0 is full size, and the middle belongs to the last. "auto" leaves to
    the planner how many, from level 0 on."""
    layers: tuple[str, ...] = ()
    """Names of the layers that are split instead, or patterns of names, such as "up.0.*" (docs/design.md has the
    names of a U-Net)."""


class Pipeline(Section):
    """How the U-Net is cut and in which order the stages work; DeepSpeed never uses the first two keys."""

    stages: Annotated[int, Field(ge=1, le=MOST_PROCESSES)] | Auto = "auto"
    """Number of stages, unless `-p` is given; "auto" is the number that a list in `partition` implies, else the
    planner's choice (docs/planner.md)."""
    partition: CutMethod | Cuts | Auto = "auto"
    """Balance of the cuts (the slowest rank's flops, parameters, number of layers, or seconds, for which each layer
    is timed when the run starts), or a rising list of the first layers of stage 1, 2, ... (a fold has two stages for
    each of `stages`). "auto" is "flops"."""
    schedule: Literal["1f1b", "folded", "planned", "auto"] = "auto"
    """This project's key: one forward, one backward in turn; or DualPipeV over mirrored stages, two on each rank, so
    that skips stay there; or an order computed for the run on the same stages, with separate weight gradients. "auto"
    is "planned"; "1f1b" on one stage, and if a list in `partition` has one cut fewer than `stages`."""
    in_flight: Annotated[Batch | Auto, PLANNED] = "auto"
    """This project's key, for a planned schedule: maximum micro-batches that a rank holds, from their first forward to
    their last weight gradients. Fewer take less memory. A single stage computes the weight gradients of this many
    together. "auto" is two for each stage, three under ZeRO-2 with replicas, or one if memory is short; 1 on a single
    stage."""
    across_hosts: Literal["stages", "replicas", "auto"] = "auto"
    """This project's key: whether several hosts share the stages of a pipeline, or have whole pipelines. "auto" is the
    axis with fewer bytes per step for the busiest host (docs/planner.md)."""
    tensor: Annotated[TensorGroups, BeforeValidator(_block_of_auto, json_schema_input_type=TensorGroups | Auto)] = (
        TensorGroups()
    )
    """This project's key: layers that are split among the ranks of tensor groups. Without it nothing is split; "auto"
    leaves it to the planner."""
    activation_checkpoint_interval: Annotated[int, Field(ge=0, le=MOST_LAYERS)] | Auto = "auto"
    """Layers between kept activations; 0 keeps all. "auto" is chosen from memory when the run starts."""
    use_reentrant: bool = False
    """PyTorch's older checkpointing."""
    pipe_partitioned: bool = True
    """Changes nothing under a pipeline."""
    grad_partitioned: bool = True
    """Changes nothing under a pipeline."""
    seed_layers: Annotated[No, _why("weights follow from the seed and the layer alone")] = False


_DAMAGES = "it empties tensors in place that a U-Net hands on as skips; see pipeline.activation_checkpoint_interval"
_NEVER_READ = "its engines never read it; see pipeline.activation_checkpoint_interval"


class ActivationCheckpointing(Section):
    """DeepSpeed's block, which may only be off: use `pipeline.activation_checkpoint_interval`."""

    partition_activations: Annotated[No, _why(_DAMAGES)] = False
    cpu_checkpointing: Annotated[No, _why(_DAMAGES)] = False
    contiguous_memory_optimization: Annotated[No, _why("the micro-batches in flight overrun its buffers")] = False
    number_checkpoints: Annotated[None, _why(_NEVER_READ)] = None
    synchronize_checkpoint_boundary: Annotated[No, _why(_NEVER_READ)] = False
    profile: Annotated[No, _why(_NEVER_READ)] = False


class CommsLogger(Section):
    """DeepSpeed times its collectives, but not messages between stages, and waits for the device at each."""

    enabled: bool = False
    """Time them."""
    prof_all: bool = True
    """All collectives."""
    prof_ops: tuple[str, ...] = ()
    """Names of collectives, if prof_all is false."""
    verbose: bool = False
    """Log each of them."""
    debug: bool = False
    """Log who calls them."""


class FlopsProfiler(Section):
    """DeepSpeed's profile of each stage's forward, in RUN_DIR/flops and in MLflow."""

    enabled: bool = False
    """Profile one forward of one step."""
    profile_step: Steps = 1
    """Which optimizer step of the run, from 1."""
    top_modules: Annotated[int, Field(ge=1, le=10**6)] = 1
    """How many of the largest modules the summary names."""
    module_depth: Annotated[int, Field(ge=-1, le=100)] = -1
    """Depth of the summary: 0 the stage, 1 its layers, 2 their parts; -1 all."""
    detailed: bool = True
    """Print the whole tree of modules."""
    output_file: FilePath | None = None
    """For the stages' texts, instead of RUN_DIR/flops/flops; `.stage0.txt` ... are appended."""
    recompute_fwd_factor: Annotated[
        Literal[0], BeforeValidator(no_switch), _why("recomputation is not counted as work")
    ] = 0


class Throughput(Section):
    """Only off: this engine measures throughput itself, without waiting for the device."""

    enabled: Annotated[No, _why("this engine measures throughput itself, without waiting")] = False
    synchronized: bool = True
    """Changes nothing under a pipeline."""


class Timers(Section):
    """DeepSpeed's timers, which may only be off."""

    throughput: Throughput = Throughput()
    """DeepSpeed's measure of throughput."""


class Checkpoint(Section):
    """DeepSpeed's block, which may only be off: this project writes checkpoints of its own."""

    load_universal: Annotated[No, _why("this project writes checkpoints of its own")] = False
    use_node_local_storage: Annotated[No, _why("this project writes checkpoints of its own")] = False


Tracker = Annotated[Off, _why("this engine does not write to it; runs are tracked in MLflow")]


class DsConfig(Section):
    """A DeepSpeed JSON. A key that is left out means the same as its default."""

    train_batch_size: Batch | Auto = "auto"
    """"auto" is the spec's `train.batch_images`."""
    train_micro_batch_size_per_gpu: Batch | Auto = "auto"
    """Images per micro-batch of one replica. "auto" is batch / replicas / accumulation."""
    gradient_accumulation_steps: Batch | Auto = "auto"
    """Micro-batches per replica and step. "auto" is the spec's `train.accumulation`; if that is auto too: 1 with one
    stage, else the smallest divisor of the replica's batch that is at least 4 x stages."""
    fp16: Fp16 = Fp16()
    """Half precision."""
    bf16: Bf16 = Bf16()
    """bfloat16."""
    data_types: DataTypes = DataTypes()
    """Types other than the model's."""
    zero_optimization: Zero = Zero()
    """ZeRO."""
    optimizer: Optimizer = Optimizer()
    """The optimizer."""
    gradient_clipping: Annotated[float, Field(ge=0.0, le=1e9)] = 1.0
    """Norm over all stages. 0 is off; without the key DeepSpeed clips at 1.0."""
    scheduler: Scheduler = Scheduler()
    """Schedule of the learning rate."""
    pipeline: Pipeline = Pipeline()
    """Cuts and schedule."""
    compile: Annotated[
        bool, _why("DeepSpeed's block, for DeepCompile, replaces the backward that the pipeline schedules")
    ] = False
    """In this project: compile each layer's arithmetic by torch.compile, once per shape."""
    kernels: Literal["fused", "reference", "auto"] = "auto"
    """This project's key: Triton kernels for group normalisations with SiLU and dropout masks, or PyTorch's operations.
    "auto" is "fused" where steps are CUDA graphs; elsewhere only masks have their kernel (docs/performance.md)."""
    graphs: Annotated[
        Literal["auto"] | bool,
        needs(
            "true",
            "zero_optimization.offload_optimizer.device=none",
            "zero_optimization.stage=1|2 or bf16.enabled",
            "optimizer.type=AdamW8bit or optimizer.params.fused",
            "wall_clock_breakdown=false",
        ),
    ] = "auto"
    """This project's key: replay each step as one CUDA graph, after a trial. "auto" does so where each process has the
    whole U-Net, alone or as one of several replicas; true also in tensor groups and, as one graph for each part between
    two messages, in pipelines."""
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    """Only off."""
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = None
    """Type in which gradients are reduced."""
    comms_logger: CommsLogger = CommsLogger()
    """Times of collectives."""
    wall_clock_breakdown: bool = False
    """Time of each pipeline instruction, every steps_per_print steps, in DeepSpeed's log (`--verbose`). It waits for
    the device at each."""
    flops_profiler: FlopsProfiler = FlopsProfiler()
    """DeepSpeed's profile of each stage."""
    steps_per_print: Steps | Auto | None = None
    """Steps between lines in DeepSpeed's log (`--verbose`); null prints none. "auto", the default with
    wall_clock_breakdown, is `logging.log_every_images` / batch, rounded up."""
    timers: Timers = Timers()
    """Only off."""
    dump_state: bool = False
    """The engine's state at start, in DeepSpeed's log (`--verbose`)."""
    log_level: Literal["debug", "info", "warning", "error", "critical"] = "warning"
    """Level of DeepSpeed's logger."""
    checkpoint: Checkpoint = Checkpoint()
    """Only off."""
    tensorboard: Tracker = Off()
    wandb: Tracker = Off()
    csv_monitor: Tracker = Off()
    comet: Tracker = Off()
    autotuning: Annotated[Off, _why("it restarts a program that it does not know")] = Off()
    torch_autocast: Annotated[Off, _why("the layers choose their own arithmetic, by the fp16 or bf16 block")] = Off()
    data_efficiency: Annotated[Off, _why("batches come from this project's own loader")] = Off()
    dataloader_drop_last: Annotated[No, _why("batches come from this project's own loader")] = False
    prescale_gradients: Annotated[No, _why("ZeRO-2 refuses it and ZeRO-1 ignores it")] = False
    gradient_predivide_factor: Annotated[
        Literal[1], BeforeValidator(no_switch), _why("ZeRO-2 refuses it and ZeRO-1 ignores it")
    ] = 1
    zero_allow_untested_optimizer: Annotated[No, _why("Adam and AdamW are the optimizers here, and tested")] = False
    zero_force_ds_cpu_optimizer: Annotated[Yes, _why("it is about optimizers passed as objects")] = True
    disable_allgather: Annotated[No, _why("DeepSpeed reads it and never uses it")] = False
    memory_breakdown: Annotated[No, _why("DeepSpeed logs it in hooks that this engine replaces")] = False

    @property
    def given(self) -> dict[str, Any]:
        """The keys that were given, as a JSON, without the blocks that are off."""
        return self.model_dump(mode="json", exclude_unset=True, exclude=UNUSED)

    @property
    def precision(self) -> Precision:
        """Type of weights, activations and messages."""
        return "fp16" if self.fp16.enabled else "bf16" if self.bf16.enabled else "fp32"

    @property
    def offloads(self) -> bool:
        """Whether Adam's state is in host memory."""
        return self.zero_optimization.offload_optimizer.device != "none"

    @property
    def is_8bit(self) -> bool:
        """Whether Adam keeps the moments of weights in 8 bits."""
        return self.optimizer.type == EIGHT_BIT

    @property
    def fp16_needs_zero(self) -> bool:
        """Whether fp16 is trained by ZeRO alone: DeepSpeed's own Adam without ZeRO flattens all weights into one."""
        return self.precision == "fp16" and not self.is_8bit and not self.optimizer.params.torch_adam

    @property
    def adds_in_fp32(self) -> bool:
        """Whether the gradients of micro-batches are added up in fp32, whatever the precision."""
        return self.data_types.grad_accum_dtype == "fp32"


_REMOVED = "DeepSpeed removed it"
_ZERO3 = "only ZeRO-3 reads it, which a pipeline can't use"
_NVME = "only NVMe offload reads it, which is not tested here"
_AXES = "replicas follow from the processes, pipeline.stages and pipeline.tensor, the only parallelism here"
_REASONS = {
    _REMOVED: "amp compression_training curriculum_learning eigenvalue elasticity nebula progressive_layer_drop "
    "quantize_training sparse_attention sparse_gradients",
    _ZERO3: "cpu_offload_param gather_16bit_weights_on_model_save max_live_parameters max_reuse_distance offload_param "
    "param_persistence_threshold prefetch_bucket_size stage3_gather_16bit_weights_on_model_save "
    "stage3_gather_fp16_weights_on_model_save stage3_max_live_parameters stage3_max_reuse_distance "
    "stage3_param_persistence_threshold stage3_prefetch_bucket_size sub_group_size zero_hpz_partition_size "
    "zero_quantized_gradients zero_quantized_weights",
    _NVME: "aio buffer_count fast_init nvme_path pipeline_read pipeline_write",
    _AXES: "data_parallel_size expert_parallel sequence_parallel_size tensor_parallel",
    "it is an old name": "allgather_size bfloat16 cpu_offload cpu_offload_use_pin_memory",
    "DeepSpeed refuses it here": "optimizer.params.max_grad_norm",
}
REFUSED = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Reasons why keys that people write are refused, by dotted key, or by name in any block."""
RENAMED: dict[str, tuple[str, object]] = {
    "bfloat16": ("bf16.enabled", True),
    "zero_optimization.cpu_offload": ("zero_optimization.offload_optimizer.device", "cpu"),
    "allgather_size": ("zero_optimization.allgather_bucket_size", None),
    "optimizer.params.max_grad_norm": ("gradient_clipping", None),
}
"""Refused keys for which there is another, and its value if the refused one is on; None means the same value."""
SYNONYMS = {
    "learning_rate": "optimizer.params.lr",
    "warmup_steps": "scheduler.params.warmup_num_steps",
    "batch_size": "train_batch_size",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "chunks": "gradient_accumulation_steps",
    "max_grad_norm": "gradient_clipping",
    "clip_grad": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "num_stages": "pipeline.stages",
    "tp_size": "pipeline.tensor.size",
    "tensor_parallel_size": "pipeline.tensor.size",
    "tensor_model_parallel_size": "pipeline.tensor.size",
    "pipeline_parallel_size": "pipeline.stages",
    "partition_method": "pipeline.partition",
}
"""Names that people type, in any block, for a key."""


def given_at(values: Mapping[str, object], key: str) -> object:
    """Return the value of a dotted key of a JSON; None if it is not given."""
    *blocks, name = key.split(".")
    for block in blocks:
        inside = values.get(block)
        values = inside if isinstance(inside, dict) else {}
    return values.get(name)


def changed(config: DsConfig, values: Mapping[str, object]) -> DsConfig:
    """Return a JSON with other values at dotted keys; a value of :data:`REMOVED` takes the key away."""
    given = config.given
    for key, value in values.items():
        *blocks, name = key.split(".")
        place = given
        for block in blocks:
            place = place.setdefault(block, {})
        if value is REMOVED:
            place.pop(name, None)
        else:
            place[name] = value
    return DS_CONFIG.read(given)


def nested(key: str, value: object) -> str:
    """Return a dotted key and its value as they are written at the top of a JSON."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return json.dumps(value)[1:-1]


def _unknown(key: str, value: object, values: Mapping[str, object]) -> str | None:
    name = key.rpartition(".")[2]
    if given_at(values, key) is not value:  # DeepSpeed has no dotted keys
        return f"{key} is unknown: a dot is no block; write {nested(key, value)}"
    if reason := REFUSED.get(key) or REFUSED.get(name):
        new, on = RENAMED.get(key, ("", None))
        instead, held = "remove it", value.get("enabled") if isinstance(value, dict) else value
        if new and given_at(values, new) is None and (not is_off(held) or new == "gradient_clipping"):
            instead = f"write {nested(new, 0 if is_off(held) else held if on is None else on)} instead"
        return f"{key} = {shown(value)} is refused: {reason}; {instead}"
    return None


UNUSED = {name for name, field in DsConfig.model_fields.items() if isinstance(field.default, Off)}
"""Blocks that are off, and not handed to DeepSpeed, which may not know their keys."""
DS_CONFIG = Format(DsConfig, SYNONYMS, _unknown, section="a block", lists_known=False)
"""The DeepSpeed JSON as a kind of file."""
