"""One rank of the sampling's ladder: what the pipeline draws and measures equals plain PyTorch, and disturbs nothing.

    python tests/training/validation_worker.py CASES.json REPORT_FOLDER

Rank r writes ``REPORT_FOLDER/rank{r}.json``: a record for each case.
"""

import contextlib
import itertools
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ddpm_ds.config.spec import EmaSpec, RunSpec
from ddpm_ds.data.cache import DatasetCache
from ddpm_ds.data.held_out import Subset, parts
from ddpm_ds.data.latents import to_pixels
from ddpm_ds.data.text import Encoded
from ddpm_ds.diffusion.condition import Prompts, Scale
from ddpm_ds.diffusion.process import Diffusion
from ddpm_ds.diffusion.samplers import Drawing, Sampler
from ddpm_ds.ground.keyed import SAMPLE_SEED, Stream, normal
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.processes.watchdog import Watchdog
from ddpm_ds.schema.layout import AcrossHosts, Schedule
from ddpm_ds.training.ema import Ema
from ddpm_ds.training.held_out_loss import NOISE_SEED, HeldOutLoss
from ddpm_ds.training.validation import Previews, measured
from ddpm_ds.unet.layers import unet_layers
from ddpm_ds.unet.model import UNet
from ddpm_ds.unet.space import SpaceGroup
from ddpm_ds.unet.spec import Interface
from ddpm_ds.unet.tensor_group import ALONE
from tests.launching import tiny_spec
from tests.pipeline.batches import BUCKETS, global_batch
from tests.pipeline.ladder_worker import Case, Precision, build_awake_layer, report_cases

HELD_OUT = 13
TOKENS, WIDTH, POOLED = 5, 12, 10
FEW: dict[str, Any] = {"multipliers": [1], "attention_resolutions": []}
"""Layers of a run without text that two stages share; four take more."""
READS = {"context_channels": WIDTH, "tokens": TOKENS, "blocks": [1], "heads": [2]}
TEXT: tuple[dict[str, Any], dict[str, Any]] = (
    {"source": "folder", "path": "pictures", "text": {"encoders": "encoders"}},
    {**FEW, "text": {**READS, "pooled_channels": POOLED, "size_channels": 8}},
)
"""Data and U-Net of a run with text."""
WATCHDOG = cast(Watchdog, SimpleNamespace(progress=lambda: None, pause=contextlib.nullcontext))


def engine_of(micro_batch_size: int, **module: object) -> Any:
    """Stand-in for the engine of one process, for pictures and losses; ``module`` is about its part of the U-Net."""
    grid = SimpleNamespace(get_data_parallel_id=lambda: 0, get_data_parallel_group=lambda: None)
    return SimpleNamespace(
        micro_batch_size=micro_batch_size,
        num_stages=1,
        dp_world_size=1,
        replicas=1,
        replica=0,
        ranks_of_image=1,
        grid=grid,
        device=torch.device("cpu"),
        is_first_stage=lambda: True,
        module=SimpleNamespace(tensor=ALONE, space=SpaceGroup(), **module),
        images_seen=8,
        global_steps=0,
    )


@dataclass(frozen=True)
class Look:
    """A layout, and the pictures drawn on it."""

    stages: int
    replicas: int
    precision: Precision = "fp32"
    zero: int = 2
    guidance: float = 1.0
    kind: str = "dpm_solver"
    count: int = 10
    schedule: Schedule = "1f1b"
    across: AcrossHosts = "stages"
    process: dict[str, Any] = field(default_factory=dict)
    between: tuple[float, float] = (0.0, 1e6)
    text: bool = False
    buckets: bool = False
    """Whether images are of several sizes, in a run with text."""
    space: int = 1
    """Number of ranks that share each image."""

    def spec(self) -> RunSpec:
        sampler = {"kind": self.kind, "steps": 3, "guidance": self.guidance, "guidance_between": self.between}
        data, unet = TEXT if self.text else ({}, FEW if self.stages < 4 else {})
        if self.buckets:
            data, unet = {**data, "buckets": {"step": 8}}, {**unet, "dropout": 0.0}
        return tiny_spec(
            diffusion=self.process,
            sampler=sampler,
            samples={"count": self.count},
            data={"held_out_images": HELD_OUT, **data},
            unet=unet,
        )


def store_of(spec: RunSpec) -> DatasetCache:
    """Sixty images that any process makes alike, or of each bucket twenty."""
    if spec.data.buckets is None:
        return store_of_size(spec, (8, 8), 60)
    first, *others = (store_of_size(spec, size, 20) for size in BUCKETS)
    return replace(first, buckets=tuple(others))


def store_of_size(spec: RunSpec, size: tuple[int, int], count: int) -> DatasetCache:
    """Images of one size."""
    draws = np.random.default_rng(5)
    images = draws.integers(0, 256, (count, 1, *size), np.uint8)
    arrays = {"images": images}
    labels = draws.integers(0, 10, count)
    if spec.data.text is not None:
        arrays["text"] = draws.standard_normal((count, TOKENS, WIDTH), np.float32).astype(np.float16)
        arrays["pooled"] = draws.standard_normal((count, POOLED), np.float32).astype(np.float16)
        arrays["sizes"] = draws.integers(4, 20, (count, 6)).astype(np.float32)
    return in_memory(labels, arrays)


def in_memory(labels: Any, arrays: dict[str, Any], statistics: Any = None, constants: Any = None) -> DatasetCache:
    """A cache of arrays by field."""
    fields: dict[str, Any] = {
        name: SimpleNamespace(read=lambda at, array=array: array[at], shape=array.shape)
        for name, array in arrays.items()
    }
    meta: Any = SimpleNamespace(statistics=statistics or {}, count=len(labels), fields={})
    return DatasetCache(Path(), meta, fields.pop("images"), labels, fields, constants)


NO_IMAGES = Subset(in_memory(np.zeros(0), {"images": np.zeros((0, 1, 8, 8), np.uint8)}), np.zeros(0, np.int64))


def reference(spec: RunSpec) -> UNet:
    """The U-Net in one process, in fp32."""
    layers = unet_layers(spec.unet, Interface(channels=1, size=(8, 8)))
    unet = UNet(layers, spec.train.seed)
    for index in range(len(layers)):
        unet.layers[index] = build_awake_layer(layers[index], index, spec.train.seed)
    return unet.eval().requires_grad_(False)


def prompts_of(spec: RunSpec) -> Prompts | None:
    """Three prompts, which the images take in turn."""
    if spec.unet.text is None:
        return None
    generator = torch.Generator().manual_seed(9)
    encoded = Encoded(torch.randn(4, TOKENS, WIDTH, generator=generator), torch.randn(4, POOLED, generator=generator))
    first, last = (Encoded(*(part[at] for part in encoded if part is not None)) for at in (slice(3), slice(3, 4)))
    device = torch.device("cpu")
    return Prompts(spec.unet.text, first, last, size=(8, 8), device=device, texts=("one", "two", "three"))


def drawn_alone(spec: RunSpec, unet: UNet) -> Tensor:
    """Images that ``ddpm-ds sample`` would draw, as one batch in one process."""
    index, prompts = torch.arange(spec.samples.count), prompts_of(spec)
    condition, dropped = (None, None) if prompts is None else prompts.beside(None, index)
    drawing = Drawing(
        Sampler(spec.sampler, spec.diffusion),
        seed=SAMPLE_SEED,
        index=index,
        shape=(1, 8, 8),
        labels=index % 10,
        no_label=10,
        conditions=(condition, dropped),
    )
    for number in range(drawing.calls):
        drawing.take(unet(*drawing.inputs(), context=drawing.context(number)))
    return to_pixels(None)(drawing.images())


def measured_alone(spec: RunSpec, unet: UNet, store: DatasetCache) -> dict[str, float]:
    """The held-out loss in one process, all images of a size at once, without the weights of the loss."""
    diffusion, values = Diffusion(spec.diffusion, 0, "cpu"), dict[str, float]()
    places = torch.arange(HELD_OUT).split([len(at) for at in store.by_bucket(held_out_of(spec, store))])
    for cache, positions, index in zip(store.caches, store.by_bucket(held_out_of(spec, store)), places, strict=True):
        x0 = Scale().to_unit(torch.from_numpy(cache.images.read(positions)))
        labels = torch.from_numpy(cache.labels[positions])
        told: tuple[Tensor, ...] = ()
        read = None
        if spec.data.text is not None:
            read, pooled, sizes = (
                torch.from_numpy(cache.fields[name].read(positions)) for name in ("text", "pooled", "sizes")
            )
            told = (torch.cat((pooled.float(), sizes), dim=1),)
        for percent in range(10, 100, 10):
            time, stream = diffusion.levels.quantile(percent)
            assert spec.diffusion.schedule == "edm" or (time, stream) == (10 * percent - 1, Stream.HELD_OUT + time)
            t = torch.full((len(index),), time)
            eps = normal(NOISE_SEED, stream, index, x0[0].numel()).view_as(x0)
            prediction = unet(diffusion.noised(x0, t, eps), t, labels, *told, context=read)
            name, share = f"validation/loss_t{percent}", len(index) / HELD_OUT
            loss = diffusion.errors(prediction, x0, eps, t).mean().item()
            values[name] = values.get(name, 0.0) + share * loss
    return {"eval/loss": sum(values.values()) / 9, **values}


def held_out_of(spec: RunSpec, store: DatasetCache) -> Any:
    """Positions of the images that are held out."""
    return parts(spec.data, store, store)[1].positions


def weights(engine: UnetPipelineEngine) -> list[Tensor]:
    engine.gradients.gather_weights()
    return [parameter.detach().clone() for parameter in engine.module.parameters()]


def micro_batches(engine: UnetPipelineEngine, spec: RunSpec) -> Any:
    batch, micro = global_batch(spec, 0), engine.micro_batch_size
    replicas, replica = engine.replicas, engine.replica
    firsts = [(number * replicas + replica) * micro for number in range(engine.micro_batches)]
    return iter([batch.each(itemgetter(slice(first, first + micro))) for first in firsts])


def run_case(look: Look) -> dict[str, Any]:
    spec = look.spec()
    deep = look.schedule == "folded" and look.stages > 2
    case = Case(
        look.stages,
        look.replicas,
        look.zero,
        look.precision,
        0,
        micro_batches=8 if deep else 4,
        across=look.across,
        schedule=look.schedule,
        space=look.space,
    )
    engine = case.engine(spec)
    unet, store = reference(spec), store_of(spec)
    record = dict[str, Any]()

    ema = Ema(engine, EmaSpec())
    for shadow in ema.shadows:
        shadow.mul_(0.5)
    before, held = weights(engine), [shadow.clone() for shadow in ema.shadows]
    with ema.applied():
        Previews(spec, engine, WATCHDOG, NO_IMAGES, prompts_of(spec)).draw()
        halved = weights(engine)
    record["averages_used"] = all(
        torch.allclose(half.float(), 0.5 * full.float(), rtol=1e-3, atol=1e-7)
        for half, full in zip(halved, before, strict=True)
    )
    record["put_back"] = all(
        torch.equal(*pair)
        for pair in itertools.chain(zip(weights(engine), before, strict=True), zip(ema.shadows, held, strict=True))
    )

    drawn = Previews(spec, engine, WATCHDOG, NO_IMAGES, prompts_of(spec)).draw()
    if dist.get_rank() == 0:
        assert drawn is not None
        images = drawn.images
        difference = (images.int() - drawn_alone(spec, unet).int()).abs()
        record |= {"shape": list(images.shape), "image": difference.max().item()}
        record |= {"pixels": (difference > 0).float().mean().item(), "expected": measured_alone(spec, unet, store)}
    else:
        assert drawn is None
    positions, images = held_out_of(spec, store), engine.micro_batch_size
    losses = HeldOutLoss(spec, engine.device, store, positions, images=images)
    record["held_out"] = measured(losses, engine, WATCHDOG)
    if look.text:  # what is drawn and measured draws no random number, text or not
        engine.destroy()
        return {**record, "training": engine.module.training, "undisturbed": True}

    loss = engine.train_batch(micro_batches(engine, spec))
    record["training"] = engine.module.training
    fresh = case.engine(spec)
    record["undisturbed"] = torch.equal(loss, fresh.train_batch(micro_batches(fresh, spec))) and all(
        torch.equal(*pair) for pair in zip(weights(engine), weights(fresh), strict=True)
    )
    engine.destroy()
    fresh.destroy()
    return record


if __name__ == "__main__":
    report_cases(lambda case: run_case(Look(**case)))
