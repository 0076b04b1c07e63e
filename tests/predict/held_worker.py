"""One rank: train layouts on a pipeline and count the bytes of all tensors in the fullest moment of a step.

    python tests/predict/held_worker.py CASES.json REPORT_FOLDER

CASES.json holds a spec and for each case a DeepSpeed JSON. Rank r writes ``REPORT_FOLDER/rank{r}.json``: a number each.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ddpm_ds.config.ds_config import resolve
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.data.loader import MicroBatch
from ddpm_ds.pipeline.build import build_engine, use_host_accelerator
from ddpm_ds.pipeline.cuts import partition
from ddpm_ds.processes.process_group import process_group
from ddpm_ds.processes.ranks import set_environment
from ddpm_ds.train.ema import Ema
from ddpm_ds.train.objective import Denoising
from ddpm_ds.unet.layers import unet_layers


def micro_batches(spec: RunSpec, images: int) -> Iterator[MicroBatch]:
    """Black images without end."""
    shape = (images, spec.data.channels, spec.data.image_size, spec.data.image_size)
    while True:
        labels = torch.zeros(images, dtype=torch.int64)
        yield MicroBatch(torch.zeros(shape, dtype=torch.uint8), labels, torch.arange(images))


def living_bytes() -> int:
    """Bytes of the tensors that Python knows."""
    gc.collect()
    storages = [thing.untyped_storage() for thing in gc.get_objects() if isinstance(thing, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def peak_bytes(spec: RunSpec, config: dict[str, object]) -> int:
    """Bytes in the fullest moment of the second step on this rank, when the optimizer's state is there."""
    ds = resolve(config, spec, world_size=dist.get_world_size(), stages=None, path="case")
    layers = unet_layers(spec.unet, image_channels=spec.data.channels, image_size=spec.data.image_size)
    assert ds.partition != "measured"
    bounds = partition(layers, ds.layout.stages, ds.partition, ds.schedule)
    others = living_bytes()
    objective = Denoising(spec, torch.device("cpu"))
    engine = build_engine(layers, bounds, ds, objective, seed=0)
    ema, batches = Ema(engine, spec.ema), micro_batches(spec, ds.layout.micro_batch_images)
    engine.train_batch(batches)
    ema.update()
    held = living_bytes() - others
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        engine.train_batch(batches)
    peak = held
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def main(cases: Path, reports: Path) -> None:
    use_host_accelerator()
    values = json.loads(cases.read_text())
    spec = RunSpec.model_validate_json(values["spec"])
    set_environment()
    with process_group():
        peaks = [peak_bytes(spec, config) for config in values["configs"]]
        (reports / f"rank{dist.get_rank()}.json").write_text(json.dumps(peaks))


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[-2:]))
