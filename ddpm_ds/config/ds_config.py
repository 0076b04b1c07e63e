"""Reading the DeepSpeed JSON, checking it key by key, and resolving it for a run spec and a number of processes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from ddpm_ds.config.ds_model import DS_CONFIG, CutMethod, DsConfig, Pipeline, changed, effective, given_at
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.config.spec_file import JSON_PREFIX, preset, presets
from ddpm_ds.ground.errors import MOST_FAULTS, DsConfigError, LayoutError
from ddpm_ds.ground.files import MOST_CONFIG_BYTES
from ddpm_ds.ground.formats import DEEPEST, parse_json, read_json
from ddpm_ds.ground.units import MOST_BATCH, MOST_PROCESSES, Precision, counted
from ddpm_ds.schema.layout import BUCKET_ELEMENTS, Layout, Schedule, SpaceSplit, Split, TensorSplit, divisors
from ddpm_ds.schema.section import REMOVED, shown, unused, value_at

T = TypeVar("T")
WARMUP_STEPS = "scheduler.params.warmup_num_steps"


class _Faults:
    """Faults of a DeepSpeed JSON with their keys, which :meth:`check` raises together."""

    def __init__(self, path: Path | str) -> None:
        self._path = path
        self._messages: list[str] = []
        self._keys: set[str] = set()

    def add(self, key: str, fault: str, *others: str) -> None:
        """Add a key's fault, unless it may follow from a fault of that key, a key inside it, or ``others``."""
        if any(f"{name}.".startswith(f"{wrong}.") for name in (key, *others) for wrong in self._keys):
            return
        if any(wrong.startswith(f"{key}.") for wrong in self._keys):
            return
        self._messages.append(f"{self._path}: {key} {fault}")
        self._keys.add(key)
        if len(self._messages) == MOST_FAULTS:
            self.check()

    def also_about(self, key: str) -> None:
        """Regard a key as wrong, since a misspelt one may mean it."""
        self._keys.add(key)

    def check(self) -> None:
        """Raise a :class:`DsConfigError` if there is a fault."""
        if self._messages:
            raise DsConfigError(*self._messages)


def check_ds_config(config: dict[str, Any], path: Path | str, spec: RunSpec | None = None) -> DsConfig:
    """Check a DeepSpeed JSON, also against the spec if it is given; raises DsConfigError with all faults."""
    faults = _Faults(path)
    checked = _readable(config, faults)
    _check_together(checked, faults)
    if spec is None:
        faults.check()
        return checked
    most, levels = len(spec.unet.multipliers) - 1, tensor_split(checked).levels
    if levels != "all" and (beyond := [level for level in levels if level > most]):
        there = "level 0 alone" if most == 0 else f"levels 0 to {most}"
        few = [level for level in levels if level <= most] or [most]
        fix = f"use --set {shlex.quote(f'ds.pipeline.tensor.levels={shown(few)}')}"
        fault = f"= {shown(levels)} names level {beyond[0]}, but the U-Net has {there}; {fix}"
        faults.add("pipeline.tensor.levels", fault)
    if space_split(checked).size > 1 and spec.data.buckets is not None:
        fault = f"= {checked.pipeline.space.size} needs images of one height; use --set ds.pipeline.space.size=1 or "
        faults.add("pipeline.space.size", f"{fault}--set data.buckets=null")
    if (shared := checked.pipeline.space.levels) != "auto" and shared[-1] > most:
        fault = f"= {shown(shared)} names level {shared[-1]}, but the U-Net has levels 0 to {most}; use --set "
        faults.add("pipeline.space.levels", f"{fault}{shlex.quote(f'ds.pipeline.space.levels={[*range(most + 1)]}')}")
    if checked.pipeline.use_reentrant and spec.optimizer.train:
        fault = "= true loses gradients where optimizer.train leaves out the first layers; use --set "
        faults.add("pipeline.use_reentrant", f"{fault}ds.pipeline.use_reentrant=false")
    warmup, decay = spec.optimizer.warmup_images, spec.optimizer.decay
    if "scheduler" not in checked.model_fields_set and warmup and decay is None:
        fault = f"is missing, but optimizer.warmup_images = {warmup}; use --set ds.scheduler.type=WarmupLR or --set "
        faults.add("scheduler", f"{fault}optimizer.warmup_images=0")
    for dotted, (value, key) in _decided_by_spec(checked, spec).items():
        if (given := value_at(checked, dotted)) not in ("auto", value):
            batch = _given(checked.train_batch_size, spec.train.batch_images) if dotted == WARMUP_STEPS else None
            fix = f"--set ds.{dotted}=auto or --set {shlex.quote(f'{key}={shown(given * batch if batch else given)}')}"
            source = f"{key}{' / batch' if batch else ''} is {shown(value)}"
            faults.add(dotted, f"= {shown(given)} contradicts the spec: {source}; use {fix}")
    faults.check()
    return checked


def tensor_split(config: DsConfig) -> TensorSplit:
    """Return the layers that a config splits: none if the planner chooses groups, all levels if it chooses levels."""
    tensor = config.pipeline.tensor
    if tensor.size == "auto" or tensor.size == 1:
        return TensorSplit()
    return TensorSplit(tensor.size, "all" if isinstance(tensor.levels, str) else tensor.levels, tensor.layers)


def space_split(config: DsConfig) -> SpaceSplit:
    """Return the levels whose rows space groups share in a config: none if the planner chooses groups."""
    space = config.pipeline.space
    return SpaceSplit() if space.size == "auto" else SpaceSplit(space.size, space.levels)


def with_split(config: DsConfig, split: Split) -> DsConfig:
    """Return a config whose groups of ranks share other layers or rows."""
    tensor, space = split
    return changed(config, {"pipeline.tensor": tensor.block, "pipeline.space": space.block})


def _readable(config: dict[str, Any], faults: _Faults) -> DsConfig:
    """Return the model of the keys that are right, and add the faults of the others."""
    values = effective(config)
    while True:
        try:
            return DS_CONFIG.read(values)
        except ValidationError as error:
            found = DS_CONFIG.faults(error, values)
        for location, message in found.items():
            key = ".".join(location)
            faults.add(key, message.removeprefix(key).strip())
            meant, block = DS_CONFIG.meant(location) if location else "", DS_CONFIG.at(location[:-1])
            if meant and block and location[-1] not in block.model_fields and given_at(config, meant) is None:
                faults.also_about(meant)
            if not location:
                faults.check()
            inside = values
            for name in location[:-1]:
                inside = inside[name]
            del inside[location[-1]]


def _check_together(config: DsConfig, faults: _Faults) -> None:
    """Add the faults of keys that contradict each other."""
    zero, params = config.zero_optimization, config.optimizer.params
    for key, fault, others in unused(config):
        faults.add(key, fault, *others)
    space, tensor = config.pipeline.space.size, config.pipeline.tensor.size
    if space != 1 and tensor != 1 and not space == tensor == "auto":
        fault = f"= {shown(space)} does not go with pipeline.tensor.size = {shown(tensor)}; use --set "
        fault += "'ds.pipeline.space={}' or --set 'ds.pipeline.tensor={}'"
        faults.add("pipeline.space.size", fault, "pipeline.tensor.size")
    stage, with_zero = "zero_optimization.stage", "set zero_optimization.stage to 1 or 2"
    if zero.stage == 0:
        if config.fp16.enabled and "hysteresis" in config.fp16.model_fields_set and config.fp16.hysteresis != 1:
            fault = f"= {config.fp16.hysteresis} is ignored without ZeRO; write 1 or {with_zero}"
            faults.add("fp16.hysteresis", fault, stage, "fp16.enabled")
        if config.fp16_needs_zero:
            fault = (
                "= false, the default, needs ZeRO in fp16, since this project can't read what DeepSpeed's own Adam "
                f"then keeps; write true or {with_zero}"
            )
            faults.add("optimizer.params.torch_adam", fault, stage, "fp16.enabled")
    device = "zero_optimization.offload_optimizer.device"
    if "offload_optimizer" in zero.model_fields_set and "device" not in zero.offload_optimizer.model_fields_set:
        faults.add(device, f"is missing, so that nothing is offloaded; remove the block or use --set ds.{device}=cpu")
    if config.optimizer.type is None:
        faults.add("optimizer.type", "is missing; use --set ds.optimizer.type=AdamW")
    for variant in ("torch_adam", "fused") if config.offloads else ():
        if getattr(params, variant) is False and variant in params.model_fields_set:
            fault = "= false, but PyTorch's fused AdamW steps what is offloaded; remove it"
            faults.add(f"optimizer.params.{variant}", fault, device)
    if "scheduler" in config.model_fields_set and config.scheduler.type is None:
        faults.add("scheduler.type", "is missing; remove the scheduler or use --set ds.scheduler.type=WarmupLR")


def _decided_by_spec(config: DsConfig, spec: RunSpec) -> dict[str, tuple[object, str]]:
    """Return the values that the spec decides and the spec's keys, by dotted key; images become steps."""
    train, optimizer = spec.train, spec.optimizer
    values: dict[str, tuple[object, str]] = {
        "train_batch_size": (train.batch_images, "train.batch_images"),
        "optimizer.params.lr": (optimizer.learning_rate, "optimizer.learning_rate"),
        "optimizer.params.betas": (optimizer.betas, "optimizer.betas"),
        "optimizer.params.eps": (optimizer.epsilon, "optimizer.epsilon"),
        "optimizer.params.weight_decay": (optimizer.weight_decay, "optimizer.weight_decay"),
    }
    if train.accumulation != "auto":
        values["gradient_accumulation_steps"] = (train.accumulation, "train.accumulation")
    if "scheduler" in config.model_fields_set:
        steps = -(-optimizer.warmup_images // _given(config.train_batch_size, train.batch_images))
        values[WARMUP_STEPS] = (steps, "optimizer.warmup_images")
        values["scheduler.params.warmup_max_lr"] = (optimizer.learning_rate, "optimizer.learning_rate")
    return values


@dataclass(frozen=True)
class ResolvedDsConfig:
    """DeepSpeed JSON, checked and resolved for a spec and a number of processes: the engine's configuration.

    A value that is still "auto" is decided once a process has its device (:func:`ddpm_ds.planning.run_plan.make_plan`),
    kernels when the engine is built.
    """

    layout: Layout
    config: DsConfig  # the JSON with all values that the spec decides; the keys of the layout are :attr:`layout`'s

    @property
    def precision(self) -> Precision:
        """Type of weights, activations and messages."""
        return self.config.precision

    @property
    def partition(self) -> CutMethod | list[int]:
        """Method by which the U-Net is cut into stages, or the cuts."""
        cuts = self.config.pipeline.partition
        return list(cuts) if isinstance(cuts, tuple) else _given(cuts, "measured")

    @property
    def eight_bit_settings(self) -> dict[str, Any]:
        """Settings of Adam in 8 bits, which is this project's own; empty with another optimizer."""
        if not self.config.is_8bit:
            return {}
        return {name: getattr(self.config.optimizer.params, name) for name in ("lr", "betas", "eps", "weight_decay")}

    @property
    def planned_partition(self) -> Literal["flops", "parameters", "uniform"] | list[int]:
        """Method or positions by which the U-Net is cut before its layers are timed."""
        return "flops" if self.partition == "measured" else self.partition

    def as_json(self) -> dict[str, Any]:
        """Return the configuration as one JSON, as runs and checkpoints store it."""
        layout, config = self.layout, self.config
        always = ("compile", "kernels", "graphs", "pipeline.use_reentrant")
        keys = layout.keys | {"train_batch_size": layout.batch_images, "pipeline.partition": self.partition}
        return changed(config, keys | {key: value_at(config, key) for key in always}).given

    def for_deepspeed(self) -> dict[str, Any]:
        """Return the JSON for ``deepspeed.initialize``, without our keys and the profiler, whose timers would crash."""
        ours = ("compile", "kernels", "graphs", "flops_profiler")
        config = {name: value for name, value in self.as_json().items() if name not in ours}
        config["train_batch_size"] *= self.layout.space.size  # it counts an image for each rank that shares it
        for name in ("in_flight", "tensor", "space"):
            config["pipeline"].pop(name, None)
        for name, decided in {"activation_checkpoint_interval": 0, "across_hosts": "stages"}.items():
            config["pipeline"][name] = _given(config["pipeline"][name], decided)
        params = config["optimizer"].get("params", {})  # DeepSpeed's Adam fails on a variant of PyTorch's that is null
        params = {name: value for name, value in params.items() if value is not None and name != "stochastic_rounding"}
        config["optimizer"]["params"] = params
        if self.config.is_8bit:
            del config["optimizer"]
            config["zero_allow_untested_optimizer"] = True
        if self.config.rounds:
            config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        return config

    def with_keys(self, values: Mapping[str, object]) -> ResolvedDsConfig:
        """Return the configuration with other values at dotted keys that are not the layout's."""
        return replace(self, config=changed(self.config, values))

    def with_layout(self, **changes: Any) -> ResolvedDsConfig:
        """Return the configuration with some fields of its layout replaced."""
        return replace(self, layout=replace(self.layout, **changes))

    def without_reports(self) -> ResolvedDsConfig:
        """Return the configuration without timers, profilers and reports, for steps that are timed from outside."""
        reports = ("flops_profiler", "wall_clock_breakdown", "steps_per_print")
        return self.with_keys(dict.fromkeys(reports, REMOVED))


DS_CONFIGS = presets("ds_configs")  # folder of the DeepSpeed JSONs that come with this package


def read_ds_config(path: Path | str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a DeepSpeed JSON and apply overrides such as ``ds.block.key=value``; raises DsConfigError."""
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
    for item in overrides:
        key, equals, value = item.partition("=")
        if key.startswith(JSON_PREFIX):
            if not equals:
                raise DsConfigError(f"--set {item}: write ds.block.key=value, such as ds.pipeline.schedule=1f1b")
            set_key(config, key.removeprefix(JSON_PREFIX).strip(), value, f"--set {item}")
    return config


def set_key(config: dict[str, Any], path: str, text: str, origin: str) -> None:
    """Set a key to ``text``, as JSON or else as a string; raises DsConfigError that begins with ``origin``."""
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


def resolve(
    config: DsConfig, spec: RunSpec, *, world_size: int, stages: int | None, path: Path | str
) -> ResolvedDsConfig:
    """Resolve a JSON for a spec, a world size and given ``stages``; raises DsConfigError or LayoutError."""
    if not 1 <= world_size <= MOST_PROCESSES:
        raise LayoutError(f"{world_size} processes can't be laid out; use 1 to {MOST_PROCESSES:,}")
    values = {key: value for key, (value, _) in _decided_by_spec(config, spec).items()}
    values |= {"scheduler.params.warmup_min_lr": 0, "scheduler.params.warmup_type": "linear"}
    if spec.optimizer.decay is not None or not spec.optimizer.warmup_images:  # the scheduler has nothing to do
        values["scheduler"] = REMOVED
    zero = config.zero_optimization
    elements = _given(zero.reduce_bucket_size, BUCKET_ELEMENTS)
    values["zero_optimization.reduce_bucket_size"] = elements if zero.stage else REMOVED
    if config.offloads:
        values |= {"optimizer.params.torch_adam": True, "optimizer.params.fused": True}
    asked = "steps_per_print" in config.model_fields_set
    if config.steps_per_print == "auto" or (config.wall_clock_breakdown and not asked):
        values["steps_per_print"] = -(-spec.logging.log_every_images // spec.train.batch_images)
    filled = changed(config, values)
    layout = _layout(config, filled, spec, world_size, stages)
    if config.data_types.grad_accum_dtype == "auto":
        wide = config.adds_in_fp32(layout.zero_stage, layout.micro_batches)
        filled = changed(filled, {"data_types.grad_accum_dtype": "fp32" if wide else REMOVED})
    group, turn = spec.bucket_group, layout.micro_batch_images * layout.replicas
    if group is not None and group % turn:
        raise LayoutError(
            f"data.buckets.images = {group} is no multiple of {turn}, micro-batches of {layout.micro_batch_images} on "
            f"{counted(layout.replicas, 'replica')}; use --set data.buckets.images={-(-group // turn) * turn}"
        )
    images, pairs = layout.micro_batch_images, spec.diffusion.noise_pairs
    if images % pairs:
        near = max(size for size in range(1, pairs + 1) if images % size == 0)
        raise LayoutError(
            f"diffusion.noise_pairs = {pairs} does not divide the {counted(images, 'image')} of a micro-batch; use "
            f"--set diffusion.noise_pairs={near}, or other train.accumulation"
        )
    faults, laid_out = _Faults(path), {"pipeline.schedule": layout.schedule, "pipeline.stages": layout.stages}
    for key, fault, _ in unused(changed(filled, laid_out)):
        faults.add(key, fault)
    faults.check()
    return ResolvedDsConfig(layout, filled)


def leaves_stages_open(config: DsConfig, world_size: int) -> bool:
    """Return whether a checked DeepSpeed JSON leaves the number of stages to the planner."""
    given = config.pipeline.stages != "auto" or isinstance(config.pipeline.partition, tuple)
    return world_size > tensor_split(config).size * space_split(config).size and not given


def leaves_space_open(config: DsConfig) -> bool:
    """Return whether a checked DeepSpeed JSON leaves space groups to the planner."""
    return config.pipeline.space.size == "auto"


def leaves_tensor_open(config: DsConfig) -> bool:
    """Return whether a checked DeepSpeed JSON leaves tensor groups, or the levels that they split, to the planner."""
    tensor = config.pipeline.tensor
    return tensor.size == "auto" or (tensor.levels == "auto" and tensor.size > 1)


def leaves_layout_open(config: DsConfig, world_size: int, stages: int | None) -> bool:
    """Return whether the planner chooses stages or groups of ranks; ``stages`` are those of ``-p``, if given."""
    if world_size == 1:
        return False
    return (
        leaves_tensor_open(config)
        or leaves_space_open(config)
        or (stages is None and leaves_stages_open(config, world_size))
    )


def _layout(original: DsConfig, config: DsConfig, spec: RunSpec, world_size: int, asked_stages: int | None) -> Layout:
    """Return the layout of a JSON that has the spec's values; messages are about the ``original``."""
    pipeline, tensor, space = config.pipeline, tensor_split(config), space_split(config)
    for kind, size in (("tensor", tensor.size), ("space", space.size)):
        if world_size % size:
            raise LayoutError(
                f"pipeline.{kind}.size = {size} does not divide {counted(world_size, 'process')}; use --set "
                f"ds.pipeline.{kind}.size={divisors(world_size, size)[-1]}"
            )
    ranks = tensor.size * space.size  # of a group; at most one kind has several
    stages = _stages(pipeline, world_size // ranks, ranks, asked_stages)
    line = stages == 1 or (isinstance(pipeline.partition, tuple) and len(pipeline.partition) == stages - 1)
    schedule: Schedule = _given(pipeline.schedule, "1f1b" if line else "planned")
    schedule = "1f1b" if stages == 1 and schedule == "planned" else schedule  # without an order to plan
    replicas, batch = world_size // (stages * ranks), spec.train.batch_images
    if batch % replicas:
        also = " --set ds.train_batch_size=auto" if original.train_batch_size != "auto" else ""
        parts = f"{world_size} processes in {stages} stages"
        parts += f" of {ranks} ranks" if ranks > 1 else ""
        raise LayoutError(
            f"train.batch_images = {batch} can't be shared by {replicas} replicas ({parts}); use --set "
            f"train.batch_images={_nearest_batch(config, spec, replicas)}{also} or another -p"
        )
    share = batch // replicas
    micro, micro_batches = _micro_batches(config, share, stages)
    if micro * micro_batches != share:
        given = ["train.accumulation"] if spec.train.accumulation != "auto" else []
        counts = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        given += [f"ds.{name}" for name in counts if getattr(original, name) != "auto"]
        raise LayoutError(
            f"train.batch_images = {batch} gives each of {replicas} replicas {share} images, which are not "
            f"{micro_batches} micro-batches of {micro}; use {' '.join(f'--set {name}=auto' for name in given)}"
        )
    if schedule != "1f1b" and stages == 1:
        raise LayoutError(
            f'pipeline.schedule = "{schedule}" has nothing to fold on one stage; use --set ds.pipeline.schedule=1f1b, '
            "or --processes 2 -p 2"
        )
    if schedule == "folded" and micro_batches < 2 * stages:
        raise LayoutError(
            f'pipeline.schedule = "folded" with {stages} stages needs {2 * stages} micro-batches or more, but a '
            f"replica's {share} images make {micro_batches}; use a smaller train_micro_batch_size_per_gpu, a larger "
            "train.batch_images or --set ds.pipeline.schedule=1f1b"
        )
    return Layout(
        stages=stages,
        replicas=replicas,
        schedule=schedule,
        micro_batch_images=micro,
        micro_batches=micro_batches,
        checkpoint_interval=pipeline.activation_checkpoint_interval,
        zero_stage=config.zero_optimization.stage,
        offload=config.offloads,
        across_hosts=pipeline.across_hosts,
        in_flight=pipeline.in_flight,
        tensor=tensor,
        space=space,
    )


def _nearest_batch(config: DsConfig, spec: RunSpec, replicas: int) -> int:
    """Return the smallest batch that replicas share in the given micro-batches, not below the spec's if possible."""
    micro = _given(config.train_micro_batch_size_per_gpu, 0)
    count = _given(config.gradient_accumulation_steps, 0)
    unit = replicas * (micro or 1) * (count or 1)
    times = 1 if micro and count else -(-spec.train.batch_images // unit)
    return max(min(times, MOST_BATCH // unit), 1) * unit


def _stages(pipeline: Pipeline, groups: int, ranks: int, asked: int | None) -> int:
    """Return the number of stages for a number of ``groups``, each of a number of ``ranks``."""
    partition = pipeline.partition
    per_rank = {"auto": (1, 2), "1f1b": (1,)}.get(pipeline.schedule, (2,))
    if asked is not None:
        name, stages = f"-p {asked}", asked
    elif pipeline.stages != "auto":
        name, stages = f"pipeline.stages = {pipeline.stages}", pipeline.stages
    elif isinstance(partition, tuple):
        name, stages = f"pipeline.partition = {shown(partition)}", (len(partition) + 1) // per_rank[0]
    elif groups == 1:
        name, stages = "one process", 1
    else:
        raise LayoutError(f"pipeline.stages is auto for {groups * ranks} processes; say how many stages with -p")
    if stages < 1 or groups % stages:
        fitting = " or ".join(map(str, divisors(groups)))
        more = f", or --processes {-(-groups // stages) * stages * ranks}" if stages > 0 else ""
        kind = "tensor" if pipeline.space.size in (1, "auto") else "space"
        what = f"{groups} processes" if ranks == 1 else f"{groups * ranks} processes in {kind} groups of {ranks}"
        raise LayoutError(f"{name} makes {stages} stages, which don't divide {what}; use {fitting} stages{more}")
    cuts = [count * stages - 1 for count in per_rank]
    if isinstance(partition, tuple) and len(partition) not in cuts:
        needs = f"{name} needs {' or '.join(map(str, cuts))} cuts"
        raise LayoutError(f"{needs}, but pipeline.partition = {shown(partition)}; change one of them")
    return stages


def _micro_batches(config: DsConfig, share: int, stages: int) -> tuple[int, int]:
    """Return the size and number of micro-batches in a replica's share of the batch, at least 1 each."""
    micro, count = config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    if count != "auto":
        return (max(share // count, 1) if micro == "auto" else micro), count
    if micro != "auto":
        return micro, max(share // micro, 1)
    several = (count for count in range(4 * stages, share) if share % count == 0)  # for a small bubble
    filling = 1 if stages == 1 else next(several, share)
    return max(share // filling, 1), filling


def _given(value: T | Literal["auto"] | None, otherwise: T) -> T:
    """Return a value, or ``otherwise`` if it is left open."""
    return otherwise if value is None or value == "auto" else value
