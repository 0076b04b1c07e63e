"""Every key that DeepSpeed 0.19 reads from its JSON, the values it takes, and its effect in a pipelined U-Net run.

The reader checks keys by this table, ``docs/ds_configs.md`` prints it, and a test compares it with the installed
DeepSpeed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise


class Effect(Enum):
    """The fate of a key. One that is accepted is checked and changes nothing."""

    TAKES_EFFECT = "takes effect"
    FROM_SPEC = "from the spec"
    ACCEPTED = "accepted"
    REFUSED = "refused"


@dataclass(frozen=True)
class Kind:
    """A type of value, in words and as a test."""

    words: str
    accepts: Callable[[object], bool]


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: object, least: int) -> bool:
    return _number(value) and value == int(value) and value >= least  # type: ignore[call-overload,operator]


def same(value: object, other: object) -> bool:
    """Return whether two JSON values are equal; true is not 1."""
    return type(value) is type(other) and value == other


def one_of(*choices: object) -> Kind:
    """One of some JSON values."""
    words = " or ".join(json.dumps(choice) for choice in choices)
    return Kind(words, lambda value: any(same(value, choice) for choice in choices))


SWITCH = Kind("true or false", lambda value: isinstance(value, bool))
COUNT = Kind("a whole number >= 0", lambda value: _whole(value, 0))
POSITIVE = Kind("a whole number > 0", lambda value: _whole(value, 1))
EVEN = Kind("an even whole number > 0", lambda value: _whole(value, 1) and value % 2 == 0)  # type: ignore[operator]
DEPTH = Kind("a whole number >= -1", lambda value: _whole(value, -1))
AMOUNT = Kind("a number >= 0", lambda value: _number(value) and value >= 0)  # type: ignore[operator]
TEXT_OR_NULL = Kind("text or null", lambda value: value is None or isinstance(value, str))
TEXTS = Kind("a list of texts", lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value))
PAIR = Kind(
    "a list of two numbers", lambda value: isinstance(value, list) and len(value) == 2 and all(map(_number, value))
)
CUTS = Kind(
    '"flops", "measured", "parameters", "uniform" or a rising list of whole numbers > 0',
    lambda value: (
        value in ("flops", "measured", "parameters", "uniform")
        or (
            isinstance(value, list)
            and all(_whole(cut, 1) for cut in value)
            and all(low < high for low, high in pairwise(value))
        )
    ),
)
BLOCK = Kind("a block {...}", lambda value: isinstance(value, dict))
ANY = Kind("anything", lambda value: True)


@dataclass(frozen=True)
class Key:
    """One row of the table: some dotted keys and their effect."""

    names: str
    """Dotted keys, separated by spaces."""
    effect: Effect
    kind: Kind
    note: str
    """Effect of the key; for a refused key the reason, and what to write instead."""
    auto: str = ""
    """The meaning of "auto"; empty where "auto" is not possible."""
    why: str = ""
    """Reason why other values than `kind` are not possible, where that needs saying."""
    inert: tuple[object, ...] = ()
    """Values of a refused key that have no effect and are accepted."""
    zero_only: bool = False
    """DeepSpeed ignores it without ZeRO (stage 0)."""


ISSUES = "https://github.com/deepspeedai/DeepSpeed/issues"


def _effective(names: str, kind: Kind, note: str, *, auto: str = "", why: str = "", zero_only: bool = False) -> Key:
    return Key(names, Effect.TAKES_EFFECT, kind, note, auto=auto, why=why, zero_only=zero_only)


def _from_spec(names: str, kind: Kind, auto: str) -> Key:
    return Key(names, Effect.FROM_SPEC, kind, "", auto=auto)


def _accepted(names: str, kind: Kind, note: str) -> Key:
    return Key(names, Effect.ACCEPTED, kind, note)


def _refused(names: str, note: str, *inert: object) -> Key:
    return Key(names, Effect.REFUSED, ANY, note, inert=inert)


def _inside(block: str, names: str) -> str:
    return " ".join(f"{block}.{name}" for name in names.split())


OFF = {"enabled": False}
_REMOVED = f"DeepSpeed removed it ({ISSUES}/8489); remove the key"
_ZERO3 = "only ZeRO-3 reads it, which a pipeline can't use; remove the key"
_MONITOR = "this engine does not write to it; runs are tracked in MLflow"
_OWN_LOADER = "batches come from this project's own loader; see the spec's data section"
_OWN_CHECKPOINTS = "checkpoints are written by this project, which sets it itself; remove the key"
_CONFIGURE = "DeepSpeed reads it only in deepspeed.checkpointing.configure, which its engines never call"
_FLAT_LAYOUT = "it reorders the flat partitions and was not tested under a pipeline; remove the key"
_OTHER_PARALLEL = "replicas follow from world size and pipeline.stages, the only parallelism here; remove the key"

TABLE: tuple[Key, ...] = (
    # Batch
    _from_spec("train_batch_size", POSITIVE, "`train.batch_images`"),
    _effective(
        "train_micro_batch_size_per_gpu",
        POSITIVE,
        "Images per micro-batch of one replica.",
        auto="batch / replicas / accumulation",
    ),
    _effective(
        "gradient_accumulation_steps",
        POSITIVE,
        "Micro-batches per replica and step.",
        auto="`train.accumulation`; where that is auto too: 1 with one stage, else the smallest divisor of the "
        "replica's batch that is at least 4 x stages",
    ),
    _refused("managed_gradient_accumulation", "the pipeline's schedule owns the accumulation boundary", True),
    _refused("dataloader_drop_last", _OWN_LOADER, False),
    _refused("data_efficiency", _OWN_LOADER, OFF),
    # Precision
    _effective("fp16", BLOCK, "Half precision with a loss scale; not with bf16."),
    _effective("fp16.enabled", SWITCH, "On a CPU: fp16 storage, fp32 arithmetic."),
    _effective("fp16.loss_scale", AMOUNT, "0 is dynamic, anything else a fixed scale."),
    _effective("fp16.initial_scale_power", COUNT, "The dynamic scale starts at 2 to this power."),
    _effective("fp16.loss_scale_window", POSITIVE, "Steps without overflow before the scale doubles."),
    _effective(
        "fp16.hysteresis",
        POSITIVE,
        "Overflows before the scale halves. Without ZeRO DeepSpeed ignores it: only 1 is let through.",
    ),
    _effective("fp16.consecutive_hysteresis", SWITCH, "Refill the hysteresis at every good step.", zero_only=True),
    _effective("fp16.min_loss_scale", POSITIVE, "Floor of the scale; a run that overflows there stops."),
    _refused("fp16.auto_cast", "the engine casts its own input", False),
    _refused("fp16.fp16_master_weights_and_grads", "master weights are fp32", False),
    _effective("bf16", BLOCK, "bfloat16 with fp32 master weights."),
    _effective("bf16.enabled", SWITCH, "Without ZeRO, gradients accumulate in fp32 (DeepSpeed's BF16_Optimizer)."),
    _effective("bf16.check_grad_overflow", SWITCH, "Skip a step whose gradients are not finite."),
    _refused("bf16.immediate_grad_update", "not tested here", False),
    _refused(_inside("bf16", "bf16_master_weights_and_grads bf16_optimizer_states"), "master weights are fp32", False),
    _refused("bfloat16", 'the old name; write "bf16"'),
    _refused("torch_autocast", "the layers choose their own arithmetic; use fp16 or bf16", OFF),
    _effective("data_types", BLOCK, "Types beside the model's."),
    _effective(
        "data_types.grad_accum_dtype",
        one_of("fp32"),
        "Accumulate gradients of fp16 or bf16 in fp32.",
        zero_only=True,
    ),
    _refused(_inside("data_types", "param_dtype buffer_dtype"), "the fp16 or bf16 block says it", None),
    _refused("data_types.keep_in_fp32_modules", "no layer has buffers to keep", "auto", []),
    # ZeRO
    _effective("zero_optimization", BLOCK, "Sharing optimizer state and gradients among replicas."),
    _effective(
        "zero_optimization.stage",
        one_of(0, 1, 2),
        "0 shares nothing, 1 the optimizer's state, 2 gradients as well. DeepSpeed's own pipeline engine refuses 2 "
        f"([1629]({ISSUES}/1629)); this one reduces after every micro-batch.",
        why="ZeRO-3 would gather a stage's weights anew for every micro-batch; use 2",
    ),
    _effective(
        "zero_optimization.reduce_bucket_size",
        POSITIVE,
        "Elements reduced at a time. DeepSpeed allocates that many per backward; its default is 500 million.",
        auto="8388608 (2 to the 23rd)",
        zero_only=True,
    ),
    _effective(
        "zero_optimization.allgather_bucket_size",
        EVEN,
        "Elements gathered at a time.",
        auto="8388608 (2 to the 23rd)",
        zero_only=True,
    ),
    _effective("zero_optimization.reduce_scatter", SWITCH, "false: all-reduce instead.", zero_only=True),
    _effective(
        "zero_optimization.use_multi_rank_bucket_allreduce", SWITCH, "One reduction for all ranks.", zero_only=True
    ),
    _effective("zero_optimization.offload_optimizer", BLOCK, "Adam's state in host memory.", zero_only=True),
    _effective("zero_optimization.offload_optimizer.device", one_of("none", "cpu"), "", why="NVMe is not tested here"),
    _effective("zero_optimization.offload_optimizer.pin_memory", SWITCH, "Page-locked host memory."),
    _refused(
        _inside("zero_optimization.offload_optimizer", "nvme_path buffer_count pipeline_read pipeline_write fast_init"),
        "only NVMe offload reads it; remove the key",
    ),
    _refused(_inside("zero_optimization.offload_optimizer", "ratio super_offload cpuadam_cores_perc"), _ZERO3),
    _refused("zero_optimization.overlap_comm", "DeepSpeed turns it off under a pipeline; write false", False, None),
    _refused("zero_optimization.contiguous_gradients", "the ZeRO-2 path is tested with it on; write true", True),
    _refused("zero_optimization.allgather_partitions", "DeepSpeed reads it and never uses it", True),
    _refused("zero_optimization.load_from_fp32_weights", _OWN_CHECKPOINTS, True),
    _refused("zero_optimization.elastic_checkpoint", _OWN_CHECKPOINTS, False),
    _refused("zero_optimization.compute_grad_norm", "train/grad_norm and the finite check need it", True),
    _refused("zero_optimization.ignore_unused_parameters", "every parameter has a gradient; remove the key", True),
    _refused(_inside("zero_optimization", "round_robin_gradients parameter_alignment"), _FLAT_LAYOUT, False),
    _refused("zero_optimization.legacy_stage1", "DeepSpeed no longer has it", False),
    _refused("zero_optimization.zenflow", "not tested under a pipeline; use offload_optimizer", None),
    _refused(
        _inside("zero_optimization", "cpu_offload cpu_offload_use_pin_memory"),
        'an old name; write "offload_optimizer": {"device": "cpu"}',
    ),
    _refused("zero_optimization.cpu_offload_param", _ZERO3),
    _refused("zero_optimization.offload_param", _ZERO3, None),
    _refused(
        _inside(
            "zero_optimization",
            "sub_group_size stage3_prefetch_bucket_size prefetch_bucket_size stage3_param_persistence_threshold "
            "param_persistence_threshold stage3_model_persistence_threshold model_persistence_threshold "
            "stage3_max_live_parameters max_live_parameters stage3_max_reuse_distance max_reuse_distance "
            "stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save "
            "stage3_gather_fp16_weights_on_model_save stage3_module_granularity_threshold "
            "module_granularity_threshold stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params "
            "stage3_allgather_sequential allgather_sequential zero_hpz_partition_size zero_quantized_weights "
            "zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear "
            "pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks "
            "save_muon_momentum_buffer_in_memory leaf_module",
        ),
        _ZERO3,
    ),
    _refused(
        _inside("zero_optimization", "mics_shard_size mics_hierarchical_params_gather zeropp_loco_param"), _REMOVED
    ),
    _refused("zero_allow_untested_optimizer", "Adam and AdamW are the optimizers here, and tested", False),
    _refused("zero_force_ds_cpu_optimizer", "it is about optimizers passed as objects", True),
    _refused("allgather_size", "an old name; write zero_optimization.allgather_bucket_size"),
    _refused("aio", "only NVMe offload reads it; remove the key"),
    # Optimizer and learning rate
    _effective("optimizer", BLOCK, "Required."),
    _effective(
        "optimizer.type",
        one_of("AdamW", "Adam"),
        "Both are AdamW, as in DeepSpeed: weight decay is decoupled.",
        why="the spec's optimizer section describes AdamW",
    ),
    _effective("optimizer.params", BLOCK, ""),
    _from_spec("optimizer.params.lr", AMOUNT, "`optimizer.learning_rate`"),
    _from_spec("optimizer.params.betas", PAIR, "`optimizer.betas`"),
    _from_spec("optimizer.params.eps", AMOUNT, "`optimizer.epsilon`"),
    _from_spec("optimizer.params.weight_decay", AMOUNT, "`optimizer.weight_decay`"),
    _effective(
        "optimizer.params.torch_adam", SWITCH, "true: PyTorch's own. false: DeepSpeed's, which needs a compiler."
    ),
    _effective(_inside("optimizer.params", "fused foreach"), SWITCH, "PyTorch's variants; only with torch_adam."),
    _refused("optimizer.params.adam_w_mode", "the spec's weight decay is decoupled", True),
    _refused("optimizer.params.bias_correction", "the spec means Adam as published", True),
    _refused("optimizer.params.amsgrad", "its third moment is not in checkpoints", False),
    _refused("optimizer.params.fp32_optimizer_states", "moments are fp32", True),
    _refused("optimizer.params.max_grad_norm", 'DeepSpeed refuses it here; write "gradient_clipping"'),
    _refused("optimizer.legacy_fusion", "not tested under a pipeline", False),
    _effective("gradient_clipping", AMOUNT, "Norm over all stages. 0 is off; without the key DeepSpeed clips at 1.0."),
    _effective(
        "scheduler",
        BLOCK,
        "Dropped where `optimizer.warmup_images` is 0 and the type is WarmupLR; required where it is not 0.",
    ),
    _effective(
        "scheduler.type",
        one_of("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"),
        "Constant, linear decay or cosine decay after the warm-up.",
        why="OneCycle and LRRangeTest bring learning rates of their own",
    ),
    _effective("scheduler.params", BLOCK, ""),
    _from_spec("scheduler.params.warmup_min_lr", AMOUNT, "0; not for WarmupCosineLR"),
    _from_spec("scheduler.params.warmup_max_lr", AMOUNT, "`optimizer.learning_rate`; not for WarmupCosineLR"),
    _from_spec("scheduler.params.warmup_min_ratio", AMOUNT, "0; only for WarmupCosineLR"),
    _from_spec("scheduler.params.warmup_num_steps", POSITIVE, "`optimizer.warmup_images` / batch, rounded up"),
    _from_spec("scheduler.params.warmup_type", one_of("linear", "log"), "linear (DeepSpeed's default is log)"),
    _from_spec("scheduler.params.total_num_steps", POSITIVE, "`train.images` / batch, rounded up; not for WarmupLR"),
    _effective("scheduler.params.cos_min_ratio", AMOUNT, "Last share of the learning rate; only for WarmupCosineLR."),
    _refused("scheduler.params.last_batch_iteration", _OWN_CHECKPOINTS, -1),
    # Pipeline
    _effective("pipeline", BLOCK, "How the U-Net is cut and in which order the stages work."),
    _effective(
        "pipeline.stages",
        POSITIVE,
        "DeepSpeed reads it and never uses it; here it counts, unless `-p` says otherwise.",
        auto="as many as a list in `partition` makes; else the planner's choice (docs/planner.md)",
    ),
    _effective(
        "pipeline.partition",
        CUTS,
        "DeepSpeed reads it and never uses it; here it says what the cuts even out (the slowest rank's flops, "
        "parameters, number of layers, or seconds, for which each layer is timed when the run starts), or lists the "
        "first layer of stage 1, 2, ... (a fold has two for each of `stages`).",
        auto='"flops"',
    ),
    _effective(
        "pipeline.schedule",
        one_of("1f1b", "folded"),
        "This project's key: one forward, one backward in turn; or DualPipeV over mirrored stages, two on each rank, "
        "where skips stay.",
        auto='"1f1b"',
    ),
    _effective(
        "pipeline.across_hosts",
        one_of("stages", "replicas"),
        "This project's key: what is split over several hosts, the stages of a pipeline or whole pipelines.",
        auto="what leaves fewer bytes a step to the busiest host (docs/planner.md)",
    ),
    _effective(
        "pipeline.activation_checkpoint_interval",
        COUNT,
        "Layers between kept activations; 0 keeps all.",
        auto="chosen from memory when the run starts",
    ),
    _effective("pipeline.use_reentrant", SWITCH, "PyTorch's older checkpointing; the default here is false."),
    _refused("pipeline.seed_layers", "weights follow from the seed and the layer alone", False),
    _accepted(_inside("pipeline", "pipe_partitioned grad_partitioned"), SWITCH, "Only for tensor parallelism."),
    # Arithmetic
    _effective(
        "compile",
        SWITCH,
        "This project's meaning: each layer's arithmetic by torch.compile, once per shape. DeepSpeed's block, for "
        "DeepCompile, is refused: it replaces the backward that the pipeline schedules. The default is false.",
    ),
    _effective(
        "kernels",
        one_of("fused", "masks", "reference"),
        "This project's key: Triton kernels for group normalisations with SiLU and dropout masks, for the masks alone, "
        "or PyTorch's operations.",
        auto="the faster one, timed when the run starts (docs/performance.md)",
    ),
    # Activation checkpointing
    _accepted("activation_checkpointing", BLOCK, "Only off: use `pipeline.activation_checkpoint_interval`."),
    _refused(
        _inside("activation_checkpointing", "partition_activations cpu_checkpointing"),
        "it empties tensors in place that a U-Net hands on as skips",
        False,
    ),
    _refused(
        "activation_checkpointing.contiguous_memory_optimization",
        "the micro-batches in flight overrun its buffers",
        False,
    ),
    _refused("activation_checkpointing.number_checkpoints", _CONFIGURE, None),
    _refused(_inside("activation_checkpointing", "synchronize_checkpoint_boundary profile"), _CONFIGURE, False),
    # Communication
    _effective("communication_data_type", one_of("fp32", "fp16", "bf16", None), "Type in which gradients are reduced."),
    _refused("prescale_gradients", "ZeRO-2 refuses it and ZeRO-1 ignores it", False),
    _refused("gradient_predivide_factor", "ZeRO-2 refuses it and ZeRO-1 ignores it", 1.0, 1),
    _refused("gradient_allreduce_op", "gradients would grow with the number of replicas", "mean"),
    _refused("disable_allgather", "DeepSpeed reads it and never uses it", False),
    _effective(
        "comms_logger",
        BLOCK,
        "DeepSpeed times its collectives, waiting for the device at each; messages between stages are not among them.",
    ),
    _effective(_inside("comms_logger", "enabled prof_all verbose debug"), SWITCH, ""),
    _effective("comms_logger.prof_ops", TEXTS, "Names of collectives, where prof_all is false."),
    _refused("seq_parallel_communication_data_type sequence_parallel_size data_parallel_size", _OTHER_PARALLEL),
    _refused("tensor_parallel expert_parallel", _OTHER_PARALLEL),
    _refused("use_data_before_expert_parallelism", _OTHER_PARALLEL, False),
    # Seeing what happens
    _effective(
        "wall_clock_breakdown",
        SWITCH,
        "Time of each pipeline instruction, every steps_per_print steps, in DeepSpeed's log (`--verbose`). It waits "
        "for the device at each. DeepSpeed's own pipeline engine crashes with it.",
    ),
    _effective(
        "flops_profiler",
        BLOCK,
        "DeepSpeed's profile of each stage's forward, in RUN_DIR/flops and in MLflow. DeepSpeed's own pipeline engine "
        "crashes with it, and printed nothing before ([129](https://github.com/deepspeedai/Megatron-DeepSpeed/issues/129)).",
    ),
    _effective("flops_profiler.enabled", SWITCH, "Profile one forward of one step."),
    _effective(
        "flops_profiler.profile_step",
        POSITIVE,
        "Which optimizer step of the run, from 1; 1 if not given. One past the end is said.",
    ),
    _effective("flops_profiler.top_modules", POSITIVE, "How many of the largest modules the summary names."),
    _effective(
        "flops_profiler.module_depth", DEPTH, "Depth of the summary: 0 the stage, 1 its layers, 2 their parts; -1 all."
    ),
    _effective("flops_profiler.detailed", SWITCH, "Print the whole tree of modules."),
    _effective(
        "flops_profiler.output_file",
        TEXT_OR_NULL,
        "For the stages' texts, instead of RUN_DIR/flops/flops; `.stage0.txt` ... are appended.",
    ),
    _refused("flops_profiler.recompute_fwd_factor", "recomputation is not counted as work", 0, 0.0),
    _refused("memory_breakdown", "DeepSpeed logs it in hooks that this engine replaces", False),
    _effective(
        "steps_per_print",
        POSITIVE,
        "Steps between lines in DeepSpeed's log (`--verbose`). Without the key there are none.",
        auto="`logging.log_every_images` / batch, rounded up; so filled where wall_clock_breakdown is on",
    ),
    _accepted("timers timers.throughput", BLOCK, "Only off."),
    _refused(
        "timers.throughput.enabled", "this engine measures throughput itself, without waiting for the device", False
    ),
    _accepted("timers.throughput.synchronized", SWITCH, ""),
    _effective("dump_state", SWITCH, "The engine's state at start, in DeepSpeed's log (`--verbose`)."),
    _effective("log_level", one_of("debug", "info", "warning", "error", "critical"), "Of DeepSpeed's logger."),
    _refused("tensorboard wandb csv_monitor comet", _MONITOR, {}, OFF),
    # Checkpoints
    _accepted("checkpoint", BLOCK, "Only off."),
    _refused(_inside("checkpoint", "tag_validation parallel_write"), _OWN_CHECKPOINTS),
    _refused("checkpoint.writer", _OWN_CHECKPOINTS, None),
    _refused(_inside("checkpoint", "load_universal use_node_local_storage"), _OWN_CHECKPOINTS, False),
    _refused("checkpoint.checkpoint_serialization", "DeepSpeed reads it and never uses it", True),
    _refused("datastates_ckpt", _OWN_CHECKPOINTS, False),
    # Everything else
    _refused("autotuning", "it restarts a program it does not know", OFF),
    _refused("hybrid_engine weight_quantization", "for inference", OFF),
    _refused("disable_python_gc", "nothing would collect the garbage in its place", False),
    _refused("vocabulary_size", "images have no vocabulary"),
    _refused(
        "nebula compression_training amp quantize_training sparse_gradients eigenvalue sparse_attention elasticity "
        "graph_harvesting curriculum_learning progressive_layer_drop",
        _REMOVED,
    ),
)

KEYS: dict[str, Key] = {name: key for key in TABLE for name in key.names.split()}


def children(block: str) -> list[str]:
    """Return the names of the keys directly inside a block; of the top level for an empty name."""
    prefix = f"{block}." if block else ""
    return [name[len(prefix) :] for name in KEYS if name.startswith(prefix) and "." not in name[len(prefix) :]]


def ds_config_markdown() -> str:
    """Return the table as Markdown, for docs/ds_configs.md."""
    lines = ["| key | value | what becomes of it |", "|---|---|---|"]
    for key in TABLE:
        names = ", ".join(f"`{name}`" for name in key.names.split())
        lines.append(
            f"| {names} | {_value_words(key)} | **{key.effect.value}** {_effect_words(key)} |".replace("  ", " ")
        )
    return "\n".join(lines) + "\n"


def _value_words(key: Key) -> str:
    if key.effect is Effect.REFUSED:
        return "only " + " or ".join(f"`{json.dumps(value)}`" for value in key.inert) if key.inert else ""
    return key.kind.words + (' or "auto"' if key.auto else "")


def _effect_words(key: Key) -> str:
    if key.effect is not Effect.TAKES_EFFECT:
        return key.auto or key.note
    sentences = [
        key.note,
        key.why and f"Anything else is refused: {key.why}.",
        key.auto and f'"auto" is {key.auto}.',
        "Only with ZeRO 1 or 2." if key.zero_only else "",
    ]
    return " ".join(filter(None, sentences))
