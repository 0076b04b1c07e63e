"""Every key that DeepSpeed 0.19 reads from its JSON: its allowed values and its effect in a pipelined U-Net run.

The reader checks keys against these tables, ``docs/ds_configs.md`` prints them, and a test compares them with the
installed DeepSpeed.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from ddpm_ds.command_line import MOST_BATCH, MOST_IMAGES, MOST_PROCESSES, limit
from ddpm_ds.config.spec import MOST_LAYERS, MOST_LEARNING_RATE
from ddpm_ds.files import expanded, path_fault


@dataclass(frozen=True)
class Kind:
    """Type of value, as words and as a test."""

    words: str
    accepts: Callable[[object], bool]
    whole: bool = False
    """Whether it has whole numbers, which JSON may also write as 5e8 or 2.0."""
    choices: tuple[object, ...] = ()
    """All values that are allowed, if they are few."""

    def meant(self, value: object) -> str:
        """Return what to do about a wrong value whose meaning is clear, such as "False" or null for false; else ""."""
        if is_off(value):
            if self is BLOCK:
                return "; remove it"
            off = [choice for choice in self.choices if is_off(choice)]
            return f"; write {json.dumps(off[0])}" if off else ""
        spelt = {json.dumps(choice).strip('"').lower(): choice for choice in self.choices}
        near = difflib.get_close_matches(str(value).lower(), spelt, n=1)
        return f"; did you mean {json.dumps(spelt[near[0]])}?" if near else ""


def is_off(value: object) -> bool:
    """Return whether a value switches its key off, in one of the forms that people write."""
    if isinstance(value, dict):
        return is_off(value.get("enabled", value.get("device")))
    return value is None or value in (False, "none")


def _number(value: object, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _whole(value: object, least: int, most: int) -> bool:
    return _number(value, least, most) and value == int(value)  # type: ignore[call-overload]


def amount(most: float, least: float = 0) -> Kind:
    """Return the kind of numbers from ``least`` to ``most``."""
    return Kind(f"a number from {limit(least)} to {limit(most)}", lambda value: _number(value, least, most))


def whole(least: int, most: int) -> Kind:
    """Return the kind of whole numbers from ``least`` to ``most``."""
    words = f"a whole number from {limit(least)} to {limit(most)}"
    return Kind(words, lambda value: _whole(value, least, most), whole=True)


def one_of(*choices: object) -> Kind:
    """Return the kind that allows only these JSON values; true is not 1."""
    words = " or ".join(json.dumps(choice) for choice in choices)

    def accepts(value: object) -> bool:
        return any(type(value) is type(choice) and value == choice for choice in choices)

    return Kind(words, accepts, choices=choices)


SWITCH = one_of(True, False)
# Ranges end where DeepSpeed's own arithmetic or memory would fail, or far beyond useful values.
IMAGES = whole(1, MOST_BATCH)
"""Number of images or micro-batches in a step, as in the run spec."""
STEPS = whole(1, MOST_IMAGES)
RANKS = whole(1, MOST_PROCESSES)
MOST_LOSS_SCALE = 2.0**32
MOST_BUCKET = 2**31
"""Maximum elements of a bucket: 8 GiB of fp32."""
FROM_LEARNING_RATE = amount(MOST_LEARNING_RATE)
LEARNING_RATE = Kind(
    f"a number > 0 and <= {limit(MOST_LEARNING_RATE)}",
    lambda value: _number(value, 0, MOST_LEARNING_RATE) and value != 0,
)
SHARE = amount(1)
EPSILON = Kind("a number > 0 and <= 1", lambda value: _number(value, 0, 1) and value != 0)
EVEN = Kind(
    f"an even whole number from 2 to {limit(MOST_BUCKET)}",
    lambda value: _whole(value, 2, MOST_BUCKET) and value % 2 == 0,  # type: ignore[operator]
    whole=True,
)
FILE_OR_NULL = Kind(
    "a path or null",
    lambda value: value is None or (isinstance(value, str) and value != "" and not path_fault(expanded(value))),
)
TEXTS = Kind("a list of texts", lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value))
PAIR = Kind(
    "a list of two numbers >= 0 and < 1",
    lambda value: (
        isinstance(value, list) and len(value) == 2 and all(_number(item, 0, 1) and item != 1 for item in value)
    ),
)
CUTS = Kind(
    f'"flops", "measured", "parameters", "uniform" or a rising list of whole numbers from 1 to {MOST_LAYERS}',
    lambda value: (
        value in ("flops", "measured", "parameters", "uniform")
        or (
            isinstance(value, list)
            and all(_whole(cut, 1, MOST_LAYERS) for cut in value)
            and all(low < high for low, high in pairwise(value))
        )
    ),
    whole=True,
)
BLOCK = Kind("a block {...}", lambda value: isinstance(value, dict))
OPTIMIZER = replace(
    one_of("AdamW", "Adam"), accepts=lambda value: isinstance(value, str) and value.lower() in ("adamw", "adam")
)


@dataclass(frozen=True)
class Key:
    """Key that is accepted."""

    kind: Kind
    note: str = ""
    """Effect of the key."""
    auto: str = ""
    """Meaning of "auto"; empty if "auto" is not allowed."""
    why: str = ""
    """Reason why other values than `kind` are refused, if that needs an explanation."""
    zero_only: bool = False
    """Whether DeepSpeed ignores the key without ZeRO (stage 0)."""


ISSUES = "https://github.com/deepspeedai/DeepSpeed/issues"
_NOTHING = "Changes nothing under a pipeline."

KEYS: dict[str, Key] = {
    "train_batch_size": Key(IMAGES, auto="the spec's `train.batch_images`"),
    "train_micro_batch_size_per_gpu": Key(
        IMAGES, "Images per micro-batch of one replica.", auto="batch / replicas / accumulation"
    ),
    "gradient_accumulation_steps": Key(
        IMAGES,
        "Micro-batches per replica and step.",
        auto="the spec's `train.accumulation`; if that is auto too: 1 with one stage, else the smallest divisor of "
        "the replica's batch that is at least 4 x stages",
    ),
    "fp16": Key(BLOCK, "Half precision with a loss scale; not with bf16."),
    "fp16.enabled": Key(SWITCH, "On a CPU: fp16 storage, fp32 arithmetic."),
    "fp16.loss_scale": Key(amount(MOST_LOSS_SCALE), "0 is dynamic, anything else a fixed scale."),
    "fp16.initial_scale_power": Key(whole(0, 32), "The dynamic scale starts at 2 to this power."),
    "fp16.loss_scale_window": Key(STEPS, "Steps without overflow before the scale doubles."),
    "fp16.hysteresis": Key(STEPS, "Overflows before the scale halves; without ZeRO only 1."),
    "fp16.consecutive_hysteresis": Key(SWITCH, "Refill the hysteresis at every good step.", zero_only=True),
    "fp16.min_loss_scale": Key(whole(1, int(MOST_LOSS_SCALE)), "Floor of the scale; a run that overflows there stops."),
    "bf16": Key(BLOCK, "bfloat16 with fp32 master weights."),
    "bf16.enabled": Key(SWITCH, "Without ZeRO, gradients accumulate in fp32 (DeepSpeed's BF16_Optimizer)."),
    "bf16.check_grad_overflow": Key(SWITCH, "Skip a step whose gradients are not finite."),
    "data_types": Key(BLOCK, "Types other than the model's."),
    "data_types.grad_accum_dtype": Key(one_of("fp32"), "Accumulate gradients of fp16 or bf16 in fp32.", zero_only=True),
    "zero_optimization": Key(BLOCK, "Partitioning of optimizer state and gradients over replicas."),
    "zero_optimization.stage": Key(
        one_of(0, 1, 2),
        "0 partitions nothing, 1 the optimizer's state, 2 also gradients.",
        why="ZeRO-3 would gather a stage's weights anew for every micro-batch, so use 2 instead",
    ),
    "zero_optimization.reduce_bucket_size": Key(
        whole(1, MOST_BUCKET),
        "Elements reduced at a time. DeepSpeed allocates that many per backward; its default is 500 million.",
        auto="8388608 (2 to the 23rd)",
        zero_only=True,
    ),
    "zero_optimization.allgather_bucket_size": Key(
        EVEN, "Elements gathered at a time.", auto="8388608 (2 to the 23rd)", zero_only=True
    ),
    "zero_optimization.reduce_scatter": Key(SWITCH, "false: all-reduce instead.", zero_only=True),
    "zero_optimization.use_multi_rank_bucket_allreduce": Key(SWITCH, "One reduction for all ranks.", zero_only=True),
    "zero_optimization.offload_optimizer": Key(BLOCK, "Adam's state in host memory.", zero_only=True),
    "zero_optimization.offload_optimizer.device": Key(one_of("none", "cpu"), why="NVMe is not tested here"),
    "zero_optimization.offload_optimizer.pin_memory": Key(SWITCH, "Page-locked host memory."),
    "optimizer": Key(BLOCK, "Required."),
    "optimizer.type": Key(
        OPTIMIZER,
        "In any case of letters. Both are AdamW, as in DeepSpeed: weight decay is decoupled.",
        why="the spec's optimizer section describes AdamW",
    ),
    "optimizer.params": Key(BLOCK),
    "optimizer.params.lr": Key(LEARNING_RATE, auto="the spec's `optimizer.learning_rate`"),
    "optimizer.params.betas": Key(PAIR, auto="the spec's `optimizer.betas`"),
    "optimizer.params.eps": Key(EPSILON, auto="the spec's `optimizer.epsilon`"),
    "optimizer.params.weight_decay": Key(amount(1000), auto="the spec's `optimizer.weight_decay`"),
    "optimizer.params.torch_adam": Key(
        SWITCH, "true: PyTorch's own. false: DeepSpeed's, which needs a compiler, and in fp16 ZeRO."
    ),
    "optimizer.params.fused": Key(SWITCH, "PyTorch's variant; only with torch_adam."),
    "optimizer.params.foreach": Key(SWITCH, "PyTorch's variant; only with torch_adam."),
    "gradient_clipping": Key(
        replace(amount(1e9), words="0 (off) or a number up to 10^9"),
        "Norm over all stages. 0 is off; without the key DeepSpeed clips at 1.0.",
    ),
    "scheduler": Key(
        BLOCK,
        "Required with the spec's `optimizer.warmup_images`; if that is 0, or the spec's `optimizer.decay` decides "
        "the learning rate, a WarmupLR is dropped.",
    ),
    "scheduler.type": Key(
        one_of("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"),
        "Constant, linear decay or cosine decay after the warm-up.",
        why="others bring learning rates of their own",
    ),
    "scheduler.params": Key(BLOCK),
    "scheduler.params.warmup_min_lr": Key(FROM_LEARNING_RATE, "Not for WarmupCosineLR.", auto="0"),
    "scheduler.params.warmup_max_lr": Key(
        LEARNING_RATE, "Not for WarmupCosineLR.", auto="the spec's `optimizer.learning_rate`"
    ),
    "scheduler.params.warmup_min_ratio": Key(SHARE, "Only for WarmupCosineLR.", auto="0"),
    "scheduler.params.warmup_num_steps": Key(STEPS, auto="the spec's `optimizer.warmup_images` / batch, rounded up"),
    "scheduler.params.warmup_type": Key(one_of("linear", "log"), auto="linear (DeepSpeed's default is log)"),
    "scheduler.params.total_num_steps": Key(
        STEPS, "Not for WarmupLR.", auto="the spec's `train.images` / batch, rounded up"
    ),
    "scheduler.params.cos_min_ratio": Key(SHARE, "Last share of the learning rate; only for WarmupCosineLR."),
    "pipeline": Key(BLOCK, "How the U-Net is cut and in which order the stages work."),
    "pipeline.stages": Key(
        RANKS,
        "DeepSpeed reads it and never uses it; here it is used unless `-p` is given.",
        auto="the number that a list in `partition` implies, else the planner's choice (docs/planner.md)",
    ),
    "pipeline.partition": Key(
        CUTS,
        "DeepSpeed reads it and never uses it; here it names what the cuts balance (the slowest rank's flops, "
        "parameters, number of layers, or seconds, for which each layer is timed when the run starts), or lists the "
        "first layer of stage 1, 2, ... (a fold has two stages for each of `stages`).",
        auto='"flops"',
    ),
    "pipeline.schedule": Key(
        one_of("1f1b", "folded", "planned"),
        "This project's key: one forward, one backward in turn; or DualPipeV over mirrored stages, two on each rank, "
        "so that skips stay there; or an order computed for the run on the same stages, with separate weight "
        "gradients.",
        auto='"planned"; "1f1b" on one stage, and if a list in `partition` has one cut fewer than `stages`',
    ),
    "pipeline.in_flight": Key(
        IMAGES,
        "This project's key, for a planned schedule: maximum micro-batches that a rank holds, from their first forward "
        "to their last weight gradients. Fewer take less memory. A single stage computes the weight gradients of this "
        "many together.",
        auto="two for each stage, three under ZeRO-2 with replicas, or one if memory is short; 1 on a single stage",
    ),
    "pipeline.replan": Key(
        SWITCH,
        "This project's key: recompute the order of a planned schedule from the times of the traced steps. Numbers "
        "change by rounding, always at the same step. The default is false.",
    ),
    "pipeline.across_hosts": Key(
        one_of("stages", "replicas"),
        "This project's key: what is spread over several hosts, the stages of a pipeline or whole pipelines.",
        auto="the axis with fewer bytes per step for the busiest host (docs/planner.md)",
    ),
    "pipeline.activation_checkpoint_interval": Key(
        replace(whole(0, MOST_LAYERS), words=f"0 (off) or a whole number up to {MOST_LAYERS}"),
        "Layers between kept activations; 0 keeps all.",
        auto="chosen from memory when the run starts",
    ),
    "pipeline.use_reentrant": Key(SWITCH, "PyTorch's older checkpointing; the default here is false."),
    "pipeline.pipe_partitioned": Key(SWITCH, _NOTHING),
    "pipeline.grad_partitioned": Key(SWITCH, _NOTHING),
    "compile": Key(
        SWITCH,
        "In this project: compile each layer's arithmetic by torch.compile, once per shape; false if not given.",
        why="DeepSpeed's block, for DeepCompile, replaces the backward that the pipeline schedules",
    ),
    "kernels": Key(
        one_of("fused", "masks", "reference"),
        "This project's key: Triton kernels for group normalisations with SiLU and dropout masks, for the masks alone, "
        "or PyTorch's operations.",
        auto="the faster one, timed when the run starts (docs/performance.md)",
    ),
    "activation_checkpointing": Key(BLOCK, "Only off: use `pipeline.activation_checkpoint_interval`."),
    "communication_data_type": Key(one_of("fp32", "fp16", "bf16", None), "Type in which gradients are reduced."),
    "comms_logger": Key(
        BLOCK, "DeepSpeed times its collectives, but not messages between stages, and waits for the device at each."
    ),
    "comms_logger.enabled": Key(SWITCH),
    "comms_logger.prof_all": Key(SWITCH),
    "comms_logger.verbose": Key(SWITCH),
    "comms_logger.debug": Key(SWITCH),
    "comms_logger.prof_ops": Key(TEXTS, "Names of collectives, if prof_all is false."),
    "wall_clock_breakdown": Key(
        SWITCH,
        "Time of each pipeline instruction, every steps_per_print steps, in DeepSpeed's log (`--verbose`). It waits "
        "for the device at each.",
    ),
    "flops_profiler": Key(BLOCK, "DeepSpeed's profile of each stage's forward, in RUN_DIR/flops and in MLflow."),
    "flops_profiler.enabled": Key(SWITCH, "Profile one forward of one step."),
    "flops_profiler.profile_step": Key(STEPS, "Which optimizer step of the run, from 1; 1 if not given."),
    "flops_profiler.top_modules": Key(
        whole(1, 10**6), "How many of the largest modules the summary names; 1 if not given."
    ),
    "flops_profiler.module_depth": Key(
        whole(-1, 100), "Depth of the summary: 0 the stage, 1 its layers, 2 their parts; -1 all."
    ),
    "flops_profiler.detailed": Key(SWITCH, "Print the whole tree of modules; true if not given."),
    "flops_profiler.output_file": Key(
        FILE_OR_NULL, "For the stages' texts, instead of RUN_DIR/flops/flops; `.stage0.txt` ... are appended."
    ),
    "steps_per_print": Key(
        STEPS,
        "Steps between lines in DeepSpeed's log (`--verbose`). Without the key there are none.",
        auto="`logging.log_every_images` / batch, rounded up; the default with wall_clock_breakdown",
    ),
    "timers": Key(BLOCK, "Only off."),
    "timers.throughput": Key(BLOCK, "Only off."),
    "timers.throughput.synchronized": Key(SWITCH, _NOTHING),
    "dump_state": Key(SWITCH, "The engine's state at start, in DeepSpeed's log (`--verbose`)."),
    "log_level": Key(one_of("debug", "info", "warning", "error", "critical"), "Level of DeepSpeed's logger."),
    "checkpoint": Key(BLOCK, "Only off."),
}

_OFF = '{"enabled":false}'
_ZERO3 = """sub_group_size stage3_prefetch_bucket_size prefetch_bucket_size stage3_param_persistence_threshold
param_persistence_threshold stage3_model_persistence_threshold model_persistence_threshold stage3_max_live_parameters
max_live_parameters stage3_max_reuse_distance max_reuse_distance stage3_gather_16bit_weights_on_model_save
gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save stage3_module_granularity_threshold
module_granularity_threshold stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params
stage3_allgather_sequential allgather_sequential zero_hpz_partition_size zero_quantized_weights
zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear pipeline_loading_checkpoint
override_module_apply log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module
cpu_offload_param offload_param=null offload_optimizer.ratio offload_optimizer.super_offload
offload_optimizer.cpuadam_cores_perc"""

_OLD = "it is an old name"
_REFUSED: dict[str, str] = {
    "the pipeline's schedule owns the accumulation boundary": "managed_gradient_accumulation=true",
    "batches come from this project's own loader; see the spec's data section": f"""
        dataloader_drop_last=false data_efficiency={_OFF}""",
    "the engine casts its own input": "fp16.auto_cast=false",
    "master weights are fp32": """
        fp16.fp16_master_weights_and_grads=false bf16.bf16_master_weights_and_grads=false
        bf16.bf16_optimizer_states=false""",
    "not tested here": "bf16.immediate_grad_update=false",
    "the layers choose their own arithmetic, by the fp16 or bf16 block": f"torch_autocast={_OFF}",
    "the fp16 or bf16 block decides it": "data_types.param_dtype=null data_types.buffer_dtype=null",
    "no layer has buffers to keep": 'data_types.keep_in_fp32_modules="auto"|[]',
    "only ZeRO-3 reads it, which a pipeline can't use": " ".join(
        f"zero_optimization.{name}" for name in _ZERO3.split()
    ),
    "only NVMe offload reads it": """
        zero_optimization.offload_optimizer.nvme_path zero_optimization.offload_optimizer.buffer_count
        zero_optimization.offload_optimizer.pipeline_read zero_optimization.offload_optimizer.pipeline_write
        zero_optimization.offload_optimizer.fast_init aio""",
    "DeepSpeed turns it off under a pipeline": "zero_optimization.overlap_comm=false|null",
    "the ZeRO-2 path is tested with it on": "zero_optimization.contiguous_gradients=true",
    "DeepSpeed reads it and never uses it": """
        zero_optimization.allgather_partitions=true disable_allgather=false checkpoint.checkpoint_serialization=true""",
    "train/total_grad_norm and the finite check need it": "zero_optimization.compute_grad_norm=true",
    "every parameter has a gradient": "zero_optimization.ignore_unused_parameters=true",
    "it reorders the flat partitions and was not tested under a pipeline": """
        zero_optimization.round_robin_gradients=false zero_optimization.parameter_alignment=false""",
    "DeepSpeed no longer has it": "zero_optimization.legacy_stage1=false",
    "not tested under a pipeline, unlike offload_optimizer": "zero_optimization.zenflow=null",
    _OLD: "bfloat16 zero_optimization.cpu_offload allgather_size",
    "DeepSpeed ignores this old name of offload_optimizer.pin_memory": "zero_optimization.cpu_offload_use_pin_memory",
    "Adam and AdamW are the optimizers here, and tested": "zero_allow_untested_optimizer=false",
    "it is about optimizers passed as objects": "zero_force_ds_cpu_optimizer=true",
    "the spec's weight decay is decoupled": "optimizer.params.adam_w_mode=true",
    "the spec means Adam as published": "optimizer.params.bias_correction=true",
    "its third moment is not in checkpoints": "optimizer.params.amsgrad=false",
    "moments are fp32": "optimizer.params.fp32_optimizer_states=true",
    "DeepSpeed refuses it here": "optimizer.params.max_grad_norm",
    "not tested under a pipeline": "optimizer.legacy_fusion=false",
    "weights follow from the seed and the layer alone": "pipeline.seed_layers=false",
    "it empties tensors in place that a U-Net hands on as skips": """
        activation_checkpointing.partition_activations=false activation_checkpointing.cpu_checkpointing=false""",
    "the micro-batches in flight overrun its buffers": "activation_checkpointing.contiguous_memory_optimization=false",
    "DeepSpeed reads it only in deepspeed.checkpointing.configure, which its engines never call": """
        activation_checkpointing.number_checkpoints=null
        activation_checkpointing.synchronize_checkpoint_boundary=false activation_checkpointing.profile=false""",
    "ZeRO-2 refuses it and ZeRO-1 ignores it": "prescale_gradients=false gradient_predivide_factor=1.0|1",
    "gradients would grow with the number of replicas": 'gradient_allreduce_op="mean"',
    "replicas follow from world size and pipeline.stages, the only parallelism here": """
        seq_parallel_communication_data_type sequence_parallel_size data_parallel_size tensor_parallel
        expert_parallel use_data_before_expert_parallelism=false""",
    "recomputation is not counted as work": "flops_profiler.recompute_fwd_factor=0|0.0",
    "DeepSpeed logs it in hooks that this engine replaces": "memory_breakdown=false",
    "this engine measures throughput itself, without waiting for the device": "timers.throughput.enabled=false",
    "this engine does not write to it; runs are tracked in MLflow": " ".join(
        f"{name}={{}}|{_OFF}" for name in ("tensorboard", "wandb", "csv_monitor", "comet")
    ),
    "checkpoints are written by this project, which sets it itself": """
        zero_optimization.load_from_fp32_weights=true zero_optimization.elastic_checkpoint=false
        scheduler.params.last_batch_iteration=-1 datastates_ckpt=false checkpoint.tag_validation
        checkpoint.parallel_write checkpoint.writer=null checkpoint.load_universal=false
        checkpoint.use_node_local_storage=false""",
    "it restarts a program it does not know": f"autotuning={_OFF}",
    "for inference": f"hybrid_engine={_OFF} weight_quantization={_OFF}",
    "nothing would collect the garbage in its place": "disable_python_gc=false",
    "images have no vocabulary": "vocabulary_size",
    f"DeepSpeed removed it ({ISSUES}/8489)": """
        nebula compression_training amp quantize_training sparse_gradients eigenvalue sparse_attention elasticity
        graph_harvesting curriculum_learning progressive_layer_drop zero_optimization.mics_shard_size
        zero_optimization.mics_hierarchical_params_gather zero_optimization.zeropp_loco_param""",
}
"""Refused keys by reason. The JSON values after "=" have no effect and are accepted."""
_RENAMED = {
    "bfloat16": "bf16.enabled",
    "zero_optimization.cpu_offload": "zero_optimization.offload_optimizer.device",
    "allgather_size": "zero_optimization.allgather_bucket_size",
    "optimizer.params.max_grad_norm": "gradient_clipping",
}
"""Refused keys for which there is another with the same meaning."""
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
    "pipeline_parallel_size": "pipeline.stages",
    "partition_method": "pipeline.partition",
}
"""Names that people type, in any block, for a key."""


@dataclass(frozen=True)
class Refusal:
    """Reason why a key is refused, the values that are accepted as they have no effect, and the key to use instead."""

    reason: str
    harmless: tuple[object, ...]
    instead: str | None = None

    def lets_through(self, value: object) -> bool:
        """Return whether a value has no effect; a block that is switched off never has any."""
        off = {"enabled": False} in self.harmless and isinstance(value, dict) and value.get("enabled") is False
        return off or one_of(*self.harmless).accepts(value)

    def advice(self, value: object) -> str:
        """Return what to do about the key, which depends on its value: what is off must not be switched on."""
        if self.instead is None:
            return "remove it"
        kind = KEYS[self.instead].kind
        value = value.get("enabled") if isinstance(value, dict) else value
        if is_off(value):
            return f"write {nested(self.instead, 0)} instead" if kind.accepts(0) else "remove it"
        if kind.choices and not kind.accepts(value):
            value = next(choice for choice in kind.choices if not is_off(choice))
        return f"write {nested(self.instead, value)} instead"


def nested(dotted: str, value: object) -> str:
    """Return a key and its value as they are written at the top of a JSON."""
    for name in reversed(dotted.split(".")):
        value = {name: value}
    return json.dumps(value)[1:-1]


REFUSED = {
    name: Refusal(reason, tuple(json.loads(value) for value in values.split("|") if value), _RENAMED.get(name))
    for reason, names in _REFUSED.items()
    for name, _, values in (item.partition("=") for item in names.split())
}


def zero_only_keys() -> list[tuple[str, str]]:
    """Return (block, name) of the keys that DeepSpeed ignores without ZeRO."""
    return [(name.split(".")[0], name.split(".")[1]) for name, key in KEYS.items() if key.zero_only]


def children(block: str) -> list[str]:
    """Return the names of the keys directly inside a block; an empty name means the top level."""
    names = [name.rpartition(".") for name in (*KEYS, *REFUSED)]
    return [name for inside, _, name in names if inside == block]


def ds_config_markdown() -> str:
    """Return the Markdown tables of docs/ds_configs.md."""
    lines = ["| key | value | meaning |", "|---|---|---|"]
    for name, key in KEYS.items():
        auto = key.auto and f'"auto" is {key.auto}.'
        why = key.why and f"Anything else is refused: {key.why}."
        zero = "Only with ZeRO 1 or 2." if key.zero_only else ""
        meaning = " ".join(filter(None, (key.note, why, auto, zero)))
        value = key.kind.words + (' or "auto"' if key.auto else "")
        lines.append(f"| `{name}` | {value} | {meaning} |")
    lines += ["", "Refused, unless the value is the one shown, which has no effect:", ""]
    lines += ["| reason | keys |", "|---|---|"]
    for reason, names in _REFUSED.items():
        shown = ", ".join(f"`{name.replace('=', ': ').replace('|', ' or ')}`" for name in names.split())
        lines.append(f"| {reason} | {shown} |")
    return "\n".join(lines) + "\n"
