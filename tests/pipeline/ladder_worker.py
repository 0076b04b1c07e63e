"""Rung c of the ladder of trust, one rank: train tiny cases on a pipeline and compare every gradient by name.

    deepspeed --num_gpus 4 tests/pipeline/ladder_worker.py CASES.json REPORT_FOLDER

Rank r writes ``REPORT_FOLDER/rank{r}.json``: of each case and step, the loss and the relative error of each of its
gradients against plain PyTorch in fp64.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import bf16_optimizer
from rivals.measure import SentBytes
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_map

from ddpm_ds.checkpoint.manifest import BLOCK
from ddpm_ds.checkpoint.reader import code_of
from ddpm_ds.checkpoint.writer import Fragment
from ddpm_ds.config.ds_config import ResolvedDsConfig
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.data.loader import MicroBatch
from ddpm_ds.pipeline import deepspeed_insides as insides
from ddpm_ds.pipeline import module as pipeline_module
from ddpm_ds.pipeline.adam8bit import Adam8bit
from ddpm_ds.pipeline.build import build_engine, use_host_accelerator
from ddpm_ds.pipeline.cuts import partition
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.gradients import FlatGradients
from ddpm_ds.pipeline.messages import all_gather_objects, barrier, value_groups
from ddpm_ds.pipeline.placement import run_exchange
from ddpm_ds.pipeline.schedule import Instruction, Program, gradient_passes, most_kept, weight_passes
from ddpm_ds.pipeline.staged import ForwardPipeline
from ddpm_ds.processes.process_group import process_group
from ddpm_ds.schema.layout import AcrossHosts, Layout, Schedule, SpaceSplit, TensorSplit
from ddpm_ds.unet import model, operations
from ddpm_ds.unet.blocks import CarryLayer, set_context, transformer_blocks
from ddpm_ds.unet.layers import SIZES, Layer, unet_layers
from ddpm_ds.unet.names import trained_layers
from ddpm_ds.unet.operations import arithmetic_dtype
from ddpm_ds.unet.shards import layers_of_rank, row_layers, split_layers, swaps_of
from ddpm_ds.unet.space import SpaceGroup
from ddpm_ds.unet.tensor_group import ALONE, TensorGroup, part_of, shard_of
from tests.ds_json import config_of
from tests.launching import run_ranks, tiny_spec, tiny_text_spec, write_json
from tests.pipeline.batches import BUCKETS, bucket_at, device, global_batch, images_of, micro_batches, objective_of
from tests.pipeline.random_programs import random_programs

STEPS = 2
EIGHT_BIT = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
"""Settings of Adam in 8 bits, those of the reference."""
Precision = Literal["fp32", "fp16", "bf16"]
Process = Literal["plain", "heads", "edm", "flow", "weighted", "rectangles", "uneven",
                  "stored", "reduced", "regression", "text", "caption", "buckets", "cut"]  # fmt: skip
"""Kinds of training; :func:`spec_of` and :func:`fields_spec` have the specs."""
COUNTED: tuple[Process, ...] = ("plain", "heads", "rectangles", "uneven", "stored", "text", "caption", "buckets")
"""Kinds of training whose bytes are counted."""
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """One layout and one way of training."""

    stages: int
    replicas: int
    zero: int
    precision: Precision
    checkpoint: int
    micro_batches: int = 4
    reentrant: bool = False
    offload: bool = False
    fp32_accumulation: bool = False
    wall_clock: bool = False
    growing_scale: bool = False
    fixed_scale: float = 0.0
    """Value of fp16.loss_scale; 0 lets the scale move."""
    schedule: Schedule = "1f1b"
    across: AcrossHosts = "stages"
    compile: bool = False
    fused: bool = False
    eight_bit: bool = False
    kernels: Literal["reference", "fused"] = "reference"
    process: Process = "plain"
    random_programs: int | None = None
    """Seed of programs in the place of the schedule's own."""
    cuts: tuple[int, ...] = ()
    """First layers of the stages; cut by flops without."""
    tensor: int = 1
    """Number of ranks that share each stage."""
    split: tuple[str, ...] = ()
    """Names of the layers that they split; all that can be without."""
    space: int = 1
    """Number of ranks that share each image."""
    levels: tuple[int, ...] | Literal["auto"] = "auto"
    """Levels whose rows they share."""
    train: tuple[str, ...] = ()
    """Patterns of diffusers' names of the parameters that are trained; all without."""
    rates: tuple[tuple[str, float], ...] = ()
    """Factors on the learning rate by such patterns."""
    rounded: bool = False
    """Whether weights have 16 bits alone, and are rounded at random."""

    @classmethod
    def of(cls, values: dict[str, Any]) -> Case:
        """The case of a JSON's values."""
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**values | lists)

    def resolved(self, batch: int) -> ResolvedDsConfig:
        """The configuration that crosses into the engine, for so many images a step."""
        zero = {"stage": self.zero, "reduce_bucket_size": 4096}
        fused = self.fused or self.offload
        adamw = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0, "torch_adam": True, "fused": fused}}
        eight = EIGHT_BIT | ({"stochastic_rounding": True} if self.rounded else {})
        blocks: dict[str, Any] = {
            "pipeline": {"use_reentrant": self.reentrant},
            "kernels": self.kernels,
            "compile": self.compile,
            "optimizer": {"type": "AdamW8bit", "params": eight} if self.eight_bit else adamw,
            "gradient_clipping": 1.0,
            "zero_optimization": {**zero, **({"offload_optimizer": {"device": "cpu"}} if self.offload else {})},
            "steps_per_print": 1 if self.wall_clock else None,
            "wall_clock_breakdown": self.wall_clock,
        }
        if self.precision == "fp16":
            window = 1 if self.growing_scale else 1000
            blocks["fp16"] = {"initial_scale_power": 10, "loss_scale_window": window, "loss_scale": self.fixed_scale}
        if self.precision != "fp32":
            blocks[self.precision] = {**blocks.get(self.precision, {}), "enabled": True}
        blocks["data_types"] = {"grad_accum_dtype": "fp32" if self.fp32_accumulation else None}
        micro = batch // (self.micro_batches * self.replicas)
        work = micro, self.micro_batches, self.checkpoint, self.zero, self.offload, self.across
        tensor = TensorSplit(self.tensor, layers=self.split)
        return ResolvedDsConfig(
            layout=Layout(
                *(self.stages, self.replicas, self.schedule, *work),
                tensor=tensor,
                space=SpaceSplit(self.space, self.levels),
            ),
            config=config_of(**blocks),
        )

    def layers(self, spec: RunSpec, size: tuple[int, int] | None = None) -> tuple[Layer, ...]:
        """The whole layers of a spec's U-Net, trained as in the case."""
        return trained_layers(layers_of(spec, size), self.train, {pattern: float(rate) for pattern, rate in self.rates})

    def bounds(self, layers: tuple[Layer, ...]) -> tuple[int, ...]:
        """The bounds of the stages."""
        return partition(layers, self.stages, self.cuts or "flops", self.schedule)

    def engine(self, spec: RunSpec, **blocks: Any) -> UnetPipelineEngine:
        """This rank's engine for the U-Net of a spec; ``blocks`` replace some of the configuration."""
        resolved = self.resolved(spec.train.batch_images)
        sizes = [None, *(BUCKETS[1:] if spec.data.buckets else ())]
        layers, *others = (shared_layers(self.layers(spec, size), resolved.layout) for size in sizes)
        engine = build_engine(
            layers,
            self.bounds(self.layers(spec)),
            resolved.with_keys(blocks),
            objective_of(spec),
            seed=spec.train.seed,
            others=others,
        )
        engine.size_of = bucket_at
        return engine


def shared_layers(layers: tuple[Layer, ...], layout: Layout) -> tuple[Layer, ...]:
    """The layers as the groups of a layout share them."""
    return row_layers(split_layers(layers, layout.tensor), layout.space)


def build_awake_layer(
    layer: Layer, index: int, seed: int, tensor: TensorGroup = ALONE, space: SpaceGroup | None = None, **how: Any
) -> CarryLayer:
    """A layer whose zero-initialised weights are drawn as well, so that every gradient is alive from the start."""
    built = model.build_layer(layer, index, seed, **how)
    generator = torch.Generator().manual_seed(1000 + index)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.device))
    if layer.shards > 1 and tensor is not ALONE:
        built.split(tensor)
    if space is not None:
        built.share(space)
    return built


class Expected(NamedTuple):
    """Results that a step of every pipeline must give, on the CPU at first."""

    loss: float
    gradients: dict[str, Tensor]
    """Unscaled, in fp32, by name."""
    moments: dict[str, Tensor]
    """Adam's first, flat."""
    cancelled: dict[str, float]
    """Root of the summed squares of the images' gradients over the norm of their sum, at least 1: rounding is relative
    to what was added up, and of a bias, one number, the images may leave a hundredth."""


class Reference:
    """Plain PyTorch in fp64, image by image, on weights of the pipeline's precision; only rounding may differ."""

    def __init__(self, spec: RunSpec, layers: tuple[Layer, ...], precision: Precision) -> None:
        self.modules = nn.ModuleList(build_awake_layer(layer, i, spec.train.seed) for i, layer in enumerate(layers))
        self.modules.to(device(), DTYPES[precision])
        self.trained = [(name, one) for name, one in self.modules.named_parameters() if one.requires_grad]
        self.masters = [parameter.detach().float() for _, parameter in self.trained]
        self.modules.double()
        self.spec, self.objective, self.stored = spec, objective_of(spec), DTYPES[precision]
        rates = (rate for layer in layers for rate in layer.rates or (1.0,) * len(layer.listed) if rate)
        groups = [{"params": [one], "lr": 1e-3 * rate} for one, rate in zip(self.masters, rates, strict=True)]
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.0)

    def step(self, batch: MicroBatch) -> Expected:
        """One optimizer step."""
        names, parameters = zip(*self.trained, strict=True)
        images, losses, found = images_of(self.spec, batch), [], []
        for image in images:
            losses.append(self._loss(image))
            found.append(torch.autograd.grad(losses[-1] / len(images), parameters))
        sums = [torch.stack(each).sum(0) for each in zip(*found, strict=True)]
        parts = [torch.stack(each).norm() for each in zip(*found, strict=True)]
        cancelled = [max(1.0, (part / whole.norm()).item()) for part, whole in zip(parts, sums, strict=True)]
        for master, gradient in zip(self.masters, sums, strict=True):
            master.grad = gradient.float()
        gradients = [gradient.float().cpu() for gradient in sums]
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(parameters, self.masters, strict=True):
                parameter.copy_(master.to(self.stored))
        moments = [self.optimizer.state[master]["exp_avg"].flatten().to("cpu", copy=True) for master in self.masters]
        by_name = (dict(zip(names, values, strict=True)) for values in (gradients, moments, cancelled))
        return Expected(torch.stack(losses).mean().item(), *by_name)

    def _loss(self, batch: MicroBatch) -> Tensor:
        operations.set_image_index(self.modules, batch.index)
        set_context(transformer_blocks(self.modules), self.objective.context(batch))
        prepared = self.objective.prepare(batch)
        carry: Any = self.objective.inputs(prepared)
        for layer in self.modules:
            carry = layer(carry)
        return self.objective.loss(carry, prepared)


@functools.cache
def expected_steps(precision: Precision, compiled: bool, process: Process, layers: tuple[Layer, ...]) -> list[Expected]:
    """Results that all cases of a precision must equal, computed by rank 0; no other setting changes them."""
    found: list[Any] = [None]
    if torch.distributed.get_rank() == 0:
        spec = spec_of(compiled, process)
        reference = Reference(spec, layers, precision)
        found = [[reference.step(global_batch(spec, step)) for step in range(STEPS)]]
    for group in value_groups():
        torch.distributed.broadcast_object_list(found, group=group, group_src=0)
    here: list[Expected] = tree_map(lambda value: value.to(device()) if isinstance(value, Tensor) else value, found[0])
    return here


def error_of(engine: UnetPipelineEngine, name: str, found: Tensor, expected: Expected) -> float:
    """Error of this rank's gradient; that of a part is relative to the whole parameter."""
    shard, whole = shard_of(engine.module.get_parameter(name)), expected.gradients[name]
    own = whole if shard is None else part_of(whole, shard).view_as(found)
    return difference(found, own, whole) / expected.cancelled[name]


def bits_of(engine: UnetPipelineEngine, *, frozen: bool = False) -> str:
    """Checksum of the parameters that this rank shares with all others of its stage, or of those that are not trained,
    which have no gradient."""
    digest = hashlib.sha256()
    for parameter in engine.module.parameters():
        assert parameter.requires_grad or parameter.grad is None
        if not parameter.requires_grad if frozen else shard_of(parameter) is None:
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def difference(found: Tensor, expected: Tensor, whole: Tensor | None = None) -> float:
    """Norm of the difference, relative to the norm of ``expected``, or of the ``whole`` that it is a part of."""
    return ((found - expected).norm() / (expected if whole is None else whole).norm()).item()


def gradients_of(engine: UnetPipelineEngine) -> Iterator[tuple[str, Tensor | None]]:
    """This stage's gradients, scaled; the parts of all replicas are added."""
    named = [(name, one) for name, one in engine.module.named_parameters() if one.requires_grad]
    if not isinstance(engine.gradients, FlatGradients):
        yield from ((name, parameter.grad) for name, parameter in named)
        return
    sizes = [parameter.numel() for _, parameter in named]
    parts = (flat := torch.zeros(sum(sizes), device=engine.device)).split(sizes)
    places = dict(zip((name for name, _ in named), parts, strict=True))
    sums = {master: engine.gradients.own_sum[place] for master, place in engine.gradients._stepped}
    for piece in engine.gradients.owned():
        places[piece.name][piece.first : piece.first + piece.length] = piece.of(sums[piece.master])
    torch.distributed.all_reduce(flat, group=engine.grid.get_data_parallel_group())
    yield from ((name, places[name].view(parameter.shape)) for name, parameter in named)


def watch_gradients(engine: UnetPipelineEngine, sent: SentBytes) -> dict[str, Tensor]:
    """Fill the returned dictionary with this stage's gradients, unscaled, averaged and in fp32, before each step of the
    optimizer; the bytes sent for that are not counted."""
    seen: dict[str, Tensor] = {}
    step = engine.execute["OptimizerStep"]

    def observed(instruction: Instruction) -> None:
        before = sent.collective_bytes
        for name, gradient in gradients_of(engine):
            assert gradient is not None, name
            seen[name] = gradient.detach().float() / engine.gradients.scale
        sent.collective_bytes = before
        step(instruction)

    engine.execute["OptimizerStep"] = observed
    return seen


def watch_contexts(engine: UnetPipelineEngine) -> list[int]:
    """Fill the returned list with the number of micro-batches whose text this rank holds, after each instruction."""
    contexts: list[weakref.ref[Tensor]] = []
    counts: list[int] = []

    def watch(execute: Callable[[Instruction], None], instruction: Instruction) -> None:
        execute(instruction)
        if instruction.name == "LoadMicroBatch":
            context = engine._flight(instruction).context
            assert context is not None
            contexts.append(weakref.ref(context))
            del context
        counts.append(sum(held() is not None for held in contexts))

    for name, execute in engine.execute.items():
        engine.execute[name] = functools.partial(watch, execute)
    return counts


def farthest_prediction(engine: UnetPipelineEngine, spec: RunSpec, precision: Precision) -> float:
    """Largest difference between predictions through the stages, each with its own text, and in one process."""
    layers, text, images = layers_of(spec), spec.unet.text, 2
    assert text is not None and text.pooled_channels is not None
    pooled, tokens = text.pooled_channels + SIZES, (images, text.tokens, text.context_channels)
    modules = nn.ModuleList(build_awake_layer(layer, i, spec.train.seed) for i, layer in enumerate(layers)).eval()
    modules.to(device(), DTYPES[precision])
    found = [0.0]

    def drawn(number: int, *shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(device())

    def inputs(number: int) -> tuple[Tensor, ...]:
        t = torch.full((images,), 100 * number, device=device())
        return drawn(number, images, *spec.data.shape), t, drawn(number, images, pooled)

    def take(number: int, prediction: Tensor) -> None:
        set_context(transformer_blocks(modules), drawn(number, *tokens))
        carry: Any = inputs(number)
        for layer in modules:
            carry = layer(carry)
        found.append(difference(prediction, carry.float()))

    ForwardPipeline(engine, images).run(5, inputs, take, context=lambda number: drawn(number, *tokens), depth=3)
    assert len(found) == (6 if engine.is_first_stage() else 1)
    return max(found)


def sent_by(case: Case, spec: RunSpec, programs: Sequence[Program], stage: int, place: int) -> list[float]:
    """Bytes of messages and of collectives that a rank of the pipeline, at its ``place`` in a space group, sends in a
    step, as the planner counts them."""
    bounds, reductions = case.bounds(case.layers(spec)), weight_passes(programs, case.schedule)
    resolved = case.resolved(spec.train.batch_images)
    sizes = [spec.data.size]
    if spec.data.buckets is not None:
        turn = resolved.layout.micro_batch_images * case.replicas
        sizes = [BUCKETS[bucket_at(turn * number)] for number in range(case.micro_batches)]
    kind: dict[str, Any] = {
        "arithmetic_bytes": arithmetic_dtype(device().type, DTYPES[case.precision]).itemsize,
        "gives_gradients": device().type == "cuda",
    }
    lists = [layers_of_rank(shared_layers(case.layers(spec, size), resolved.layout), place) for size in sizes]
    exchanges = [run_exchange(resolved, layers, bounds, reductions, **kind) for layers in lists]
    messages = sum(sum(sent.messages[max(stage - 1, 0) : stage + 1]) for sent in exchanges) / len(exchanges)
    messages += sum(sent.swaps[stage] for sent in exchanges) / len(exchanges)
    sums = sum(sent.sums[stage] for sent in exchanges) / len(exchanges)
    return [float(messages), exchanges[0].gradients[stage] + exchanges[0].weights[stage] + sums]


def sent_for_borders(engine: UnetPipelineEngine) -> float:
    """Bytes of a step that the planner does not count: ZeRO-2 reduces a chunk whole, also in passes for some of it.

    Only a chunk in which another phase or kind of pass begins has gradients of several, the last one has padding.
    """
    own = engine.gradients
    if not isinstance(own, FlatGradients) or not own._reduces:
        return 0.0
    elements = 0
    for key, passes in gradient_passes(engine.programs[engine.stage_id]).items():
        buckets = own._passes[key].buckets
        left = [len(own._chunks[one.chunk].weights) - sum(stop - start for start, stop in one.runs) for one in buckets]
        assert sum(map(bool, left)) <= 2
        elements += passes * sum(left)
    replicas = own._replicas.size
    return elements * own._flat.wire.itemsize * (replicas - 1) / replicas


SECTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "heads": {"unet": {"head_channels": 4, "time_conditioning": "scale_shift"}},
    "edm": {"diffusion": {"schedule": "edm", "objective": "v"}},
    "flow": {"diffusion": {"schedule": "flow", "objective": "velocity", "times": "uniform", "shift": 3.0}},
    "weighted": {
        "diffusion": {"objective": "v", "weighting": "p2", "zero_terminal_snr": True, "input_perturbation": 0.1}
        | {"multires_noise": 0.9, "timestep_range": [500, 1000]},
        "data": {"source": "folder", "path": None, "sources": [{"path": "a"}, {"path": "b", "loss_weight": 0.25}]},
    },
    "rectangles": {"unet": {"attention_resolutions": [], "attention_levels": [1]}, "data": {"image_size": (8, 16)}},
    "uneven": {"unet": {"attention_resolutions": [], "attention_levels": [1]}, "data": {"image_size": (12, 4)}},
    "cut": {  # latents, a cut image's latents and a hole: 9 channels, masks, and captions whose draw drops both
        "data": {"autoencoder": "vae", "channels": 4, "mask": "alpha", "horizontal_flips": True}
        | {"condition": {"kind": "cut_out", "drop": 0.3}},
        "diffusion": {"objective": "v"},
        "sampler": {"clip": "none"},
    },
    "buckets": {
        "data": {"buckets": {"step": 8}},
        "unet": {"dropout": 0.0},
        "diffusion": {"schedule": "flow", "objective": "velocity", "shift": 2.0, "shift_size": 8},
    },
}
"""Sections of the specs that differ from those of the tiny U-Net."""


def spec_of(compiled: bool, process: Process = "plain") -> RunSpec:
    """The spec of a case; a U-Net that is compiled has few shapes of layers, since tracing each takes long."""
    sections = SECTIONS.get(process, {})
    if process in ("text", "caption", "buckets", "cut"):
        tokens = 227 if process == "caption" else 5
        return tiny_text_spec(levels=2 if process == "text" else 1, tokens=tokens, **sections)
    if process in ("stored", "reduced", "regression"):
        return fields_spec(process)
    few: dict[str, Any] = {"attention_resolutions": [], "multipliers": [1, 1]} if compiled else {}
    return tiny_spec(**{**sections, "unet": few | sections.get("unet", {})})


def fields_spec(process: Process) -> RunSpec:
    """Masked fields with weighed channels, constants, a grid, a vector and a condition: stored, or made and noised, or
    that from which they are regressed."""
    condition: dict[str, Any] = {"kind": "stored", "channels": 3, "normalise": "range", "drop": 0.3}
    if process == "reduced":
        condition = {"kind": "reduced", "factor": 2, "resize": "bicubic", "noise": 0.5, "normalise": "statistics"}
    condition |= {"constants": ["height"], "constant_channels": 1, "grid_channels": 4}
    data: dict[str, Any] = {"source": "arrays", "path": "fields.npz", "image_size": [8, 16], "channels": 2}
    data |= {"values": "float32", "normalise": "statistics", "mask": "nan", "flips_negate": [1]}
    return tiny_spec(
        data=data | {"condition": {**condition, "vector": ["hours"], "vector_size": 2}},
        unet={"attention_resolutions": [], "attention_levels": [1]},
        diffusion={"channel_weights": [0.5, 2.0], "objective": "regression" if process == "regression" else "v"},
        sampler={"clip": "none"},
    )


def layers_of(spec: RunSpec, size: tuple[int, int] | None = None) -> tuple[Layer, ...]:
    """The layers of a spec's U-Net, for images of its size or another."""
    return unet_layers(spec.unet, replace(spec.data.interface, size=size or spec.data.size))


def first_moment(engine: UnetPipelineEngine, piece: insides.OwnedPiece) -> Tensor:
    """Adam's first moment of a piece, in fp32."""
    if not isinstance(engine.basic_optimizer, Adam8bit):
        return piece.of(engine.basic_optimizer.state[piece.master]["exp_avg"])  # on the host with offload
    return decoded(piece, engine.basic_optimizer.fragments(piece)[0])


def decoded(piece: insides.OwnedPiece, fragment: Fragment) -> Tensor:
    """A moment of a piece, in fp32."""
    if fragment.scales is None:
        return fragment.values
    scales = fragment.scales.repeat_interleave(BLOCK)[piece.first % BLOCK :][: piece.length]
    return code_of(fragment.kind, scales.device).decode(fragment.values, scales)


def count_swaps(engine: UnetPipelineEngine) -> list[object]:
    """Fill the returned list with the swaps of this rank."""
    group, found = engine.module.space, list[object]()
    swap = group.swap

    def counted(*what: Any) -> Any:
        found.append(what[1])
        return swap(*what)

    group.swap = counted
    return found


def swaps_in_a_step(engine: UnetPipelineEngine) -> int:
    """Number of swaps of this rank in a step, as the planner counts them."""
    ends, interval = engine.module.phase_bounds, engine.module.activation_checkpoint_interval
    passes = [swaps_of(engine.module.unet_layers[first:stop], interval) for first, stop in ends]
    return engine.micro_batches * sum(one.number for both in passes for one in both)


def run_case(case: Case) -> list[dict[str, Any]]:
    """Train the case next to its reference; one record a step."""
    spec = spec_of(case.compile, case.process)
    engine = case.engine(spec)
    if case.random_programs is not None:
        engine.follow(random_programs(case.schedule, case.micro_batches, case.stages, case.random_programs))
    engine.warm_up(engine.micro_batch_size, gradients=True)
    warm = counters["stats"]["unique_graphs"]
    engine._cautious_steps = 1  # messages of the second step go from device to device on GPUs as well
    captions = case.process in ("text", "caption") and not case.compile
    farthest = farthest_prediction(engine, spec, case.precision) if captions else 0.0
    sent = SentBytes()
    seen = watch_gradients(engine, sent)
    contexts = watch_contexts(engine) if engine.readers else []
    expected_sent = sent_by(case, spec, engine.programs, engine.stage_id, engine.module.space.rank)
    expected_sent[1] += sent_for_borders(engine)
    swaps = count_swaps(engine)
    # Compiled layers run eagerly where operators are watched; each of these processes sends the same bytes.
    counting, records = not case.compile and case.process in COUNTED, []
    ways, frozen = (case.precision, case.compile, case.process), bits_of(engine, frozen=True)
    for step, expected in enumerate(expected_steps(*ways, case.layers(spec))):
        with sent if counting and step == 0 else contextlib.nullcontext():
            loss_here = engine.train_batch(micro_batches(engine, global_batch(spec, step)))
        loss_here = loss_here / (case.replicas * case.tensor * case.space)
        everywhere = all_gather_objects(loss_here.item(), float)
        moment_errors = dict[str, float]()
        for piece in engine.gradients.owned():
            whole = expected.moments[piece.name]
            own = whole if piece.shard is None else part_of(whole, piece.shard)
            own = own[piece.first : piece.first + piece.length]
            found = difference(first_moment(engine, piece).to(own.device), own, whole) / expected.cancelled[piece.name]
            moment_errors[piece.name] = max(found, moment_errors.get(piece.name, 0.0))
        norm = torch.stack([gradient.norm() for gradient in expected.gradients.values()]).norm().item()
        records.append(
            {
                "loss": sum(everywhere),
                "expected_loss": expected.loss,
                "gradient_norm": engine.gradients.norm(),
                "expected_gradient_norm": norm,
                "names": list(expected.gradients),
                "contexts": [max(contexts, default=0), *contexts[-1:]],
                "farthest": farthest,
                "most_kept": most_kept(engine.programs[engine.stage_id]),
                "errors": {name: error_of(engine, name, seen[name], expected) for name in seen},
                "moment_errors": moment_errors,
                "stage": engine.stage_id,
                "whole": bits_of(engine),
                "unchanged": bits_of(engine, frozen=True) == frozen,
                "coordinates": [engine.stage_id, engine.grid.get_data_parallel_id(), engine.module.tensor.rank],
                "sent": [sent.message_bytes, sent.collective_bytes] if counting else None,
                "expected_sent": expected_sent,
                "swaps": [len(swaps), (step + 1) * swaps_in_a_step(engine)],
                "loss_scale": float(engine.gradients.scale),
                "graphs": [warm, counters["stats"]["unique_graphs"]],
            }
        )
    del engine.basic_optimizer.param_groups[1:]  # of other rates, which DeepSpeed does not know
    engine.destroy()
    return records


def compile_without_code() -> None:
    """Let ``torch.compile`` trace and differentiate, which is where layers and engines meet it, and leave out the
    building of code, which takes a minute a U-Net: ``tests/unet/test_model.py`` does it."""
    model.torch.compile = functools.partial(torch.compile, backend="aot_eager")


@contextlib.contextmanager
def groups_of_its_own() -> Iterator[None]:
    """Engines that are built inside have process groups that end with it: DeepSpeed makes a dozen for each engine, and
    gloo's thread of each wakes a hundred times a second."""
    deepspeed.utils.groups._clone_world_group()
    value_groups()
    lasting = set(distributed_c10d._world.pg_map)
    yield
    barrier()
    for group in [group for group in distributed_c10d._world.pg_map if group not in lasting]:
        with contextlib.suppress(RuntimeError):  # one that is written in Python has no name by which to end it
            torch.distributed.destroy_process_group(group)


def report_cases(run: Callable[[Any], Any]) -> None:
    """A worker's program: run every case of the file in one launch and write what came of them."""
    cases, folder = sys.argv[-2:]
    use_host_accelerator()
    torch.set_num_threads(1)
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]) % max(get_accelerator().device_count(), 1))
    with process_group():
        pipeline_module.build_layer = build_awake_layer
        report = []
        for case in json.loads(Path(cases).read_text()):
            with groups_of_its_own():
                report.append(run(case))
        Path(folder, f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(report))
        barrier()


def run_cases(processes: int, script: Path, cases: list[Any], folder: Path, **environment: str) -> list[list[Any]]:
    """Each rank's report of each case, ``[rank][case]``, by a script that calls :func:`report_cases`."""
    file = write_json(folder / "cases.json", cases)
    done = run_ranks(processes, script, str(file), str(folder), **environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes)]


if __name__ == "__main__":
    compile_without_code()
    with patch.object(bf16_optimizer, "see_memory_usage"):  # collects garbage, for seconds
        report_cases(lambda case: run_case(Case.of(case)))
