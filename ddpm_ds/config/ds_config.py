"""Reading the DeepSpeed JSON, checking it key by key, and resolving it for a run spec and a number of processes."""

from __future__ import annotations

import copy
import difflib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ddpm_ds.command_line import MOST_BATCH, MOST_PROCESSES
from ddpm_ds.config.ds_keys import BLOCK, KEYS, REFUSED, children, zero_only_keys
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.config.spec_file import JSON_PREFIX, shown
from ddpm_ds.errors import DsConfigError, LayoutError
from ddpm_ds.files import DEEPEST, MOST_CONFIG_BYTES, parse_json, preset, presets, read_json

_WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration")
SCHEDULER_PARAMS: dict[str, tuple[str, ...]] = {
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": (*_WARMUP, "total_num_steps"),
    "WarmupCosineLR": ("warmup_min_ratio", *_WARMUP[2:], "total_num_steps", "cos_min_ratio"),
}


def check_ds_config(config: dict[str, Any], path: Path | str) -> None:
    """Refuse keys that are unknown, misspelt, of a wrong type, ignored or broken under a pipeline (docs/ds_configs.md).

    Raises :class:`DsConfigError`, one line naming file, key, value and fix.
    """
    try:
        _check_block(config, "")
        _check_together(config)
    except DsConfigError as error:
        raise DsConfigError(f"{path}: {error}") from None


def enabled(config: Mapping[str, Any], block: str) -> bool:
    """Return whether a block of a checked config is switched on."""
    return bool(config.get(block, {}).get("enabled", False))


def precision(config: Mapping[str, Any]) -> Literal["fp32", "fp16", "bf16"]:
    """Return the precision of a checked config."""
    return "fp16" if enabled(config, "fp16") else "bf16" if enabled(config, "bf16") else "fp32"


def zero_stage(config: Mapping[str, Any]) -> int:
    """Return the ZeRO stage of a checked config; 0 means off."""
    return int(config.get("zero_optimization", {}).get("stage", 0))


def fp16_needs_zero(config: Mapping[str, Any]) -> bool:
    """Return whether a config is one of fp16 that ZeRO must train: with DeepSpeed's own Adam, whose fp16 optimizer
    without ZeRO flattens all weights into one.
    """
    return enabled(config, "fp16") and not config.get("optimizer", {}).get("params", {}).get("torch_adam")


def _check_block(block: dict[str, Any], prefix: str) -> None:
    for name, value in block.items():
        dotted = f"{prefix}{name}"
        if "." in name:  # else mistaken for a key inside a block; DeepSpeed has no dotted keys
            inside, _, key_name = name.partition(".")
            raise DsConfigError(f'{dotted} is unknown: a dot is no block; write "{inside}": {{"{key_name}": ...}}')
        refusal = REFUSED.get(dotted)
        if refusal:
            if not refusal.lets_through(value):
                raise DsConfigError(f"{dotted} = {shown(value)} is refused: {refusal.reason}")
            continue
        key = KEYS.get(dotted)
        if key is None:
            raise DsConfigError(_unknown(name, prefix))
        if value == "auto":
            if not key.auto:
                raise DsConfigError(f'{dotted} = "auto" should be {key.kind.words}; nothing fills it')
        elif not key.kind.accepts(value):
            why = f"; {key.why}" if key.why else ""
            auto = ' or "auto"' if key.auto else ""
            raise DsConfigError(f"{dotted} = {shown(value)} should be {key.kind.words}{auto}{why}")
        elif key.kind is BLOCK:
            _check_block(value, f"{dotted}.")


def _unknown(name: str, prefix: str) -> str:
    known = children(prefix.removesuffix("."))
    near = difflib.get_close_matches(name, known, n=1)
    elsewhere = [dotted for dotted in (*KEYS, *REFUSED) if dotted.rpartition(".")[2] == name]
    if near or elsewhere:
        return f"{prefix}{name} is unknown; did you mean {prefix + near[0] if near else elsewhere[0]}?"
    return f"{prefix}{name} is unknown to DeepSpeed and to this project; remove it"


def _check_together(config: dict[str, Any]) -> None:
    """Refuse keys that contradict each other."""
    if enabled(config, "fp16") and enabled(config, "bf16"):
        raise DsConfigError("fp16.enabled and bf16.enabled are both true; switch one off")
    stage = zero_stage(config)
    if stage == 0:
        for block, name in zero_only_keys():
            if config.get(block, {}).get(name, "auto") != "auto":
                raise DsConfigError(
                    f"{block}.{name} = {shown(config[block][name])} has no effect without ZeRO; remove it or set "
                    "zero_optimization.stage to 1 or 2"
                )
        if enabled(config, "fp16") and config["fp16"].get("hysteresis", 1) != 1:
            raise DsConfigError(
                f"fp16.hysteresis = {config['fp16']['hysteresis']} is ignored without ZeRO; write 1 or set "
                f"zero_optimization.stage to 1 or 2"
            )
        if fp16_needs_zero(config):
            raise DsConfigError(
                "optimizer.params.torch_adam = false, the default, needs ZeRO in fp16, since this project can't read "
                "what DeepSpeed's own Adam then keeps; write true or set zero_optimization.stage to 1 or 2"
            )
    if "grad_accum_dtype" in config.get("data_types", {}) and precision(config) == "fp32":
        raise DsConfigError("data_types.grad_accum_dtype has no effect in fp32; remove it")
    if "device" not in config.get("zero_optimization", {}).get("offload_optimizer", {"device": "none"}):
        raise DsConfigError(
            'zero_optimization.offload_optimizer.device is missing, so that nothing is offloaded; write "device": '
            '"cpu", or remove offload_optimizer'
        )
    if "type" not in config.get("optimizer", {}):
        raise DsConfigError('optimizer.type is missing; write "optimizer": {"type": "AdamW", "params": {...}}')
    params = config["optimizer"].get("params", {})
    for variant in ("fused", "foreach"):  # DeepSpeed's Adam fails on them whatever their value
        if variant in params and not params.get("torch_adam"):
            raise DsConfigError(f"optimizer.params.{variant} is PyTorch's; it needs torch_adam = true, or remove it")
    if params.get("fused") and params.get("foreach"):
        raise DsConfigError("optimizer.params.fused and foreach are both true; keep one")
    pipeline = config.get("pipeline", {})
    if _given(pipeline, "stages", None) != 1:  # a planned schedule of one stage is recorded as 1F1B
        _check_planned(pipeline, _given(pipeline, "schedule", "planned"))
    if "scheduler" in config:
        kind = config["scheduler"].get("type")
        if kind is None:
            raise DsConfigError('scheduler.type is missing; write "type": "WarmupLR" or remove the scheduler')
        for name in config["scheduler"].get("params", {}):
            if name not in SCHEDULER_PARAMS[kind]:
                raise DsConfigError(f"scheduler.params.{name} is not a setting of {kind}; remove it")


def _check_planned(pipeline: dict[str, Any], schedule: str) -> None:
    """Refuse keys of a planned schedule in another one."""
    for name in ("in_flight", "replan"):
        if schedule != "planned" and pipeline.get(name, "auto") not in ("auto", False):
            raise DsConfigError(
                f"pipeline.{name} = {shown(pipeline[name])} belongs to a planned schedule, and pipeline.schedule is "
                f'"{schedule}"; remove one of them'
            )


BUCKET_ELEMENTS = 2**23
"""Elements of ZeRO's buckets set to "auto": large enough for a network, small enough for a CPU's memory."""
ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Bytes of a weight, a gradient or an element of a message between stages, by precision."""


CutMethod = Literal["flops", "measured", "parameters", "uniform"]
"""Method of cutting the U-Net into stages if the JSON does not list the cuts."""


@dataclass(frozen=True)
class Layout:
    """Layout of a run: processes = stages x replicas, batch = replicas x micro-batches x micro-batch.

    In a fold, ``stages`` counts the ranks of a pipeline, each with two stages of the U-Net.
    """

    world_size: int
    stages: int
    replicas: int
    batch_images: int
    micro_batch_images: int
    micro_batches: int


@dataclass(frozen=True)
class ResolvedDsConfig:
    """DeepSpeed JSON, checked and resolved for a spec and a number of processes; all that the engine is given.

    A field that is still "auto" is decided once a process has its device (:func:`ddpm_ds.train.resolve.decide`),
    kernels when the engine is built.
    """

    layout: Layout
    partition: CutMethod | list[int]
    schedule: Literal["1f1b", "folded", "planned"]
    in_flight: int | Literal["auto"]
    """Maximum micro-batches in flight on a rank of a planned pipeline."""
    replan: bool
    """Whether a planned schedule is recomputed from traced steps."""
    checkpoint_interval: int | Literal["auto"]
    """Layers between kept activations; 0 keeps all activations."""
    use_reentrant: bool
    across_hosts: Literal["stages", "replicas", "auto"]
    """The axis of the layout that is split over several hosts."""
    kernels: Literal["fused", "masks", "reference", "auto"]
    compile: bool
    blocks: Mapping[str, Any]
    """Keys that DeepSpeed reads: optimizer, scheduler, precision, ZeRO, logging, and its own part of ``pipeline``."""

    @property
    def precision(self) -> Literal["fp32", "fp16", "bf16"]:
        """Type of weights, activations and messages."""
        return precision(self.blocks)

    @property
    def zero_stage(self) -> int:
        """ZeRO stage; 0 means off."""
        return zero_stage(self.blocks)

    @property
    def is_ordered(self) -> bool:
        """Whether the order of passes is computed for the run: its schedule is planned, or its one stage holds several
        micro-batches.
        """
        return self.schedule == "planned" or (self.layout.stages == 1 and self.in_flight not in ("auto", 1))

    @property
    def planned_partition(self) -> Literal["flops", "parameters", "uniform"] | list[int]:
        """Method or positions by which the U-Net is cut before its layers are timed."""
        return "flops" if self.partition == "measured" else self.partition

    def as_json(self) -> dict[str, Any]:
        """Return the configuration as one JSON, as runs and checkpoints store it."""
        pipeline = {
            **self.blocks.get("pipeline", {}),
            "stages": self.layout.stages,
            "partition": self.partition,
            "schedule": self.schedule,
            "in_flight": self.in_flight,
            "replan": self.replan,
            "across_hosts": self.across_hosts,
            "activation_checkpoint_interval": self.checkpoint_interval,
            "use_reentrant": self.use_reentrant,
        }
        return {
            "train_batch_size": self.layout.batch_images,
            "train_micro_batch_size_per_gpu": self.layout.micro_batch_images,
            "gradient_accumulation_steps": self.layout.micro_batches,
            **self.blocks,
            "pipeline": pipeline,
            "compile": self.compile,
            "kernels": self.kernels,
        }

    def for_deepspeed(self) -> dict[str, Any]:
        """Return the JSON for ``deepspeed.initialize``.

        It leaves out this project's own keys and the flops profiler, whose timers would crash a pipeline
        (:mod:`ddpm_ds.observe.flops`). Activation checkpointing that is still undecided is off.
        """
        ours = ("compile", "kernels", "flops_profiler")
        undecided = {"activation_checkpoint_interval": 0, "across_hosts": "stages"}
        config = {name: copy.deepcopy(value) for name, value in self.as_json().items() if name not in ours}
        del config["pipeline"]["in_flight"], config["pipeline"]["replan"]
        config["pipeline"] |= {name: value for name, value in undecided.items() if config["pipeline"][name] == "auto"}
        return config

    def without_reports(self) -> ResolvedDsConfig:
        """Return the configuration without timers, profilers and reports, for steps that are timed from outside."""
        reports = ("flops_profiler", "wall_clock_breakdown", "steps_per_print")
        return replace(self, blocks={name: block for name, block in self.blocks.items() if name not in reports})


DS_CONFIGS = presets("ds_configs")
"""Folder of the DeepSpeed JSONs that come with this package."""


def read_ds_config(path: Path | str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a DeepSpeed JSON and apply the overrides of the form ``ds.block.key=value``.

    Raises:
        DsConfigError: the file can't be read, has a duplicate key, or an override names no key.
    """
    config = _read(path)
    for item in overrides:
        key, equals, value = item.partition("=")
        if key.startswith(JSON_PREFIX):
            if not equals:
                raise DsConfigError(f"--set {item}: write ds.block.key=value, such as ds.pipeline.schedule=1f1b")
            set_key(config, key.removeprefix(JSON_PREFIX).strip(), value, f"--set {item}")
    return config


def set_key(config: dict[str, Any], path: str, text: str, origin: str) -> None:
    """Set a key of a DeepSpeed JSON to ``text``, parsed as JSON or else taken as a string, so that quotes are optional.

    Raises:
        DsConfigError: ``path`` passes through something that is not a block; the message begins with ``origin``.
    """
    *blocks, name = path.split(".")
    if len(blocks) >= DEEPEST:
        raise DsConfigError(f"{origin}: {len(blocks):,} blocks are inside each other; name a key of DeepSpeed")
    for depth, block in enumerate(blocks, start=1):
        config = config.setdefault(block, {})
        if not isinstance(config, dict):
            where = ".".join(blocks[:depth])
            raise DsConfigError(f"{origin}: {where} is no block of the JSON; name a key of a block")
    try:
        config[name] = parse_json(text)
    except ValueError:
        config[name] = text.strip()


def _read(path: Path | str) -> dict[str, Any]:
    try:
        config = read_json(preset(path, DS_CONFIGS), MOST_CONFIG_BYTES)
    except FileNotFoundError:
        raise DsConfigError(f"{path}: no such DeepSpeed config; examples are in ds_configs") from None
    except json.JSONDecodeError as error:
        raise DsConfigError(f"{path}: not JSON in line {error.lineno}: {error.msg}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DsConfigError(f"{path}: can't be read as a DeepSpeed config ({reason}); see ds_configs") from None
    if not isinstance(config, dict):
        raise DsConfigError(f"{path}: holds {shown(config)} instead of a block {{...}}; see ds_configs")
    return config


def resolve(
    config: dict[str, Any], spec: RunSpec, *, world_size: int, stages: int | None, path: Path | str
) -> ResolvedDsConfig:
    """Check a DeepSpeed JSON and resolve every "auto" for this spec and world size.

    `stages` comes from the command line and overrides the JSON. Raises :class:`DsConfigError` if the JSON contradicts
    the spec, :class:`LayoutError` if the processes or the batch can't be divided evenly.
    """
    check_ds_config(config, path)
    if not 1 <= world_size <= MOST_PROCESSES:
        raise LayoutError(f"{world_size} processes can't be laid out; use 1 to {MOST_PROCESSES:,}")
    blocks = copy.deepcopy(config)
    _make_counts_ints(blocks)
    try:
        layout = _layout(blocks, spec, world_size, stages)
        if layout.stages > 1:
            _check_planned(blocks.get("pipeline", {}), _schedule(blocks.get("pipeline", {}), layout.stages))
        _agreed(blocks, "train_batch_size", layout.batch_images, "train.batch_images")
        _fill_optimizer(blocks, spec)
        _fill_scheduler(blocks, spec)
        _fill_rest(blocks, spec)
    except DsConfigError as error:
        raise DsConfigError(f"{path}: {error}") from None
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        blocks.pop(name, None)
    pipeline = blocks.pop("pipeline", {})
    own = {name: value for name, value in pipeline.items() if name in ("pipe_partitioned", "grad_partitioned")}
    return ResolvedDsConfig(
        layout=layout,
        partition=_given(pipeline, "partition", "flops"),
        schedule=_schedule(pipeline, layout.stages),
        in_flight=pipeline.get("in_flight", "auto"),
        replan=pipeline.get("replan", False),
        checkpoint_interval=pipeline.get("activation_checkpoint_interval", "auto"),
        use_reentrant=pipeline.get("use_reentrant", False),
        across_hosts=pipeline.get("across_hosts", "auto"),
        kernels=blocks.pop("kernels", "auto"),
        compile=blocks.pop("compile", False),
        blocks={**blocks, "pipeline": own} if own else blocks,
    )


def _make_counts_ints(block: dict[str, Any], prefix: str = "") -> None:
    """Turn every count in a checked block into an int, since JSON may write it as 5e8 or 2.0."""
    for name, value in block.items():
        key = KEYS.get(f"{prefix}{name}")
        if isinstance(value, dict):
            _make_counts_ints(value, f"{prefix}{name}.")
        elif key is not None and key.kind.whole and isinstance(value, float | list):
            block[name] = [int(cut) for cut in value] if isinstance(value, list) else int(value)


def _schedule(pipeline: dict[str, Any], stages: int) -> Literal["1f1b", "folded", "planned"]:
    """Return the JSON's schedule, by default planned if the cuts allow it; a planned schedule of one stage is 1F1B."""
    cuts = pipeline.get("partition")
    line = stages == 1 or (isinstance(cuts, list) and len(cuts) == stages - 1)
    schedule: Literal["1f1b", "folded", "planned"] = _given(pipeline, "schedule", "1f1b" if line else "planned")
    return "1f1b" if stages == 1 and schedule == "planned" else schedule


def leaves_stages_open(config: dict[str, Any], world_size: int) -> bool:
    """Return whether a checked DeepSpeed JSON leaves the number of stages to the planner."""
    pipeline = config.get("pipeline", {})
    given = _given(pipeline, "stages", None) is not None or isinstance(pipeline.get("partition"), list)
    return world_size > 1 and not given


def _layout(config: dict[str, Any], spec: RunSpec, world_size: int, asked_stages: int | None) -> Layout:
    stages = _stages(config, world_size, asked_stages)
    schedule = _schedule(config.get("pipeline", {}), stages)
    replicas, batch = world_size // stages, spec.train.batch_images
    if batch % replicas:
        raise LayoutError(
            f"train.batch_images = {batch} can't be shared by {replicas} replicas ({world_size} processes in {stages} "
            f"stages); use --set train.batch_images={_nearest_batch(config, spec, replicas)} or another -p"
        )
    share = batch // replicas
    micro, micro_batches = _micro_batches(config, spec, share, stages)
    if micro * micro_batches != share:
        raise LayoutError(
            f"train.batch_images = {batch} gives each of {replicas} replicas {share} images, which are not "
            f'{micro_batches} micro-batches of {micro}; write "auto" for train_micro_batch_size_per_gpu and '
            f"gradient_accumulation_steps, or change train.batch_images or train.accumulation"
        )
    if schedule != "1f1b" and stages == 1:
        raise LayoutError(
            f'pipeline.schedule = "{schedule}" has nothing to fold on one stage; use "1f1b", or --processes 2 -p 2'
        )
    if schedule == "folded" and micro_batches < 2 * stages:
        raise LayoutError(
            f'pipeline.schedule = "folded" with {stages} stages needs {2 * stages} micro-batches or more, but a '
            f"replica's {share} images make {micro_batches}; use a smaller train_micro_batch_size_per_gpu, a larger "
            f'train.batch_images or "1f1b"'
        )
    return Layout(world_size, stages, replicas, batch, micro, micro_batches)


def _nearest_batch(config: dict[str, Any], spec: RunSpec, replicas: int) -> int:
    """Return the batch of images, at least the spec's if possible, that replicas share in the micro-batches asked
    for.
    """
    batch, wanted = spec.train.batch_images, spec.train.accumulation
    micro = _given(config, "train_micro_batch_size_per_gpu", None)
    count = _given(config, "gradient_accumulation_steps", None) if wanted == "auto" else wanted
    unit = int(replicas * (micro or 1) * (count or 1))
    times = 1 if micro and count else -(-batch // unit)
    return max(min(times, MOST_BATCH // unit), 1) * unit


def _stages(config: dict[str, Any], world_size: int, asked: int | None) -> int:
    pipeline = config.get("pipeline", {})
    stages, partition = _given(pipeline, "stages", None), pipeline.get("partition")
    per_rank = {None: (1, 2), "1f1b": (1,)}.get(_given(pipeline, "schedule", None), (2,))
    if asked is not None:
        name, stages = f"-p {asked}", asked
    elif stages is not None:
        name = f"pipeline.stages = {stages}"
    elif isinstance(partition, list):
        name, stages = f"pipeline.partition = {partition}", (len(partition) + 1) // per_rank[0]
    elif world_size == 1:
        name, stages = "one process", 1
    else:
        raise LayoutError(f"pipeline.stages is auto for {world_size} processes; say how many stages with -p")
    if stages < 1 or world_size % stages:
        fitting = " or ".join(map(str, divisors(world_size)))
        more = f", or --processes {-(-world_size // stages) * stages}" if stages > 0 else ""
        raise LayoutError(
            f"{name} makes {stages} stages, which don't divide {world_size} processes; use {fitting} stages{more}"
        )
    cuts = [count * stages - 1 for count in per_rank]
    if isinstance(partition, list) and len(partition) not in cuts:
        raise LayoutError(
            f"{name} needs {' or '.join(map(str, cuts))} cuts, but pipeline.partition = {partition}; change one of them"
        )
    return int(stages)


def divisors(number: int, most: int | None = None) -> list[int]:
    """Return the divisors of a number, up to ``most``."""
    return [count for count in range(1, min(number, most or number) + 1) if number % count == 0]


def _micro_batches(config: dict[str, Any], spec: RunSpec, share: int, stages: int) -> tuple[int, int]:
    """Return the images and the number of micro-batches of a replica's share of the batch, at least 1 each."""
    micro = _given(config, "train_micro_batch_size_per_gpu", None)
    count = _given(config, "gradient_accumulation_steps", None)
    wanted = spec.train.accumulation
    if wanted != "auto":
        if count not in (None, wanted):
            raise _contradiction("gradient_accumulation_steps", count, "train.accumulation", wanted)
        count = wanted
    if count is None and micro is not None:
        count = max(share // micro, 1)
    if count is None:
        several = (count for count in range(4 * stages, share) if share % count == 0)  # for a small bubble
        count = 1 if stages == 1 else next(several, share)
    if micro is None:
        micro = max(share // count, 1)
    return int(micro), int(count)


def _fill_optimizer(config: dict[str, Any], spec: RunSpec) -> None:
    params = config["optimizer"].setdefault("params", {})
    values = spec.optimizer.model_dump(mode="json")
    fields = {"lr": "learning_rate", "betas": "betas", "eps": "epsilon", "weight_decay": "weight_decay"}
    for name, field in fields.items():
        params[name] = _agreed(params, name, values[field], f"optimizer.{field}", "optimizer.params.")


def _fill_scheduler(config: dict[str, Any], spec: RunSpec) -> None:
    warmup, batch, decay = spec.optimizer.warmup_images, spec.train.batch_images, spec.optimizer.decay
    if "scheduler" not in config:
        if warmup and decay is None:
            raise DsConfigError(
                f"scheduler is missing, but optimizer.warmup_images = {warmup}; add "
                f'"scheduler": {{"type": "WarmupLR"}} or --set optimizer.warmup_images=0'
            )
        return
    kind = config["scheduler"]["type"]
    if decay is not None and kind != "WarmupLR":
        raise DsConfigError(
            f"scheduler.type = {kind} contradicts the spec: optimizer.decay = {decay} decides the learning rate; "
            "remove the scheduler or --set optimizer.decay=null"
        )
    if not warmup and kind != "WarmupLR":
        raise DsConfigError(f"scheduler.type = {kind} needs a warm-up; use --set optimizer.warmup_images={batch}")
    values: dict[str, tuple[Any, str]] = {
        "warmup_min_lr": (0.0, "the start of every warm-up"),
        "warmup_max_lr": (spec.optimizer.learning_rate, "optimizer.learning_rate"),
        "warmup_min_ratio": (0.0, "the start of every warm-up"),
        "warmup_num_steps": (-(-warmup // batch), "optimizer.warmup_images / train.batch_images"),
        "warmup_type": ("linear", "the form of every warm-up"),
        "total_num_steps": (-(-spec.train.images // batch), "train.images / train.batch_images"),
    }
    params = config["scheduler"].setdefault("params", {})
    for name in SCHEDULER_PARAMS[kind]:
        if name in values:
            params[name] = _agreed(params, name, *values[name], "scheduler.params.")
    if decay is not None or not warmup:
        del config["scheduler"]


def _fill_rest(config: dict[str, Any], spec: RunSpec) -> None:
    zero = config.get("zero_optimization", {})
    for name in ("reduce_bucket_size", "allgather_bucket_size"):
        if zero_stage(config) == 0:
            zero.pop(name, None)
        elif zero.setdefault(name, "auto") == "auto":
            zero[name] = BUCKET_ELEMENTS
    timed = config.get("wall_clock_breakdown", False)
    if config.get("steps_per_print", "auto" if timed else None) == "auto":
        config["steps_per_print"] = -(-spec.logging.log_every_images // spec.train.batch_images)


def _agreed(block: dict[str, Any], name: str, value: Any, spec_key: str, prefix: str = "") -> Any:
    """Return the spec's value; raises an error if the JSON has a different one."""
    given = _given(block, name, value)
    if given != value:
        raise _contradiction(f"{prefix}{name}", given, spec_key, value)
    return value


def _contradiction(name: str, given: Any, spec_key: str, value: Any) -> DsConfigError:
    is_key = spec_key.count(".") == 1 and " " not in spec_key
    fix = f" or --set {shlex.quote(f'{spec_key}={shown(given)}')}" if is_key else ""
    return DsConfigError(
        f'{name} = {shown(given)} contradicts the spec: {spec_key} is {shown(value)}; write "auto"{fix}'
    )


def _given(block: dict[str, Any], name: str, otherwise: Any) -> Any:
    value = block.get(name, "auto")
    return otherwise if value == "auto" else value
