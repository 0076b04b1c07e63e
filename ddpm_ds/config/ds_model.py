"""Every key of the DeepSpeed JSON that a pipelined U-Net run accepts, as pydantic models.

Keys of DeepSpeed 0.19 that would break a pipeline, or be ignored in silence, are not here, and so are refused.
``docs/ds_configs.md`` prints these models.
"""

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from ddpm_ds.ground.units import MOST_IMAGES, MOST_PROCESSES, Precision
from ddpm_ds.schema.section import (
    REMOVED,
    Format,
    Section,
    broken_rule,
    is_off,
    needs,
    no_switch,
    only_with,
    shown,
)
from ddpm_ds.schema.types import MOST_LAYERS, MOST_LEARNING_RATE, Batch, FilePath, Fraction, Small

Auto = Literal["auto"]
"""Value of a key that follows from the spec, the processes or the device, as if the key were left out."""
# Ranges end where DeepSpeed's own arithmetic or memory would fail, or far beyond useful values.
Steps = Annotated[int, Field(ge=1, le=MOST_IMAGES)]
PositiveRate = Annotated[float, Field(gt=0.0, le=MOST_LEARNING_RATE)]
MOST_SPACE = 8  # maximum ranks that share an image: more have hardly any rows
MOST_BUCKET = 2**31  # maximum elements of a bucket: 8 GiB of fp32
CutMethod = Literal["flops", "measured", "parameters", "uniform"]
"""Method of cutting the U-Net into stages if the JSON does not list the cuts."""


EIGHT_BIT: Literal["AdamW8bit"] = "AdamW8bit"  # type of the optimizer whose moments take 8 bits
_SPELLINGS = {name.lower(): name for name in ("AdamW", "Adam", EIGHT_BIT)}
"""Published spellings of the optimizers, which DeepSpeed reads in any case of letters."""


def _rising(cuts: tuple[int, ...]) -> tuple[int, ...]:
    if any(low >= high for low, high in pairwise(cuts)):
        raise broken_rule("should rise from cut to cut, such as [3, 7]")
    return cuts


def _from_0(levels: tuple[int, ...]) -> tuple[int, ...]:
    if levels != tuple(range(len(levels))) or not levels:
        raise broken_rule("should be 0, 1, ... without a gap, such as [0, 1]")
    return levels


Cuts = Annotated[tuple[Annotated[int, Field(ge=1, le=MOST_LAYERS)], ...], AfterValidator(_rising)]
WITH_ZERO = "zero_optimization.stage=1|2"
ZERO_ONLY = only_with(WITH_ZERO)  # mark of a field that DeepSpeed ignores without ZeRO (stage 0)
PYTORCHS = only_with("torch_adam or optimizer.type=AdamW8bit")
PLANNED = only_with("schedule=planned|auto or stages=1")  # which is recorded as 1F1B


def _why(reason: str) -> Any:
    """Return the annotation of a field with the reason why other values are refused."""
    return Field(json_schema_extra={"reason": reason})


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
    """Refill the hysteresis at every good step."""
    min_loss_scale: Annotated[int, Field(ge=1, le=2**32)] = 1
    """Floor of the scale; a run that overflows there stops."""


class Bf16(Section):
    """bfloat16 with fp32 master weights."""

    enabled: Annotated[bool, only_with("fp16.enabled=false")] = False
    """Use bf16; without ZeRO by DeepSpeed's BF16_Optimizer."""
    check_grad_overflow: bool = True
    """Skip a step whose gradients are not finite."""


WideSums = Literal["fp32", "auto"] | None


class DataTypes(Section):
    """Types other than the model's."""

    grad_accum_dtype: Annotated[WideSums, only_with(WITH_ZERO, "fp16.enabled or bf16.enabled")] = "auto"
    """Type in which gradients of fp16 or bf16 are added up; null is their own. "auto" is fp32 where a step has several
    micro-batches: 64 of them lose 0.9 % of a bf16 sum."""


class OffloadOptimizer(Section):
    """Adam's state in host memory, where PyTorch's fused AdamW steps it."""

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
    """Elements of a chunk, whose gradients are averaged and whose weights are gathered at a time; "auto" is 8388608."""
    offload_optimizer: Annotated[OffloadOptimizer, ZERO_ONLY] = OffloadOptimizer()


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
    foreach: Annotated[bool | None, PYTORCHS, only_with("fused=null|false")] = None
    """PyTorch's variant. AdamW8bit ignores it."""
    stochastic_rounding: Annotated[bool, only_with("optimizer.type=AdamW8bit", "bf16.enabled", WITH_ZERO)] = False
    """This project's key: weights in bf16 alone, without fp32 masters; each step is rounded at random, so that small
    ones count on the mean. Weights and moments take 4 bytes a parameter."""


class Optimizer(Section):
    """The optimizer, which is required."""

    type: Annotated[
        Literal["AdamW", "Adam", "AdamW8bit"],
        needs("AdamW8bit", "zero_optimization.offload_optimizer.device=none"),
        BeforeValidator(lambda kind: _SPELLINGS.get(kind.lower(), kind) if isinstance(kind, str) else kind),
        _why("the spec's optimizer section describes AdamW"),
    ] = None  # type: ignore[assignment] # a missing type is found beside the other keys
    """Required. All are AdamW, with decoupled weight decay. AdamW8bit, this project's, keeps moments in 8 bits."""
    params: OptimizerParams = OptimizerParams()


class SchedulerParams(Section):
    """Settings of the warm-up."""

    warmup_min_lr: Annotated[
        Annotated[Literal[0], BeforeValidator(no_switch)] | Auto, _why("every warm-up begins at 0")
    ] = "auto"
    warmup_max_lr: PositiveRate | Auto = "auto"
    """"auto" is the spec's `optimizer.learning_rate`."""
    warmup_num_steps: Steps | Auto = "auto"
    """"auto" is the spec's `optimizer.warmup_images` / batch, rounded up."""
    warmup_type: Annotated[Literal["linear", "auto"], _why("every warm-up is linear")] = "auto"


class Scheduler(Section):
    """Warm-up, needed and only read with `optimizer.warmup_images` and without `optimizer.decay`."""

    type: Annotated[Literal["WarmupLR"], _why("for a decay use the spec's optimizer.decay")] = None  # type: ignore[assignment] # likewise
    """Required in this block."""
    params: SchedulerParams = SchedulerParams()


def _block_of_auto(value: object) -> object:
    """Return the block that "auto" stands for, and lists as the tuples that a block is strict about."""
    if not isinstance(value, dict):
        return {"size": "auto"} if value == "auto" else value
    return {name: tuple(inside) if isinstance(inside, list) else inside for name, inside in value.items()}


class TensorGroups(Section):
    """Groups of neighbouring ranks that compute layers together, each with a part of the weights (docs/tensor.md)."""

    size: Annotated[
        Annotated[int, Field(ge=1, le=MOST_PROCESSES)] | Auto, needs("auto", "levels=all|auto", "layers=[]")
    ] = 1
    """Number of ranks of a group; 1 splits nothing. "auto" leaves the whole block to the planner."""
    levels: tuple[Annotated[int, Field(ge=0, le=MOST_LAYERS)], ...] | Literal["all", "auto"] = "all"
    """Levels of the U-Net that are split, 0 at full size; the middle is of the last. "auto": the planner's."""
    layers: Annotated[tuple[str, ...], only_with("levels=all")] = ()
    """Names of the layers that are split instead, or patterns of names (docs/design.md), such as "up.0.*"."""


class SpaceGroups(Section):
    """Groups of neighbouring ranks that share the rows of each image, all with the same weights (docs/space.md)."""

    size: Annotated[Annotated[int, Field(ge=1, le=MOST_SPACE)] | Auto, needs("auto", "levels=auto")] = 1
    """Number of ranks of a group; 1 shares nothing. "auto" leaves size and levels to the planner."""
    levels: Annotated[tuple[Annotated[int, Field(ge=0, le=MOST_LAYERS)], ...], AfterValidator(_from_0)] | Auto = "auto"
    """Levels of the U-Net whose rows are shared, 0 (full size) to some level; each rank computes lower ones whole.
    "auto": down to the lowest at which no rank has more than 1.1 times its share."""


class Pipeline(Section):
    """How the U-Net is cut and in which order the stages work; DeepSpeed never uses the first two keys."""

    stages: Annotated[int, Field(ge=1, le=MOST_PROCESSES)] | Auto = "auto"
    """Number of stages, unless `-p` is given; "auto" follows from a list in `partition`, or is the planner's."""
    partition: CutMethod | Cuts | Auto = "auto"
    """Measure by which the cuts balance ranks ("measured" times each layer at the start, "uniform" counts layers), or a
    list of the first layers of stage 1, 2, ... (a fold has two stages for each of `stages`). "auto" is "measured"."""
    schedule: Literal["1f1b", "folded", "planned", "auto"] = "auto"
    """This project's key: one forward, one backward; or DualPipeV over mirrored stages, two on each rank, so that skips
    stay there; or an order computed for the run on such stages, with separate weight gradients. "auto" is "planned", or
    "1f1b" on one stage and where a list in `partition` has one cut fewer than `stages`."""
    in_flight: Annotated[Batch | Auto, PLANNED] = "auto"
    """This project's key: maximum micro-batches that a rank keeps until their last weight gradients; one stage computes
    those of this many together. "auto" is 2 for each stage, 3 under ZeRO-2 with replicas, 1 if memory is short."""
    across_hosts: Literal["stages", "replicas", "auto"] = "auto"
    """This project's key: whether hosts share stages or have whole pipelines; "auto": what sends less."""
    tensor: Annotated[TensorGroups, BeforeValidator(_block_of_auto, json_schema_input_type=TensorGroups | Auto)] = (
        TensorGroups()
    )
    """This project's key: layers that tensor groups split. Without it nothing is split; "auto" asks the planner."""
    space: Annotated[SpaceGroups, BeforeValidator(_block_of_auto, json_schema_input_type=SpaceGroups | Auto)] = (
        SpaceGroups()
    )
    """This project's key: ranks that share the rows of each image. Without it none do; "auto" asks the planner."""
    activation_checkpoint_interval: Annotated[int, Field(ge=0, le=MOST_LAYERS)] | Auto = "auto"
    """Layers between kept activations; 0 keeps all. "auto" is chosen from memory when the run starts."""
    use_reentrant: bool = False
    """PyTorch's older checkpointing."""


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
    bf16: Bf16 = Bf16()
    data_types: DataTypes = DataTypes()
    zero_optimization: Zero = Zero()
    optimizer: Optimizer = Optimizer()
    gradient_clipping: Annotated[float, Field(ge=0.0, le=1e9)] = 1.0
    """Norm over all stages. 0 is off; without the key DeepSpeed clips at 1.0."""
    scheduler: Scheduler = Scheduler()
    pipeline: Pipeline = Pipeline()
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
    whole U-Net, alone or as one of several replicas; true also in tensor and space groups and, as one graph for each
    part between two messages, in pipelines."""
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = None
    """Type in which gradients are reduced."""
    wall_clock_breakdown: bool = False
    """Time of each instruction, every steps_per_print steps, in the log (`--verbose`); waits for the device."""
    flops_profiler: FlopsProfiler = FlopsProfiler()
    steps_per_print: Steps | Auto | None = None
    """Steps between lines in DeepSpeed's log (`--verbose`); null prints none. "auto", the default with
    wall_clock_breakdown, is `logging.log_every_images` / batch, rounded up."""
    dump_state: bool = False
    """The engine's state at start, in DeepSpeed's log (`--verbose`)."""
    log_level: Literal["debug", "info", "warning", "error", "critical"] = "warning"
    """Level of DeepSpeed's logger."""

    @property
    def given(self) -> dict[str, Any]:
        """The keys that were given, as a JSON."""
        return self.model_dump(mode="json", exclude_unset=True)

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
    def rounds(self) -> bool:
        """Whether weights have 16 bits alone, and are rounded at random."""
        return self.optimizer.params.stochastic_rounding

    @property
    def fp16_needs_zero(self) -> bool:
        """Whether fp16 is trained by ZeRO alone: DeepSpeed's own Adam without ZeRO flattens all weights into one."""
        return self.precision == "fp16" and not self.is_8bit and not self.optimizer.params.torch_adam

    def adds_in_fp32(self, zero_stage: int, micro_batches: int) -> bool:
        """Return whether so many micro-batches' gradients are added up in fp32, in fp16 or bf16 under ZeRO."""
        asked = self.data_types.grad_accum_dtype
        several = micro_batches > 1 and zero_stage > 0 and self.precision != "fp32"
        return asked == "fp32" or (asked == "auto" and several)


_REASONS = {
    "DeepSpeed removed it": "amp compression_training curriculum_learning eigenvalue elasticity nebula "
    "progressive_layer_drop quantize_training sparse_attention sparse_gradients",
    "only ZeRO-3 reads it, which a pipeline can't use": "cpu_offload_param gather_16bit_weights_on_model_save "
    "max_live_parameters max_reuse_distance offload_param param_persistence_threshold prefetch_bucket_size "
    "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save stage3_max_live_parameters "
    "stage3_max_reuse_distance stage3_param_persistence_threshold stage3_prefetch_bucket_size sub_group_size "
    "zero_hpz_partition_size zero_quantized_gradients zero_quantized_weights",
    "only NVMe offload reads it, which is not tested here": "aio buffer_count fast_init nvme_path pipeline_read "
    "pipeline_write",
    "replicas follow from the processes, pipeline.stages, pipeline.tensor and pipeline.space, the only parallelism "
    "here": "data_parallel_size expert_parallel sequence_parallel_size tensor_parallel",
    "it is an old name": "bfloat16 cpu_offload cpu_offload_use_pin_memory",
    "DeepSpeed refuses it here": "optimizer.params.max_grad_norm",
    "gradients and weights travel beside the computation, in chunks of reduce_bucket_size": "allgather_bucket_size "
    "allgather_size overlap_comm reduce_scatter use_multi_rank_bucket_allreduce",
    "DeepSpeed reads it and never uses it": "allgather_partitions disable_allgather grad_partitioned pipe_partitioned",
    "ZeRO-2 refuses it and ZeRO-1 ignores it": "gradient_predivide_factor prescale_gradients",
    "it is not tested under a pipeline": "contiguous_gradients round_robin_gradients",
    "the engine casts its own input, and master weights are fp32": "auto_cast fp16_master_weights_and_grads",
    "train/total_grad_norm and the finite check need it": "compute_grad_norm",
    "every parameter has a gradient": "ignore_unused_parameters",
    "the spec describes AdamW as published, with decoupled decay": "adam_w_mode amsgrad bias_correction",
    "only optimizers from elsewhere need it": "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
    "weights follow from the seed and the layer alone": "seed_layers",
    "it does nothing under a pipeline, or damages a U-Net's skips; see pipeline.activation_checkpoint_interval": (
        "activation_checkpointing"
    ),
    "recomputation is not counted as work": "recompute_fwd_factor",
    "this project writes checkpoints of its own": "checkpoint elastic_checkpoint last_batch_iteration "
    "load_from_fp32_weights",
    "this engine measures throughput itself, without waiting": "timers",
    "this engine does not write to it; runs are tracked in MLflow": "comet csv_monitor tensorboard wandb",
    "it waits for the device at each collective, and knows no message; trace a step instead": "comms_logger",
    "it restarts a program that it does not know": "autotuning",
    "the layers choose their own arithmetic, by the fp16 or bf16 block": "torch_autocast",
    "batches come from this project's own loader": "data_efficiency dataloader_drop_last",
    "DeepSpeed logs it in hooks that this engine replaces": "memory_breakdown",
}
REFUSED = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Reasons why keys are refused unless they are off, by dotted key, or by name in any block."""
_ON = (
    "adam_w_mode allgather_partitions bias_correction compute_grad_norm contiguous_gradients grad_partitioned "
    "ignore_unused_parameters load_from_fp32_weights pipe_partitioned reduce_scatter "
    "use_multi_rank_bucket_allreduce zero_force_ds_cpu_optimizer"
)
USUAL = {"gradient_predivide_factor": 1, "last_batch_iteration": -1} | dict.fromkeys(_ON.split(), True)
"""DeepSpeed's default of refused keys that are on by default, by name; no other value is accepted."""
RENAMED: dict[str, tuple[str, object]] = {
    "bfloat16": ("bf16.enabled", True),
    "zero_optimization.cpu_offload": ("zero_optimization.offload_optimizer.device", "cpu"),
    "optimizer.params.max_grad_norm": ("gradient_clipping", None),
}
"""Replacements of refused keys, with the value to write if the refused key is on; None means the same value."""
_SYNONYMS = {
    "optimizer.params.lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "train_batch_size": "batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "chunks",
    "gradient_clipping": "max_grad_norm clip_grad",
    "zero_optimization.stage": "zero_stage",
    "pipeline.stages": "num_stages pipeline_parallel_size",
    "pipeline.tensor.size": "tp_size tensor_parallel_size tensor_model_parallel_size",
    "pipeline.partition": "partition_method",
}
SYNONYMS = {name: key for key, names in _SYNONYMS.items() for name in names.split()}
"""Names that people type, in any block, for a key."""


def effective(values: Mapping[str, object], within: str = "") -> dict[str, Any]:
    """Return a JSON, or its block ``within``, without refused keys that change nothing."""
    kept = {}
    for name, value in values.items():
        key = within + name
        refused = key in REFUSED or name in REFUSED
        if not refused or RENAMED.get(key, ("",))[0] == "gradient_clipping" or not _changes_nothing(name, value):
            kept[name] = effective(value, f"{key}.") if isinstance(value, dict) else value
    return kept


def _changes_nothing(name: str, value: object) -> bool:
    """Return whether a refused key is off, has DeepSpeed's default, or is a block of such keys."""
    if isinstance(value, dict) and not {"enabled", "device"} & {*value}:
        return all(_changes_nothing(inner, inside) for inner, inside in value.items())
    return value == USUAL[name] if name in USUAL else is_off(value)


def given_at(values: Mapping[str, object], key: str) -> object:
    """Return the value of a dotted key of a JSON; None if it is not given."""
    *blocks, name = key.split(".")
    for block in blocks:
        inside = values.get(block)
        values = inside if isinstance(inside, dict) else {}
    return values.get(name)


def changed(config: DsConfig, values: Mapping[str, object]) -> DsConfig:
    """Return a JSON with other values at dotted keys; the value :data:`REMOVED` removes a key."""
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
    """Return the text of a dotted key and its value at the top of a JSON."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return json.dumps(value)[1:-1]


def _unknown(key: str, value: object, values: Mapping[str, object]) -> str | None:
    name = key.rpartition(".")[2]
    if given_at(values, key) is not value:  # DeepSpeed has no dotted keys
        return f"{key} is unknown: a dot is no block; write {nested(key, value)}"
    if reason := REFUSED.get(key) or REFUSED.get(name):
        new, on = RENAMED.get(key, ("", None))
        instead, given = "remove it", value.get("enabled") if isinstance(value, dict) else value
        if new and given_at(values, new) is None:
            instead = f"write {nested(new, 0 if is_off(given) else given if on is None else on)} instead"
        return f"{key} = {shown(value)} is refused: {reason}; {instead}"
    return None


DS_CONFIG = Format(DsConfig, SYNONYMS, _unknown, section="a block", lists_known=False)
"""The DeepSpeed JSON as a kind of file."""
